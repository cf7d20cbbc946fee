"""A launcher of one's own, as docs/architecture.md says: a pool, and its line in the registry."""

from __future__ import annotations

import json

import polars as pl
import pytest

from jobs.launchers import LAUNCHERS
from tests.factories import write_config, write_inputs
from tests.right_or_refused.test_retries import marked


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(LAUNCHERS, "threads", "tests.threads:ThreadLauncher")


def published(folder):
    rows = pl.read_parquet(folder / "out", hive_partitioning=True).drop("run_id")
    return rows.sort("user_id", "rank")


def test_it_publishes_what_the_local_launcher_does(nightshelf, tmp_path):
    write_inputs(tmp_path, num_users=60)
    config = write_config(tmp_path, run__shard_users=6)
    want = nightshelf("run", config, "--output", "json").json
    rows = published(tmp_path)
    for receipt in tmp_path.glob("runs/*/receipts/*.json"):
        receipt.unlink()
    got = nightshelf("run", config, "--set", "run.launcher=threads", "--output", "json").json
    assert got["run_id"] == want["run_id"]
    assert published(tmp_path).equals(rows)
    (manifest,) = tmp_path.glob("runs/*/manifest.json")
    assert json.loads(manifest.read_text())["launcher"] == "threads"


def test_its_shards_are_tried_again_as_everywhere(nightshelf, tmp_path, trouble):
    config = marked(tmp_path, "broken", run__launcher="threads")
    (trouble / "once").touch()
    done = nightshelf("run", config)
    assert done.err.count("trying again (1 so far)") == 1


def test_a_poison_shard_is_given_up_and_the_others_are_done(nightshelf, tmp_path, trouble):
    config = marked(tmp_path, "broken", run__launcher="threads")
    (trouble / "fail").touch()
    done = nightshelf("run", config, check=4)
    assert "1 of 5 shards failed" in done.err
    assert "given up after 3 attempts" in done.err
    assert len(list(tmp_path.glob("runs/*/receipts/*.json"))) == 4


def test_a_worker_that_is_lost_costs_its_shard_one_attempt(nightshelf, tmp_path, trouble):
    config = marked(tmp_path, "lost_host", run__launcher="threads")
    (trouble / "once").touch()
    done = nightshelf("run", config)
    assert "its thread ended: the host is gone; trying again (1 so far)" in done.err


def test_an_error_that_stays_ends_the_run(nightshelf, tmp_path, trouble):
    config = marked(tmp_path, "table_error", run__launcher="threads")
    (trouble / "fail").touch()
    assert "users: rows cannot be decoded" in nightshelf("run", config, check=3).err


@pytest.mark.parametrize("command", ["run", "validate"])
def test_a_name_that_nobody_has_is_refused_by_its_line(nightshelf, tmp_path, command):
    write_inputs(tmp_path)
    config = write_config(tmp_path, run__launcher="thread")
    done = nightshelf(command, config, check=2)
    said = done.out + done.err
    assert "run.launcher" in said
    assert "threads" in said
