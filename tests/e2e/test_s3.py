"""Inputs and output on an S3 store, tried against a server of that protocol on loopback."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pyarrow.dataset as ds
import pytest
from polars.testing import assert_frame_equal

from tests.factories import write_config, write_inputs

pytest.importorskip("moto.server", reason="moto is not installed")
s3fs = pytest.importorskip("s3fs")

ROOT = Path(__file__).parents[2]
TABLES = ("users", "catalog", "candidates", "exclusions")


@pytest.fixture(scope="module")
def server():
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def store(server, tmp_path, monkeypatch):
    """A bucket with the inputs, and the environment that leads there."""
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "a-secret-of-theirs",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    store = s3fs.S3FileSystem()
    bucket = f"bucket{abs(hash(tmp_path.name)) % 10**8}"
    store.mkdir(bucket)
    write_inputs(tmp_path, num_users=60)
    for name in TABLES:
        store.put(str(tmp_path / f"{name}.parquet"), f"{bucket}/in/{name}.parquet")
    return store, bucket


@pytest.fixture
def config(store, tmp_path):
    _, bucket = store
    inputs = {name: f"s3://{bucket}/in/{name}.parquet" for name in TABLES}
    return write_config(
        tmp_path, inputs=inputs, output__path=f"s3://{bucket}/out", run__shard_users=6
    )


def rows_of(store) -> pl.DataFrame:
    """The partition as a reader sees it."""
    fs, bucket = store
    folder = f"{bucket}/out/ds=2026-11-28/surface=home"
    assert fs.exists(f"{folder}/_SUCCESS")
    table = ds.dataset(folder, filesystem=fs, format="parquet").to_table()
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame.drop("run_id").sort("user_id", "rank")


def test_a_run_on_a_store_publishes_the_rows_of_one_on_a_disk(nightshelf, store, config, tmp_path):
    summary = nightshelf("run", config, "--output", "json").json
    assert summary["published"].startswith("s3://")
    local = write_config(tmp_path, run__shard_users=6)
    nightshelf("run", local)
    want = pl.read_parquet(tmp_path / "out/ds=2026-11-28/surface=home").drop("run_id")
    assert_frame_equal(rows_of(store), want.sort("user_id", "rank"))
    left = [p for p in Path(summary["run_dir"]).rglob("*") if p.is_file()]
    assert not any(b"a-secret-of-theirs" in p.read_bytes() for p in left), "credentials were kept"


def test_a_run_on_a_store_that_is_killed_resumes(nightshelf, store, config, tmp_path, monkeypatch):
    nightshelf("run", config, "--set", f"run.work_dir={tmp_path / 'first'}")
    want = rows_of(store)
    fs, bucket = store
    fs.rm(f"{bucket}/out", recursive=True)
    trouble = tmp_path / "trouble"
    trouble.mkdir()
    (trouble / "slow").write_text("0.1")
    monkeypatch.setenv("NIGHTSHELF_TEST_TROUBLE", str(trouble))
    backend = ("--set", "engine.backend=tests.trouble:trouble_backend", "--set", "run.workers=1")
    command = [sys.executable, "-m", "jobs", "run", str(config), *backend]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        end = time.monotonic() + 90
        while len(list(tmp_path.glob("runs/*/receipts/*.json"))) < 2:
            assert time.monotonic() < end, "no shard was done"
            assert process.poll() is None, process.stderr.read().decode()
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert not fs.exists(f"{bucket}/out/ds=2026-11-28/surface=home/_SUCCESS")
    (trouble / "slow").unlink()
    done = nightshelf("run", config, *backend[:2])
    assert "shards are done already" in done.err
    assert_frame_equal(rows_of(store), want)


def test_a_bucket_that_is_not_there_is_named(nightshelf, store, config):
    done = nightshelf("run", config, "--set", "inputs.users=s3://nobody-has-this/users/", check=3)
    assert "s3://nobody-has-this/users/" in done.err
    done = nightshelf("run", config, "--set", "output.path=s3://nobody-has-this/out", check=2)
    assert "output.path is not writable" in done.err


def test_the_work_folder_may_be_in_the_store(nightshelf, store, config, tmp_path):
    """Shards, receipts, staged files and the catalog: what workers of other machines need."""
    fs, bucket = store
    nightshelf("run", config)
    want = rows_of(store)
    remote = ("--set", f"run.work_dir=s3://{bucket}/runs")
    summary = nightshelf("run", config, *remote, "--output", "json").json
    assert summary["run_dir"].startswith(f"s3://{bucket}/runs/")
    assert_frame_equal(rows_of(store), want)
    assert fs.exists(summary["report"]), "the page reads staged files and the catalog in the store"
    again = nightshelf("run", config, *remote)
    assert "10 of 10 shards are done already" in again.err
    (seen,) = nightshelf("status", config, *remote, "--output", "json").json["runs"]
    assert (seen["status"], seen["run_dir"]) == ("published", summary["run_dir"])
    assert "Title i" in nightshelf("show", config, *remote, "--user", "u003").out
    assert fs.exists(f"{summary['run_dir']}/metrics.prom")
    assert not fs.glob(f"{bucket}/runs/published/*.lock*"), "the lease ends with the run"
    left = ("--keep", "0", "--older-than-days", "0", "--output", "json")
    assert (
        nightshelf("gc", config, *remote, "--keep", "0", "--output", "json").json["removed"] == []
    )
    (removed,) = nightshelf("gc", config, *remote, *left).json["removed"]
    assert (removed["run_id"], removed["bytes"] > 0) == (summary["run_id"], True)
    assert not fs.exists(f"{summary['run_dir']}/shards")
    assert fs.exists(f"{summary['run_dir']}/staged"), "readers see this run"
    nightshelf("run", config, *remote, "--set", "engine.seed=3")
    gone = [one["run_id"] for one in nightshelf("gc", config, *remote, *left).json["removed"]]
    assert summary["run_id"] in gone
    assert not fs.exists(f"{summary['run_dir']}/staged"), "no partition holds it"
    assert fs.exists(f"{summary['run_dir']}/manifest.json")


def test_a_lease_keeps_a_second_run_away_until_it_is_stale(nightshelf, store, config):
    """An object store has no locks that go with their process."""
    import json

    from jobs.running.run_lock import lock_path
    from pipelines.planning.plan import plan_run
    from pipelines.storage import files
    from schemas.config_file import load_config

    _, bucket = store
    remote = f"run.work_dir=s3://{bucket}/runs"
    path = f"{lock_path(plan_run(load_config(str(config), overrides=[remote])))}.00000004"
    for age, code in ((5, 4), (500, 0)):
        lease = {"host": "elsewhere", "pid": 1, "token": "x", "renewed_at": time.time() - age}
        files.write_bytes(path, json.dumps(lease).encode())
        done = nightshelf("run", config, "--set", remote, check=code)
        assert ("another run of this date and surface is at work" in done.err) == (code == 4)
    files.write_bytes(path, b"half a le")
    nightshelf("run", config, "--set", remote)
    assert not files.exists(path)


def test_of_two_that_find_a_lease_stale_one_gets_it(store):
    """Each number is created once; and nobody renews or removes what is another's."""
    import json

    from jobs.running.run_lock import _Lease
    from pipelines.storage import files

    fs, bucket = store
    path = f"s3://{bucket}/runs/published/x.lock"
    stale = {"token": "gone", "renewed_at": time.time() - 500}
    files.write_bytes(f"{path}.00000003", json.dumps(stale).encode())
    first, second = _Lease(path), _Lease(path)
    seen = first._numbers()
    assert seen == second._numbers() == [3]
    assert first.take()
    second._number = 4
    assert not files.create(second._path(4), b"x"), "what it would have done had it looked before"
    assert not second.take()
    assert first.renew()
    assert not second.renew()
    second.give_back()
    assert fs.glob(f"{bucket}/runs/published/x.lock.*") == [
        f"{bucket}/runs/published/x.lock.00000004"
    ]
    files.write_bytes(f"{path}.00000004", json.dumps(stale).encode())  # it slept for too long
    assert second.take()
    assert not first.renew()
    first.give_back()
    assert second.renew()
    second.give_back()
    assert not fs.glob(f"{bucket}/runs/published/x.lock.*")
