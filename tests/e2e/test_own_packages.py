"""Other projects have packages named `jobs` and `schemas` too: ours are used all the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nightshelf
from nightshelf import own_packages
from tests.cases.helpers import PARTITION, published
from tests.factories import hostile_packages, write_config, write_inputs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A wheel, built and installed into a folder of its own; the script is in its `bin`."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("nightshelf", *own_packages.PACKAGES):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    command = [*pip, "install", *offline, "--target", str(folder / "site"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture
def hostile(tmp_path) -> Path:
    return hostile_packages(tmp_path / "theirs")


def start(command: list[str], site: Path, *first: Path, cwd: Path) -> subprocess.CompletedProcess:
    """A command of the installed wheel, with other folders before it on the path."""
    path = os.pathsep.join(str(folder) for folder in (*first, site))
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=240)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def script(site: Path) -> list[str]:
    return [sys.executable, str(site / "bin/nightshelf")]


def module(site: Path) -> list[str]:
    return [sys.executable, "-m", "nightshelf"]


@pytest.mark.parametrize("command", [script, module])
def test_a_wheel_runs_beside_packages_of_the_same_names(command, site, hostile, tmp_path):
    """On PYTHONPATH and in the current folder, in the command's process and in its workers."""
    write_inputs(tmp_path)
    config = write_config(tmp_path, run__workers=2, run__shard_users=20)
    run = [*command(site), "run", str(config), "--output", "json"]
    done = start(run, site, hostile, cwd=hostile)
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout.splitlines()[-1])
    assert manifest["status"] == "published"
    assert manifest["shards"] == 2
    assert published(tmp_path, PARTITION).height


def test_a_backfill_starts_its_days_so_too(site, hostile, tmp_path):
    """And a folder `nightshelf` where it starts is in nobody's way."""
    (hostile / "nightshelf").mkdir()
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    days = ["--from", "2026-11-27", "--to", "2026-11-28", "--output", "json"]
    done = start([*script(site), "backfill", str(config), *days], site, hostile, cwd=hostile)
    assert done.returncode == 0, done.stderr
    states = [day["state"] for day in json.loads(done.stdout.splitlines()[-1])["days"]]
    assert states == ["published", "published"]


def test_doctor_tests_our_engine(site, hostile):
    check = [*module(site), "doctor", "--backend", "fake", "--output", "json"]
    done = start(check, site, hostile, cwd=hostile)
    checks = json.loads(done.stdout.splitlines()[-1])["checks"]
    (tested,) = (check for check in checks if check["name"].startswith("self-test"))
    assert tested["ok"], tested


def test_packages_that_are_imported_before_the_command_are_forgotten(site, tmp_path):
    """By sitecustomize, as tracing and coverage tools do."""
    theirs = tmp_path / "theirs"
    (theirs / "jobs").mkdir(parents=True)
    (theirs / "jobs/__init__.py").write_text("import jobs.daily")
    (theirs / "jobs/daily.py").touch()
    (theirs / "sitecustomize.py").write_text("import jobs")
    write_inputs(tmp_path)
    config = write_config(tmp_path, run__workers=1)
    done = start([*script(site), "run", str(config)], site, theirs, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_other_names_are_found_as_the_path_has_them(site, hostile):
    (hostile / "polars.py").write_text("theirs = True")
    code = "import nightshelf, schemas.errors, jobs, polars; print(polars.theirs, jobs.__file__)"
    done = start([sys.executable, "-c", code], site, hostile, cwd=hostile)
    assert done.stdout.split() == ["True", str(site / "jobs/__init__.py")]


SCRIPT = """
import nightshelf

if __name__ == "__main__":
    print(nightshelf.run({config!r}).status)
"""


def test_python_calls_run_with_workers(site, hostile, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, run__workers=2, run__shard_users=20)
    (hostile / "tonight.py").write_text(SCRIPT.format(config=str(config)))
    done = start([sys.executable, str(hostile / "tonight.py")], site, cwd=hostile)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["published"]
    assert not done.stderr


def test_python_calls_say_what_the_commands_say(tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    assert not nightshelf.validate(config).problems
    (problem,) = nightshelf.validate(config, overrides=["task.kk=3"]).problems
    assert problem.field == "task.kk"
    plan = nightshelf.plan(config, ds="2026-11-27")
    assert (plan.ds, plan.num_shards) == ("2026-11-27", 4)
    assert not list(tmp_path.glob("runs/*/*")), "a plan writes nothing"
    assert nightshelf.run(config).status == "published"


def test_a_process_that_uses_the_names_itself_is_told(tmp_path, monkeypatch):
    theirs = type(sys)("jobs")
    theirs.__path__ = [str(tmp_path / "jobs")]
    monkeypatch.setitem(sys.modules, "jobs", theirs)
    with pytest.raises(ImportError, match="package names jobs, which another project's"):
        nightshelf.plan("my.yaml")
    assert sys.modules["jobs"] is theirs
