"""What is installed holds the templates of the report."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_a_wheel_holds_the_templates(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("nightshelf", "schemas", "engine", "pipelines", "jobs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    folder = ROOT / "pipelines/report/templates"
    assert {f"pipelines/report/templates/{p.name}" for p in folder.iterdir()} <= inside
    # The page can be made of it: a folder of templates is no place beside the source.
    code = "from pipelines.report import page; print(page.__file__, page._page())"
    tried = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                           cwd=tmp_path, env={"PYTHONPATH": str(wheel)})  # fmt: skip
    assert str(wheel) in tried.stdout, tried.stderr
