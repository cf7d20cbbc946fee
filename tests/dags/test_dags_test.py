"""`airflow dags test`: a run without a scheduler, its rows beside the command's, its lineage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("airflow.sdk")

from tests.dags.conftest import build, nightshelf, rows, write_surfaces

AIRFLOW = str(Path(sys.executable).parent / "airflow")


def lineage(file: Path) -> list[dict]:
    """Completed events of the publish task."""
    events = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        event
        for event in events
        if event["eventType"] == "COMPLETE" and event["job"]["name"] == "nightshelf_home.publish"
    ]


def test_a_tested_dag_publishes_the_rows_of_the_command_and_reports_its_lineage(tmp_path):
    build(tmp_path, home={})
    surfaces = write_surfaces(
        tmp_path, home={"config": "home/run.yaml", "schedule": {"cron": "0 2 * * *"}}
    )
    events = tmp_path / "events.json"
    transport = {"type": "file", "log_file_path": str(events), "append": True}
    environment = os.environ | {
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "NIGHTSHELF_SURFACES": str(surfaces),
        "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps(transport),
    }
    for words in (
        ["db", "migrate"],
        ["pools", "set", "gpu", "1", "GPUs"],
        ["dags", "test", "nightshelf_home", "2026-11-29T02:00"],
    ):
        done = subprocess.run([AIRFLOW, *words], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    # What the run of the 29th is of: the day before.
    config = tmp_path / "home/run.yaml"
    nightshelf("run", config, "--ds", "2026-11-28", "--set", f"output.path={tmp_path}/cli/out",
               "--set", f"run.work_dir={tmp_path}/cli/runs")  # fmt: skip
    want = rows(tmp_path / "cli", "2026-11-28", "home")
    assert len(want) == 100
    assert rows(tmp_path / "home", "2026-11-28", "home") == want

    published = lineage(events)[-1]
    read = {d["name"]: d["inputFacets"]["inputStatistics"]["rowCount"] for d in published["inputs"]}
    assert read[str(tmp_path / "home/users.parquet")] == 20
    assert len(read) == 4
    (written,) = published["outputs"]
    assert written["name"] == str(tmp_path / "home/out")
    assert written["outputFacets"]["outputStatistics"]["rowCount"] == 100
