"""A run writes to no place that it reads, and to no two that lie in one another."""

from __future__ import annotations

import pytest

from pipelines.planning.overlaps import overlapping
from schemas.config_file import load_config
from tests.factories import write_config, write_inputs


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs__users": "data", "output__path": "data/out"},
        {"inputs__users": "data/", "output__path": "data/../data"},
        {"inputs__users": "data/users", "output__path": "data"},
        {"inputs__users": "linked", "output__path": "data/out"},
        {"inputs__users": "data/*", "output__path": "data/out"},
        {"inputs__users": "data/**/*.parquet", "output__path": "data/x/out"},
        {"inputs__users": {"delta": "data"}, "output__path": "data/out"},
        {"inputs__users": "file:/tmp/ns-data", "output__path": "/tmp/ns-data/out"},
        {"inputs__users": "s3://b/data", "output__path": "s3a://b/data/out/"},
        {"inputs__candidates": "data", "run__work_dir": "data/runs"},
        {"inputs__exclusions": "data", "run__metrics_dir": "data/metrics"},
        {"inputs__exclusions": "data", "output__quarantine": "data/bad"},
        {"engine__model": "data", "output__path": "data/out"},
        {"run__work_dir": "out/runs"},
        {"run__work_dir": "out"},
        {"output__path": "runs/out"},
        {"output__quarantine": "out/bad"},
    ],
)
def test_places_in_one_another_are_refused(nightshelf, tmp_path, changes):
    write_inputs(tmp_path)
    (tmp_path / "data/users").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(tmp_path / "data")
    config = write_config(tmp_path, **changes)
    assert list(overlapping(load_config(config)))
    if "s3" in str(changes):
        return  # validate would ask the store
    for command in ("plan", "run"):
        assert "lie in one another" in nightshelf(command, config, check=2).err
    found = nightshelf("validate", config, "--output", "json", check=None)
    assert found.code in (2, 3)
    assert "lie in one another" in found.out


def test_places_beside_one_another_are_fine(tmp_path):
    write_inputs(tmp_path)
    for changes in (
        {},
        {"inputs__users": "data/*.parquet", "output__path": "data/out"},
        {"inputs__users": "data", "output__path": "data-out", "run__work_dir": "data.runs"},
        {"inputs__users": "runs/tables/users-1", "run__metrics_dir": "runs/metrics"},
        {"inputs__users": "s3://b/in", "output__path": "s3://b/in2"},
    ):
        assert not list(overlapping(load_config(write_config(tmp_path, **changes))))
