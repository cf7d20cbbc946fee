"""Processes are killed in the middle of a publish; readers see the old rows or the new ones, and
publishing again completes it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.publish.runs import config_of, save, staged_run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("format", "how", "points"),
    [
        ("parquet", "files", 14),
        ("parquet", "time", 2),
        ("iceberg", "calls", 6),
        ("iceberg", "time", 2),
        ("delta", "calls", 2),
        ("delta", "time", 4),
    ],
)
def test_a_killed_publish_is_completed_by_the_next(tmp_path, format, how, points):
    config = config_of(tmp_path, format)
    for name in ("old", "new"):
        save(staged_run(config, name), tmp_path / f"{name}.json")
    command = ["killed", how, str(points), "7", tmp_path / "old.json", tmp_path / "new.json"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.publish.processes", *map(str, command)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= points // 2, "hardly one was killed"
