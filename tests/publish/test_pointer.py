"""Pointers of Parquet partitions, on a disk and in an object store (fsspec's `memory://`)."""

from __future__ import annotations

import errno
import json
import uuid

import fsspec
import polars as pl
import pytest
import tenacity
from fsspec.implementations.local import LocalFileSystem
from polars.testing import assert_frame_equal

from pipelines.publish import check_output, open_table, pointer, publish_run, read_current
from pipelines.publish.rollback import rollback
from pipelines.storage import storage_errors
from schemas.errors import ConfigError, ConflictError, StorageError, WithdrawnError
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


def newest_fails(tmp_path, monkeypatch, error):
    """The newest pointer cannot be had, as on a mount or a store that is ill."""
    newest = max((tmp_path / "out.current").rglob("0*[0-9].json")).name
    real = LocalFileSystem.cat_file

    def failing(self, path, *args, **kwargs):
        if path.endswith(newest):
            raise type(error)(*error.args)
        return real(self, path, *args, **kwargs)

    monkeypatch.setattr(storage_errors, "WAIT", tenacity.wait_none())
    monkeypatch.setattr(LocalFileSystem, "cat_file", failing)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EIO, "bad sector"), OSError("busy"), PermissionError(errno.EACCES, "denied"),
     ConnectionResetError("gone"), TimeoutError("late"), OSError(errno.EMFILE, "too many")],
    ids=repr,
)  # fmt: skip
def test_a_pointer_that_cannot_be_had_is_not_passed_over(tmp_path, monkeypatch, error):
    """The older one in its place would serve a run that was taken back since."""
    config = config_of(tmp_path, "parquet")
    first, bad = staged_run(config, "a"), staged_run(config, "b")
    publish_run(*first)
    publish_run(*bad)
    rollback(config)
    assert open_table(config).is_withdrawn(bad[0].run_id)
    newest_fails(tmp_path, monkeypatch, error)
    table = open_table(config)
    for ask in (
        lambda: table.is_withdrawn(bad[0].run_id),
        table.history,
        table.current,
        lambda: publish_run(*first),
        lambda: rollback(config),
        lambda: pointer.unreadable(pointer.pointer_folder(str(tmp_path / "out"), DS, "home")),
    ):
        with pytest.raises((StorageError, ConfigError)) as caught:
            ask()
        assert not isinstance(caught.value, WithdrawnError)
    monkeypatch.undo()
    assert open_table(config).is_withdrawn(bad[0].run_id)


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b"null", b"[" * 100_000, b'{"files": 1}'])
def test_a_pointer_that_is_damaged_is_passed_over(tmp_path, data):
    config = config_of(tmp_path, "parquet")
    first = staged_run(config, "a")
    publish_run(*first)
    publish(config, "b")
    newest = max((tmp_path / "out.current").rglob("0*[0-9].json"))
    newest.write_bytes(data)
    assert [entry.run_id for entry in open_table(config).history()] == [first[0].run_id]
    publish_run(*first)
    assert_frame_equal(read(config), expected(first))


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b"{}", b'{"stem": 3}', b"\xff"])
def test_a_note_that_is_damaged_stops_no_publish(tmp_path, note):
    """A publisher was killed, and its note of the files that it wrote was lost with the power."""
    config = config_of(tmp_path, "parquet")
    publish(config, "a")
    folder = tmp_path / "out.current" / f"ds={DS}" / "surface=home"
    (folder / "00000002-dead.writing.json").write_bytes(note)
    left = tmp_path / "out" / f"ds={DS}" / "surface=home" / "part-00000002-theirs-00000.parquet"
    left.write_bytes(b"half")
    run = staged_run(config, "b")
    check_output(config)
    publish_run(*run)
    publish(config, "c")
    publish_run(*run)
    assert_frame_equal(read(config), expected(run))
    assert not left.exists()
    assert not list(folder.glob("*.writing.json"))
