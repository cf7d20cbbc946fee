"""Steps through the real spark-submit: what the application's exit code becomes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("airflow.sdk")

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from nightshelf_spark import NightshelfSparkOperator
from nightshelf_steps import StepFailed

from tests.dags.conftest import PYTHON

SPARK_SUBMIT = Path(PYTHON).parent / "spark-submit"  # of the other environment: see docs/airflow.md
LOCAL = '{"conn_type": "spark", "host": "local[1]"}'


def operator(application: Path, *words: str, **options) -> NightshelfSparkOperator:
    return NightshelfSparkOperator(
        task_id="score",
        step="score",
        options={"application": str(application), **options},
        application_args=["score", *words],
    )


@pytest.fixture
def spark(monkeypatch):
    if not SPARK_SUBMIT.exists():
        pytest.skip("the main environment has no pyspark")
    monkeypatch.setenv("PATH", f"{SPARK_SUBMIT.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYSPARK_PYTHON", PYTHON)
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", LOCAL)


@pytest.mark.parametrize(("code", "final"), [(4, False), (6, True)])
def test_the_application_s_exit_code_decides_on_another_try(spark, tmp_path, code, final):
    application = tmp_path / "app.py"
    application.write_text(f"""print('{{"error": {{"message": "why"}}}}'); exit({code})""")
    with pytest.raises(StepFailed) as err:
        operator(application).execute({})
    assert err.value.exit_code == code
    assert err.value.reason == "why"
    assert err.value.final is final


def test_the_application_gets_no_empty_words_and_gives_ids_and_counts(spark, tmp_path):
    application = tmp_path / "app.py"
    seen = tmp_path / "seen"
    application.write_text(f"""
import sys
open({str(seen)!r}, 'w').write(repr(sys.argv[1:]))
print('{{"run_id": "a", "rows": 3, "run_dir": "/x"}}')
""")
    done = operator(application, "", "--ds=2026-11-28").execute({})
    assert done == {"run_id": "a", "rows": 3}
    assert seen.read_text() == "['score', '--ds=2026-11-28']"


def test_a_missing_connection_is_an_error_and_not_yarn(tmp_path):
    task = operator(tmp_path / "app.py", conn_id="nobody_made_this")
    with pytest.raises(StepFailed, match="no Airflow connection 'nobody_made_this'") as err:
        task.execute({})
    assert err.value.final


def test_options_are_the_provider_s_own_and_durable_is_off_unless_asked_for(tmp_path):
    assert not operator(tmp_path, executor_memory="4g").durable
    assert operator(tmp_path, durable=True).durable
    assert issubclass(NightshelfSparkOperator, SparkSubmitOperator)
    with pytest.raises(TypeError, match="no_such_option"):
        operator(tmp_path, no_such_option=1)
