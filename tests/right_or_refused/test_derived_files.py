"""What a run derives (shards, candidate sets, catalog, staged files, receipts) is held to what was
written: damage is noticed and written again, and never other rows are published.
"""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from jobs.running.run_folder import plan_path
from tests.factories import write_config, write_inputs

OUT = "out/ds=2026-11-28/surface=home"
DERIVED = (
    "shards/shard-00000.parquet",
    "shards/shard-00002.parquet",
    "shards/_done",
    "catalog/_done",
    "catalog/items.arrow",
    "catalog/trie/*.npy",
    "plan.json",
)
STAGED = ("staged/shard-00001-*-recommendations.parquet", "staged/*-outcomes.parquet")


def flip(at: float):
    """One bit, at a share of the file."""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[min(len(data) - 1, int(len(data) * at))] ^= 1
        path.write_bytes(bytes(data))

    return damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = {"0.02": flip(0.02), "0.5": flip(0.5), "0.97": flip(0.97), "cut": cut, "empty": empty}


@pytest.fixture
def config(tmp_path):
    write_inputs(tmp_path, num_users=18)
    return write_config(tmp_path, run__shard_users=6, run__workers=0)


def rows(tmp_path: Path) -> pl.DataFrame:
    return pl.read_parquet(tmp_path / OUT, hive_partitioning=False).sort("user_id", "rank")


def the_run(tmp_path: Path) -> Path:
    (run,) = {p.parent for p in tmp_path.glob("runs/*/plan.json")}
    return run


def forget_scores(run: Path) -> None:
    for path in [*run.glob("receipts/*"), *run.glob("staged/*")]:
        path.unlink()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", DERIVED)
def test_a_derived_file_that_is_damaged_is_written_again(
    nightshelf, tmp_path, config, name, damage
):
    nightshelf("run", config)
    want = rows(tmp_path)
    run = the_run(tmp_path)
    forget_scores(run)
    for path in run.glob(name):
        DAMAGES[damage](path)
    nightshelf("run", config, "--set", f"output.path={tmp_path}/out", check=0)
    assert_frame_equal(rows(tmp_path), want)
    assert len(list(run.glob("receipts/*.json"))) == 3


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("candidates", ["segment", "shared"])
def test_candidate_sets_that_are_damaged_are_written_again(
    nightshelf, tmp_path, candidates, damage
):
    write_inputs(tmp_path, num_users=18)
    items = pl.read_parquet(tmp_path / "catalog.parquet")["item_id"].to_list()[:6]
    table = pl.DataFrame({"item_id": items})
    if candidates == "segment":
        segments = pl.read_parquet(tmp_path / "users.parquet")["segment"].unique().sort()
        table = pl.DataFrame({"segment": segments, "item_ids": [items] * len(segments)})
    table.write_parquet(tmp_path / "candidates.parquet")
    config = write_config(tmp_path, run__shard_users=6, run__workers=0, task__score={})
    nightshelf("run", config)
    want = rows(tmp_path)
    run = the_run(tmp_path)
    forget_scores(run)
    DAMAGES[damage](run / "candidate_sets.parquet")
    nightshelf("run", config)
    assert_frame_equal(rows(tmp_path), want)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", STAGED)
def test_a_staged_file_that_is_damaged_is_scored_again(nightshelf, tmp_path, config, name, damage):
    nightshelf("prepare", config)
    run = the_run(tmp_path)
    nightshelf("score", run)
    before = {p.name: p.stat().st_mtime_ns for p in run.glob("receipts/*.json")}
    DAMAGES[damage](sorted(run.glob(name))[0])
    done = nightshelf("publish", run, check=4)
    assert "not every shard is scored" in done.err
    nightshelf("run", config)
    after = {p.name: p.stat().st_mtime_ns for p in run.glob("receipts/*.json")}
    assert sum(before[name] != after[name] for name in before) == 1, "one shard was scored again"
    assert len(rows(tmp_path)) == sum(
        json.loads(p.read_text())["files"]["recommendations"]["rows"]
        for p in run.glob("receipts/*.json")
    )


@pytest.mark.parametrize("change", ["users_in", "seconds", "run_id", "shard"])
def test_a_receipt_that_says_something_else_proves_nothing(nightshelf, tmp_path, config, change):
    nightshelf("prepare", config)
    run = the_run(tmp_path)
    nightshelf("score", run)
    path = run / "receipts/shard-00001.json"
    receipt = json.loads(path.read_text())
    where = receipt["counts"] if change == "users_in" else receipt
    where[change] = "other" if change == "run_id" else where[change] + 1
    path.write_text(json.dumps(receipt))
    assert "2 of 3" in nightshelf("publish", run, check=4).err
    assert nightshelf("run", config, "--output", "json").json["users_in"] == 18


def test_a_damaged_plan_is_written_again_by_the_run(nightshelf, tmp_path, config):
    nightshelf("prepare", config)
    run = the_run(tmp_path)
    text = Path(plan_path(str(run))).read_text()
    Path(plan_path(str(run))).write_text(text.replace('"num_shards": 3', '"num_shards": 2'))
    assert "damaged" in nightshelf("score", run, check=4).err
    nightshelf("run", config)
    nightshelf("score", run)
