"""Real processes are killed; the run is started again; nothing is lost and nothing is doubled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import psutil
import pytest
from polars.testing import assert_frame_equal

from tests.factories import write_config, write_inputs

BACKEND = "tests.trouble:trouble_backend"
PARTITION = "out/ds=2026-11-28/surface=home"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path):
    write_inputs(tmp_path, num_users=60)
    return write_config(tmp_path, engine__backend=BACKEND, run__workers=2, run__shard_users=6)


def start(config: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "jobs", "run", str(config), "--output", "json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, what: str, seconds: float = 60.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds} s for {what}")


def receipts(folder: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in folder.glob("runs/*/receipts/*.json")}


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [c for c in children if "spawn_main" in " ".join(c.cmdline())]


def published(folder: Path) -> pl.DataFrame:
    assert (folder / PARTITION / "_SUCCESS").exists()
    return pl.read_parquet(folder / PARTITION).sort("user_id", "rank")


@pytest.fixture
def undisturbed(nightshelf, config, tmp_path, trouble):
    """The rows of a run that nobody killed, with its traces removed."""
    import shutil

    nightshelf("run", config, "--set", "run.workers=0")
    rows = published(tmp_path)
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(tmp_path / "runs")
    return rows


def test_a_killed_worker_costs_nothing(tmp_path, config, trouble, undisturbed):
    (trouble / "slow").write_text("0.1")
    process = start(config)
    wait_for(lambda: len(receipts(tmp_path)) >= 2, "two shards")
    workers_of(process)[0].kill()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "trying again" in err
    assert "signal 9" in err
    assert_frame_equal(published(tmp_path), undisturbed)


def test_a_killed_driver_takes_its_workers_along_and_the_run_resumes(
    nightshelf_process, tmp_path, config, trouble, undisturbed
):
    (trouble / "slow").write_text("0.1")
    process = start(config)
    wait_for(lambda: len(receipts(tmp_path)) >= 3, "three shards")
    workers = workers_of(process)
    assert workers
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    wait_for(lambda: not any(w.is_running() for w in workers), "orphans to end", 15)
    assert not (tmp_path / PARTITION).exists()
    done = receipts(tmp_path)
    assert 3 <= len(done) < 10
    (trouble / "slow").unlink()
    resumed = nightshelf_process("run", config)
    assert "shards are done already" in resumed.err
    after = receipts(tmp_path)
    assert {name: after[name] for name in done} == done, "a finished shard was scored again"
    assert_frame_equal(published(tmp_path), undisturbed)


def test_an_interrupt_ends_cleanly_and_resumes(
    nightshelf_process, tmp_path, config, trouble, undisturbed
):
    (trouble / "slow").write_text("0.1")
    process = start(config)
    wait_for(lambda: len(receipts(tmp_path)) >= 1, "one shard")
    workers = workers_of(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "run the same command again" in err
    assert "Traceback" not in err
    wait_for(lambda: not any(w.is_running() for w in workers), "workers to end", 15)
    (trouble / "slow").unlink()
    nightshelf_process("run", config)
    assert_frame_equal(published(tmp_path), undisturbed)


@pytest.mark.parametrize(
    ("what", "message"), [("poison", "exit code 7"), ("dead_engine", "illegal memory access")]
)
def test_a_poison_shard_fails_alone_and_is_the_only_one_repaired(
    nightshelf_process, tmp_path, trouble, what, message
):
    """An engine that broke on it is not asked again: the shards behind it get a new one."""
    tables = write_inputs(tmp_path, num_users=30)
    names = tables["users"].column("user_id").to_pylist()
    texts = ["!" if name == "u005" else "ok" for name in names]
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(
        tables["users"].append_column("mood", pa.array(texts)), tmp_path / "users.parquet"
    )
    config = write_config(
        tmp_path,
        engine__backend=BACKEND,
        prompt__template="{text:mood}{history}{user_vector}",
        run__workers=2,
        run__max_attempts=2,
        run__shard_users=6,
    )
    (trouble / what).touch()
    failed = nightshelf_process("run", config, "--output", "json", check=4)
    assert failed.json["error"]["exit_code"] == 4
    assert "1 of 5 shards failed" in failed.err
    assert message in failed.err
    assert "given up after 2 attempts" in failed.err
    assert not (tmp_path / PARTITION).exists(), "half a run was published"
    done = receipts(tmp_path)
    assert len(done) == 4
    (trouble / what).unlink()
    nightshelf_process("run", config)
    after = receipts(tmp_path)
    assert {name: after[name] for name in done} == done
    assert published(tmp_path)["user_id"].n_unique() == 30


def test_a_wedged_worker_is_ended_by_its_deadline(nightshelf_process, tmp_path, trouble):
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = write_inputs(tmp_path, num_users=10)
    users = tables["users"].append_column("mood", pa.array(["!"] * 10))
    pq.write_table(users, tmp_path / "users.parquet")
    config = write_config(
        tmp_path,
        engine__backend=BACKEND,
        prompt__template="{text:mood}{history}{user_vector}",
        run__workers=1,
        run__shard_timeout_s=6,
    )
    (trouble / "wedge").touch()
    done = nightshelf_process("run", config)
    assert "reported nothing for 6 s" in done.err
    assert published(tmp_path)["user_id"].n_unique() == 10


def test_a_crash_while_publishing_is_completed_by_the_next_run(
    nightshelf_process, tmp_path, config, trouble
):
    nightshelf_process("run", config)
    want = published(tmp_path)
    partition = tmp_path / PARTITION
    # As left by a crash between the files and _SUCCESS, and by one of another run that had noted
    # what it was about to write, moved one file in and left a draft of the next.
    (partition / "_SUCCESS").unlink()
    first, *_ = sorted(partition.glob("*.parquet"))
    first.unlink()
    stem = "part-00000002-2026-11-28-home-000000000000"
    note = tmp_path / f"out.current/{PARTITION.removeprefix('out/')}/00000002-ab.writing.json"
    note.write_text(json.dumps({"stem": stem}))
    stale = [partition / f"{stem}-00000.parquet", partition / f".{stem}-00001.parquet.0a1b2c3d.tmp"]
    for path in stale:
        want.write_parquet(path)
    nightshelf_process("run", config)
    assert not any(path.exists() for path in stale)
    assert (partition / "_SUCCESS").exists()
    assert_frame_equal(published(tmp_path), want)


def test_a_strangers_file_in_the_partition_is_refused_and_stays(
    nightshelf_process, tmp_path, config, trouble
):
    nightshelf_process("run", config)
    stranger = tmp_path / PARTITION / "part-2026-11-28-home-000000000000-00000.parquet"
    stranger.write_bytes(b"of somebody else")
    before = sorted(path.name for path in stranger.parent.iterdir())
    refused = nightshelf_process("run", config, "--set", "engine.seed=3", check=2)
    assert "files that no publish wrote" in refused.err
    assert stranger.name in refused.err
    assert sorted(path.name for path in stranger.parent.iterdir()) == before


def test_a_partial_file_of_an_earlier_attempt_is_ignored(
    nightshelf_process, tmp_path, config, trouble
):
    nightshelf_process("run", config)
    want = published(tmp_path)
    receipt = next(tmp_path.glob("runs/*/receipts/shard-00000.json"))
    receipt.unlink()
    staged = receipt.parents[1] / "staged"
    (staged / "shard-00000-dead-recommendations.parquet").write_bytes(b"PAR1 half a fi")
    nightshelf_process("run", config)
    assert_frame_equal(published(tmp_path), want)


def test_a_damaged_receipt_or_a_lost_staged_file_is_scored_again(
    nightshelf_process, tmp_path, config, trouble
):
    nightshelf_process("run", config)
    want = published(tmp_path)
    run_folder = next(p.parent for p in tmp_path.glob("runs/*/plan.json"))
    (run_folder / "receipts" / "shard-00001.json").write_text('{"run_id": ')
    next((run_folder / "staged").glob("shard-00002-*-recommendations.parquet")).unlink()
    again = nightshelf_process("run", config)
    assert "8 of 10 shards are done already" in again.err
    assert_frame_equal(published(tmp_path), want)


def test_a_staged_file_that_changed_is_scored_again(nightshelf_process, tmp_path, config, trouble):
    nightshelf_process("run", config)
    want = published(tmp_path)
    staged = next(tmp_path.glob("runs/*/staged/shard-00003-*-recommendations.parquet"))
    rows = pl.read_parquet(staged)
    rows.with_columns(pl.lit(-0.5).cast(pl.Float32).alias("score")).write_parquet(staged)
    again = nightshelf_process("run", config)
    assert "9 of 10 shards are done already" in again.err
    assert_frame_equal(published(tmp_path), want)
    assert os.path.exists(tmp_path / PARTITION / "_SUCCESS")
