"""CASES C21, C22, C24: a store that lists from memory, that is busy, that two runs write to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec import AbstractFileSystem
from polars.testing import assert_frame_equal

from pipelines.sources import input_files
from pipelines.storage import files
from tests.cases.helpers import PARTITION, published
from tests.factories import write_config, write_inputs


class StoreFileSystem(AbstractFileSystem):
    """An object store on the local disk: it remembers listings, and can be told to be busy.

    `busy` holds how often it still answers 503 to whoever opens a name with `busy_name` in it;
    `meanwhile[name]` happens just before that name is opened, once.
    """

    protocol = "store"
    busy = 0
    busy_name = ""
    meanwhile: ClassVar[dict[str, Callable[[], None]]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("store://").rstrip("/")

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def ls(self, path: str, detail: bool = True, **kwargs):
        path = self._strip_protocol(path)
        if path not in self.dircache:
            kind = {True: "directory", False: "file"}
            found = os.scandir(path) if os.path.isdir(path) else []
            self.dircache[path] = [
                {"name": e.path, "type": kind[e.is_dir()], "size": e.stat().st_size} for e in found
            ]
        entries = self.dircache[path]
        if not entries and not os.path.isdir(path):
            raise FileNotFoundError(path)
        return entries if detail else [e["name"] for e in entries]

    def _open(self, path: str, mode: str = "rb", **kwargs):
        cls = type(self)
        for name in [n for n in cls.meanwhile if path.endswith(n)]:
            cls.meanwhile.pop(name)()
        if cls.busy and cls.busy_name in path:
            cls.busy -= 1
            raise OSError(16, "503 SlowDown: please reduce your request rate")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return open(path, mode)

    def _rm(self, path: str) -> None:
        os.remove(path)


@pytest.fixture
def store():
    fsspec.register_implementation("store", StoreFileSystem, clobber=True)
    StoreFileSystem.busy = 0
    yield StoreFileSystem
    StoreFileSystem.meanwhile.clear()
    StoreFileSystem.clear_instance_cache()


def test_files_written_since_the_last_look_are_planned(store, tmp_path):
    """C21, s3fs #903 and #424: a listing from memory missed what had been written since."""
    table = pa.table({"user_id": ["u1"]})
    pq.write_table(table, tmp_path / "1.parquet")
    url = f"store://{tmp_path}"
    assert [Path(p).name for p in input_files.list_parquet(url, "users")] == ["1.parquet"]
    pq.write_table(table, tmp_path / "2.parquet")
    fs, inside = files.filesystem(url)
    assert len(fs.ls(inside)) == 1, "the store does list from memory"
    assert [Path(p).name for p in input_files.list_parquet(url, "users")] == [
        "1.parquet",
        "2.parquet",
    ]
    assert not files.exists(f"{url}/3.parquet")
    (tmp_path / "3.parquet").touch()
    assert files.exists(f"{url}/3.parquet")
    assert files.list_names(url) == ["1.parquet", "2.parquet", "3.parquet"]


def test_a_store_that_is_busy_twice_is_asked_again(nightshelf, store, tmp_path):
    """C22, ray #36690, arrow #46517: 503 on a write lost the job."""
    write_inputs(tmp_path, num_users=12)
    config = write_config(tmp_path)
    nightshelf("run", config)
    want = published(tmp_path)
    store.busy, store.busy_name = 2, "/part-"
    url = f"store://{tmp_path}/remote"
    nightshelf("run", config, "--set", f"output.path={url}")
    assert store.busy == 0, "it was busy while the run published"
    assert_frame_equal(published(tmp_path, PARTITION.replace("out", "remote")), want)


def test_a_store_that_stays_busy_ends_the_run_without_a_finished_partition(
    nightshelf, store, tmp_path
):
    """C22: retries are bounded; the next run completes what this one began."""
    write_inputs(tmp_path, num_users=12)
    config = write_config(tmp_path, output__path=f"store://{tmp_path}/remote")
    store.busy, store.busy_name = 10_000, "/part-"
    done = nightshelf("run", config, "--output", "json", check=4)
    assert "503" in done.err
    assert 10_000 - store.busy <= 20, "bounded"
    partition = PARTITION.replace("out", "remote")
    assert not (tmp_path / partition / "_SUCCESS").exists()
    store.busy = 0
    summary = nightshelf("run", config, "--output", "json").json
    assert summary["rows_published"] == len(published(tmp_path, partition)) > 0


def test_of_two_runs_that_publish_one_date_at_once_one_wins_whole(nightshelf, store, tmp_path):
    """C24, airflow #58752: concurrent backfills of one partition. The second run publishes while
    the first is between its files; whoever loses must say so, and never leave a mixture.
    """
    write_inputs(tmp_path, num_users=40)
    config = write_config(tmp_path, output__path=f"store://{tmp_path}/remote")
    partition = PARTITION.replace("out", "remote")
    second = []

    def run_second() -> None:
        args = ("--set", "task.k=3", "--output", "json")
        second.append(nightshelf("run", config, *args, check=None))

    store.meanwhile["-00002.parquet"] = run_second
    first = nightshelf("run", config, "--output", "json", check=None)
    assert len(second) == 1
    winners = [done for done in (first, second[0]) if done.code == 0]
    assert len(winners) == 1, "one of two conflicting publishes was told so"
    rows = published(tmp_path, partition)
    assert len(rows) == winners[0].json["rows_published"]
    assert rows["rank"].max() == (5 if first.code == 0 else 3)
