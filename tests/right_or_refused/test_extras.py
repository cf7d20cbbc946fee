"""What comes with an extra is refused or left out before the night, in one sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jobs.upkeep import doctor
from tests.factories import write_config, write_inputs


@pytest.fixture
def without(monkeypatch):
    """Packages that this Python does not have, for as long as the test lasts."""

    def hide(*names: str) -> None:
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)
        for name in [m for m in sys.modules if m.startswith("pipelines.report")]:
            monkeypatch.delitem(sys.modules, name)

    return hide


@pytest.mark.parametrize("name", ["jinja2", "matplotlib"])
def test_a_run_without_the_report_s_packages_has_no_page_and_says_so_once(
    nightshelf, tmp_path, without, name
):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    without(name)
    found = nightshelf("validate", config, "--output", "json").json
    assert found["status"] == "valid"
    (warning,) = found["warnings"]
    assert "no page" in warning["message"] and "'.[report]'" in warning["remedy"]
    done = nightshelf("run", config)
    assert done.err.count("the report could not be written") == 1
    assert f"got no {name}" in done.err
    asked = nightshelf("report", config, check=2)
    assert "pip install -c constraints.txt -e '.[report]'" in asked.err


def test_a_textfile_without_its_package_is_refused_before_the_night(nightshelf, tmp_path, without):
    write_inputs(tmp_path)
    config = write_config(tmp_path, run__metrics_dir=str(tmp_path / "metrics"))
    without("prometheus_client")
    for command in ("plan", "run"):
        done = nightshelf(command, config, check=2)
        assert "a Prometheus textfile needs packages that are not installed" in done.err
    (problem,) = nightshelf("validate", config, "--output", "json", check=2).json["problems"]
    assert problem["field"] == "run.metrics_dir"
    assert "'.[metrics]'" in problem["remedy"]


def test_a_run_that_wants_no_textfile_does_without(nightshelf, tmp_path, without):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    without("prometheus_client")
    done = nightshelf("run", config, "--output", "json")
    folder = Path(done.json["run_dir"])
    assert (folder / "metrics.json").exists() and not (folder / "metrics.prom").exists()
    assert "metrics" not in done.err


def test_doctor_says_that_it_cannot_compare_versions(without):
    without("packaging")
    checks = {check.name: check for check in doctor.run_doctor("fake", None)}
    assert not checks["packages"].ok
    assert "'.[torch]'" in checks["packages"].remedy


def test_the_core_has_few_dependencies():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) <= 11
