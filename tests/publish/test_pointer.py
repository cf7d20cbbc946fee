"""Pointers of Parquet partitions, on a disk and in an object store (fsspec's `memory://`)."""

from __future__ import annotations

import json
import uuid

import fsspec
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from pipelines.publish import check_output, open_table, pointer, publish_run, read_current
from schemas.errors import ConfigError, ConflictError, StorageError
from tests.publish.runs import (
    DS,
    config_of,
    expected,
    publish,
    publish_while,
    read,
    staged_run,
)


@pytest.fixture
def store():
    """A folder in memory, of this test's own."""
    name = f"memory://t{uuid.uuid4().hex[:8]}/out"
    yield name
    fs = fsspec.filesystem("memory")
    for root in (name, f"{name}.current"):
        if fs.exists(root):
            fs.rm(root, recursive=True)


def in_store(tmp_path, store, **more):
    return config_of(tmp_path, "parquet", output={"path": store}, **more)


def test_publishing_to_an_object_store(tmp_path, store):
    config = in_store(tmp_path, store, surface="feed home/eu")
    for name in ("a", "b"):
        run = staged_run(config, name)
        publish_run(*run)
        published = publish_run(*run)
        assert_frame_equal(read(config), expected(run))
    fs = fsspec.filesystem("memory")
    names = sorted(p.rpartition("/")[2] for p in fs.ls(published.partition, detail=False))
    assert names == sorted([*published.files, "_SUCCESS"])
    rows = pl.from_arrow(read_current(store, DS, "feed home/eu"))
    assert_frame_equal(rows.sort("user_id", "rank"), expected(run))


def test_a_conflict_in_an_object_store(tmp_path, store):
    config = in_store(tmp_path, store)
    first = staged_run(config, "first")
    with pytest.raises(ConflictError):
        publish_while(staged_run(config, "second"), first)
    assert_frame_equal(read(config), expected(first))
    fs = fsspec.filesystem("memory")
    assert len(fs.glob(f"{store}/**/*.parquet")) == 3


def test_two_configurations_with_work_folders_of_their_own(tmp_path):
    """Their runs do not know of each other; their publishes do."""
    config, other = (config_of(tmp_path, "parquet", work_dir=w) for w in ("one", "two"))
    winner = staged_run(other, "theirs")
    with pytest.raises(ConflictError):
        publish_while(staged_run(config, "mine"), winner)
    assert_frame_equal(read(config), expected(winner))


def test_a_pointer_says_everything_a_reader_needs(tmp_path):
    published = publish(config_of(tmp_path, "parquet"), "a")
    (path,) = (tmp_path / "out.current").rglob("*.json")
    assert path.relative_to(tmp_path).as_posix() == (
        f"out.current/ds={DS}/surface=home/00000001.json"
    )
    found = json.loads(path.read_text())
    assert found["run_id"] == published.run_id
    assert found["rows"] == sum(file["rows"] for file in found["files"]) == 36
    folder = tmp_path / "out" / found["partition"]
    assert all((folder / f["name"]).stat().st_size == f["bytes"] for f in found["files"])


def test_old_pointers_go_and_numbers_never_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(pointer, "_KEPT", 3)
    config = config_of(tmp_path, "parquet")
    pair = [staged_run(config, name) for name in "ab"]
    for number in range(6):
        publish_run(*pair[number % 2])
    folder = pointer.pointer_folder(str(tmp_path / "out"), DS, "home")
    assert pointer.generations(folder) == [6, 5, 4]
    late = pointer.load(folder, 6).model_copy(update={"generation": 2, "token": "late"})
    with pytest.raises(ConflictError):  # its number is free again, and too low
        pointer.create(folder, late)
    assert open_table(config).current().version == "6"


def test_files_that_no_pointer_names_are_somebody_elses(tmp_path):
    """Also such that are called as ours are: nothing is removed, nothing is published beside."""
    config = config_of(tmp_path, "parquet")
    folder = tmp_path / "out" / f"ds={DS}" / "surface=home"
    folder.mkdir(parents=True)
    (folder / "part-00000001-2026-11-28-home-0123456789ab-00000.parquet").write_bytes(b"old")
    with pytest.raises(ConfigError, match=r"files that no publish wrote.*part-00000001"):
        check_output(config)
    with pytest.raises(ConfigError, match="Nothing was removed"):
        publish(config, "a")
    assert len(list(folder.iterdir())) == 1


def test_a_file_that_was_lost_by_hand_is_published_again(tmp_path):
    config = config_of(tmp_path, "parquet")
    run = staged_run(config, "a")
    published = publish_run(*run)
    (tmp_path / "out" / f"ds={DS}" / "surface=home" / published.files[1]).unlink()
    with pytest.raises(StorageError, match="cannot be read"):
        read(config)
    assert publish_run(*run).version == "2"
    assert_frame_equal(read(config), expected(run))


def test_a_damaged_pointer_is_named(tmp_path):
    config = config_of(tmp_path, "parquet")
    publish(config, "a")
    (path,) = (tmp_path / "out.current").rglob("*.json")
    path.write_text("{")
    with pytest.raises(StorageError, match=r"damaged.*00000001\.json"):
        open_table(config).current()


def test_a_whole_bucket_cannot_be_the_output(tmp_path):
    config = config_of(tmp_path, "parquet", output={"path": "s3://bucket/"})
    with pytest.raises(ConfigError, match="whole bucket"):
        check_output(config)
