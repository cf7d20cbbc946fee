"""What keeps the DAG file light, and Airflow's package from being shadowed."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.dags.conftest import ROOT, in_main_environment, write_surfaces

DAG_FILES = sorted((ROOT / "airflow/dags").glob("*.py"))
PARSES = """
import json, sys
import typer
from jobs.cli.app import app
command = typer.main.get_command(app)
for words in json.loads(sys.argv[1]):
    context = command.commands[words[0]].make_context(words[0], list(words[1:]))
    assert context.params["output"] == "json", words
print("all parse")
"""
STEPS = ("plan", "prepare", "score", "audit", "publish", "report")
SPARK = {"launcher": "spark", "spark": {"application": "jobs/spark_submit.py"}}


def rendered(dag, task_id: str, **params: str) -> list[str]:
    """A step's words as Airflow's templates make them, for a run of a partition."""
    task = dag.get_task(task_id)
    words = getattr(task, "application_args", None) or task.command[3:]
    context = {
        "params": {**dag.params.dump(), **params},
        "dag_run": SimpleNamespace(partition_key="2026-11-28"),
        "ti": SimpleNamespace(xcom_pull=lambda task_ids: {"run_id": f"id-of-{task_ids}"}),
    }
    templates = dag.get_template_env()
    return [word for one in words if (word := templates.from_string(one).render(**context))]


def test_no_init_file_shadows_airflow():
    assert not list((ROOT / "airflow").glob("**/__init__.py"))


@pytest.mark.parametrize("file", DAG_FILES, ids=lambda f: f.name)
def test_dag_files_import_only_airflow_and_the_standard_library(file):
    allowed = {*sys.stdlib_module_names, "airflow", "yaml", "openlineage"}
    allowed |= {other.stem for other in DAG_FILES}
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            assert name.partition(".")[0] in allowed, f"{file.name} imports {name}"
            if name.startswith("airflow"):
                # plugins_manager: whether Airflow knows our timetable; nothing of the SDK says it.
                public = name.split(".")[1] in ("sdk", "providers", "plugins_manager")
                assert public, f"{file.name}: {name}"


@pytest.mark.parametrize("path", [str(ROOT), ""], ids=["PYTHONPATH", "current folder"])
def test_the_installed_airflow_wins_over_the_folder(path):
    pytest.importorskip("airflow.sdk")
    code = "import sys, airflow, airflow.sdk; print(airflow.__file__, airflow.sdk.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,  # first on sys.path with -c
        env={"PYTHONPATH": path, "AIRFLOW_HOME": tempfile.gettempdir()},
    )
    assert done.returncode == 0, done.stderr
    assert all("site-packages" in file for file in done.stdout.split())


def test_the_dag_file_is_parsed_quickly_and_loads_no_heavy_library(tmp_path, capsys):
    pytest.importorskip("airflow.sdk")
    code = """
import json, sys, time
for absent in ("torch", "pyspark"):
    sys.modules[absent] = None  # importing it fails, as where it is not installed
from airflow.dag_processing.dagbag import DagBag
start = time.perf_counter()
bag = DagBag(sys.argv[1])
print(json.dumps({
    "seconds": time.perf_counter() - start,
    "errors": bag.import_errors,
    "dags": sorted(bag.dags),
    "loaded": sorted({name.partition(".")[0] for name, module in sys.modules.items() if module}),
}))
"""
    local = {f"s{n}": {"config": "run.yaml"} for n in range(49)}
    surfaces = write_surfaces(tmp_path, **local, cluster={"config": "run.yaml"} | SPARK)
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "airflow/dags")],
        capture_output=True,
        text=True,
        env={"AIRFLOW_HOME": str(tmp_path), "NIGHTSHELF_SURFACES": str(surfaces)},
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["errors"] == {}
    assert len(found["dags"]) == 50
    heavy = {"torch", "transformers", "pyspark", "polars", "pyarrow", "jobs", "pipelines", "engine"}
    assert not heavy & set(found["loaded"])
    with capsys.disabled():  # time is told and decides nothing
        sys.stdout.write(f"\n50 DAGs parsed in {found['seconds']:.2f} s\n")


def test_every_command_of_a_dag_parses_with_the_command_line(dags, tmp_path):
    pytest.importorskip("airflow.sdk")
    bag = dags(write_surfaces(tmp_path, here={"config": "run.yaml"}, there={"config": "c"} | SPARK))
    assert bag.import_errors == {}
    here, there = bag.dags["nightshelf_here"], bag.dags["nightshelf_there"]
    commands = [rendered(here, step) for step in STEPS]
    commands += [rendered(here, "plan", task=task) for task in ("score", "generate")]
    commands.append(rendered(there, "score"))
    assert commands[0] == [
        "plan", f"{tmp_path}/run.yaml", "--ds=2026-11-28", '--set=surface="here"', "--output=json",
    ]  # fmt: skip
    assert commands[2] == ["score", *commands[0][1:], "--run-id=id-of-prepare"]
    assert commands[len(STEPS)][-2:] == ["--set=task.generate=null", "--output=json"]
    assert all("--ds=2026-11-28" in words for words in commands)
    assert in_main_environment(PARSES, json.dumps(commands)) == "all parse\n"


def test_a_surface_may_have_any_name_and_paths_start_at_the_file(dags, tmp_path):
    pytest.importorskip("airflow.sdk")
    surface = {
        "config": "../c.yaml",
        "launcher": "spark",
        "spark": {"application": "../jobs/spark_submit.py"},
    }
    (tmp_path / "airflow").mkdir()
    bag = dags(write_surfaces(tmp_path / "airflow", **{"feed home/eu": surface}))
    dag = bag.dags["nightshelf_feed_home_eu"]
    assert dag.params["surface"] == "feed home/eu"
    assert dag.params["config"] == f"{tmp_path}/c.yaml"
    assert dag.get_task("score").application == f"{tmp_path}/jobs/spark_submit.py"
    uri = dag.get_task("publish").outlets[0].uri
    assert uri == "nightshelf://recommendations/feed%20home%2Feu"


def test_what_a_person_types_stays_one_argument(dags, tmp_path):
    pytest.importorskip("airflow.sdk")
    dag = dags(write_surfaces(tmp_path, x={"config": "c"})).dags["nightshelf_x"]
    surface, config = """a b"; rm -rf / #'{{ 7 * 7 }}""", "$(id) {{ 7 * 7 }}.yaml"
    words = rendered(dag, "prepare", surface=surface, config=config)
    assert words[1] == config
    assert words[3].startswith("--set=surface=")
    assert yaml.safe_load(words[3].partition("surface=")[2]) == surface


def test_the_surfaces_of_the_repository_are_valid(dags):
    pytest.importorskip("airflow.sdk")
    bag = dags(ROOT / "airflow/surfaces.yaml")
    assert bag.import_errors == {}
    dag = bag.dags["nightshelf_home"]
    assert Path(dag.params["config"]).exists()
    assert [t.task_id for t in dag.topological_sort()] == [
        "plan", "prepare", "score", "audit", "publish", "report",
    ]  # fmt: skip
    assert dag.tags >= {"nightshelf"}
    assert "Backfill" in dag.doc_md
    assert dag.get_task("score").pool == "gpu"
    assert dag.get_task("plan").pool == "default_pool"
    assert dag.get_task("publish").outlets[0].uri == "nightshelf://recommendations/home"
    assert not dag.catchup


@pytest.mark.parametrize(
    ("surface", "message"),
    [
        ({"config": "c", "shedule": {}}, r"x: unknown \['shedule'\]; known are"),
        ({}, "x: config is missing"),
        ({"config": "c", "launcher": "slurm"}, "x: launcher is local or spark, not 'slurm'"),
        ({"config": "c", "launcher": "spark"}, "x: spark.application is missing"),
        ({"config": "c", "spark_steps": ["audit"]}, r"x: spark_steps may be"),
        ({"config": "c", "schedule": {"corn": "@daily"}}, r"x: schedule has \['corn'\]"),
        ({"config": "c", "schedule": {"timezone": "UTC"}}, r"x: schedule has \['timezone'\]"),
    ],
)
def test_a_wrong_surface_is_an_import_error_that_names_it(dags, tmp_path, surface, message):
    pytest.importorskip("airflow.sdk")
    import re

    bag = dags(write_surfaces(tmp_path, x=surface))
    assert re.search(message, next(iter(bag.import_errors.values())))
