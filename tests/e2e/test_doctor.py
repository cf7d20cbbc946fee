"""`nightshelf doctor` says what a machine lacks and what to do; its self-test can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from engine import self_test
from jobs.upkeep import doctor
from tests.factories import tiny_model

ROOT = Path(__file__).parents[2]


def run_doctor(*args: str, first: Path | None = None, before: str = "", **env: str) -> tuple:
    """Exit code and checks by name; `first` stands before everything on the import path."""
    path = os.pathsep.join(str(p) for p in (first, ROOT) if p)
    command = [sys.executable, "-P", "-m", "jobs", "doctor", "--output", "json", *args]
    line = f"{before} exec " + " ".join(f"'{word}'" for word in command)
    done = subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **env},
    )
    assert "Traceback" not in done.stderr, done.stderr
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert (report["status"] == "ok") == (done.returncode == 0)
    return done.returncode, {check["name"]: check for check in report["checks"]}


def test_a_ready_machine_passes_and_scores_as_the_model_does(tmp_path):
    code, checks = run_doctor("--model", tiny_model(tmp_path / "model"))
    assert code == 0, [check for check in checks.values() if not check["ok"]]
    assert f"needed {'>=2.0'}" in checks["numpy"]["detail"]
    assert "24 scores" in checks["self-test, torch backend"]["detail"]
    assert "24 scores" in checks["self-test, fake backend"]["detail"]
    assert "64 tokens" in checks["model loads and scores as its library does"]["detail"]
    assert checks["bfloat16 matmul"]["ok"]
    assert {"Python", "CPU", "GPUs", "memory", "disk here", "open files"} <= checks.keys()


def test_what_is_missing_is_named_with_what_to_do(tmp_path):
    info = tmp_path / "nightshelf-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: nightshelf\nVersion: 9\n"
        "Requires-Dist: numpy>=99\nRequires-Dist: nosuchpackage>=1\nRequires-Dist: polars>=1\n"
        'Requires-Dist: alsonone>=1; extra == "iceberg"\n'
        'Requires-Dist: transformers>=99; extra == "torch"\n'
    )
    code, checks = run_doctor("--backend", "fake", first=tmp_path, before="ulimit -n 256;")
    assert code == 5
    bad = {name for name, check in checks.items() if not check["ok"]}
    assert bad == {"numpy", "nosuchpackage", "open files"}
    assert "needed >=99" in checks["numpy"]["detail"]
    assert checks["nosuchpackage"]["detail"] == "not installed, needed >=1"
    assert all(checks[name]["remedy"] for name in bad)
    optional = checks["alsonone (Iceberg tables)"]
    assert optional["ok"]
    assert optional["detail"] == "not installed (optional)"
    assert ".[iceberg]" in optional["remedy"]
    assert "transformers" not in checks, "the fake backend does without"


def test_a_torch_that_does_not_import_ends_with_5(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.99 is missing')")
    code, checks = run_doctor(first=tmp_path)
    assert code == 5
    failed = checks["self-test, torch backend"]
    assert "libcudart.so.99 is missing" in failed["detail"]
    assert "python -m engine.self_test" in failed["remedy"]


def test_a_model_that_cannot_be_used_ends_with_5(tmp_path):
    code, checks = run_doctor("--model", str(tmp_path))
    assert code == 5
    assert not checks["model"]["ok"]
    assert "not a checkpoint" in checks["model"]["detail"]
    assert checks["self-test, torch backend"]["ok"], "the machine is fine"


def test_tensorrt_llm_that_is_not_there_ends_with_5_and_says_what_to_do():
    code, checks = run_doctor("--backend", "trtllm")
    assert code == 5
    assert all(check["remedy"] for check in checks.values() if not check["ok"])


def test_a_self_test_that_hangs_is_ended():
    (check,) = doctor.self_test("fake", None, limit_s=0.01)
    assert not check.ok
    assert "no answer" in check.detail


def test_wrong_scores_are_found(monkeypatch):
    assert self_test.check_fake().ok
    monkeypatch.setattr(self_test, "fake_log_prob", lambda *_, **__: -1.0)
    assert not self_test.check_fake().ok
    plain = self_test._plain_scores
    monkeypatch.setattr(self_test, "_plain_scores", lambda *args: plain(*args) + 1e-4)
    check = self_test.check_tiny_model("torch", "cpu")
    assert not check.ok
    assert "1.0e-04" in check.detail
    monkeypatch.setattr(self_test, "_plain_scores", lambda *args: plain(*args) * float("nan"))
    assert not self_test.check_tiny_model("torch", "cpu").ok, "NaN is no agreement"


def has_pyspark() -> bool:
    try:
        return bool(metadata.version("pyspark"))
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not has_pyspark(), reason="Java is looked at where pyspark is installed")
def test_a_java_that_is_too_old_for_spark_ends_with_5(tmp_path):
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    java.chmod(0o755)
    code, checks = run_doctor("--backend", "fake", JAVA_HOME=str(tmp_path))
    assert code == 5
    assert not checks["Java (Spark)"]["ok"]
    assert "17" in checks["Java (Spark)"]["remedy"]


def test_people_get_a_table(nightshelf):
    done = nightshelf("doctor", "--backend", "fake")
    assert "ready" in done.out
    assert "what to do" in done.out
