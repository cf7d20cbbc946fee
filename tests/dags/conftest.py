"""Airflow has an environment of its own; nightshelf is called as a DAG calls it, by command."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("NIGHTSHELF_PYTHON", str(ROOT / ".venv/bin/python"))  # the main environment
if any(importlib.metadata.distributions(name="apache-airflow")):  # before it is imported
    _home = tempfile.TemporaryDirectory(prefix="airflow-")  # goes with the process
    os.environ["AIRFLOW_HOME"] = _home.name
    os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
    os.environ["AIRFLOW__CORE__DAGS_FOLDER"] = str(ROOT / "airflow/dags")
    os.environ["AIRFLOW__CORE__PLUGINS_FOLDER"] = str(ROOT / "airflow/plugins")

BUILD = """
import sys
from pathlib import Path
import yaml
from tests.factories import write_config, write_inputs
for name, changes in yaml.safe_load(sys.argv[2]).items():
    write_inputs(Path(sys.argv[1]) / name, num_users=20)
    write_config(Path(sys.argv[1]) / name, **{"ds": None, **changes})
"""
ROWS = """
import sys
import polars as pl
rows = pl.read_parquet(sys.argv[1]).sort("user_id", "rank").drop("run_id")
print(rows.write_json())
"""


def nightshelf_env() -> dict[str, str]:
    """Of a command of the main environment: this checkout, one thread."""
    return {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def in_main_environment(code: str, *arguments: str | Path) -> str:
    """Run Python there and return what it prints."""
    done = subprocess.run(
        [PYTHON, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | nightshelf_env(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(folder: Path, **configs: dict) -> None:
    """A folder for each name: tiny inputs and a `run.yaml`: fake backend, no date."""
    in_main_environment(BUILD, folder, yaml.safe_dump(configs))


def nightshelf(*words: str | Path, check: int = 0) -> dict:
    """The command line; the last line of its output."""
    done = subprocess.run(
        [PYTHON, "-m", "jobs", *map(str, words), "--output", "json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | nightshelf_env(),
    )
    assert done.returncode == check, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def rows(folder: Path, ds: str, surface: str) -> list[dict]:
    """What is published, without the run's id."""
    return json.loads(in_main_environment(ROWS, folder / f"out/ds={ds}/surface={surface}"))


def write_surfaces(folder: Path, defaults: dict | None = None, **surfaces: dict) -> Path:
    """A surfaces.yaml over the main environment's command."""
    path = folder / "surfaces.yaml"
    start = {"command": [PYTHON, "-m", "jobs"], "env": nightshelf_env(), "retry_delay_s": 2}
    path.write_text(yaml.safe_dump({"defaults": start | (defaults or {}), "surfaces": surfaces}))
    return path


@pytest.fixture
def dags(monkeypatch):
    """The DAGs of a surfaces.yaml, as Airflow's own loader reads them."""

    def load(surfaces: Path):
        from airflow.dag_processing.dagbag import DagBag

        monkeypatch.setenv("NIGHTSHELF_SURFACES", str(surfaces))
        return DagBag(str(ROOT / "airflow/dags"))

    return load
