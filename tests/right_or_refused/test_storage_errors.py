"""Whatever a disk, a store or a decoder raises leaves `files` as one of our errors."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import zlib
from typing import ClassVar

import fsspec
import polars as pl
import pyarrow as pa
import pytest
import tenacity
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipelines.storage import files, storage_errors
from pipelines.storage.storage_errors import kind_of, translate
from schemas.errors import (
    AccessError,
    DamagedFileError,
    MissingFileError,
    NightshelfError,
    StorageError,
)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(storage_errors, "WAIT", tenacity.wait_none())


class PanicException(BaseException):
    """As each library that is written in Rust has one."""


def _client_error(code: str, status: int = 400) -> Exception:
    botocore = pytest.importorskip("botocore.exceptions")
    answer = {
        "Error": {"Code": code, "Message": "no"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return botocore.ClientError(answer, "PutObject")


def _botocore(name: str, **facts: str) -> Exception:
    error: Exception = getattr(pytest.importorskip("botocore.exceptions"), name)(**facts)
    return error


class _HttpError(Exception):
    """As Google's and Azure's clients raise it: the answer's number is an attribute."""

    def __init__(self, code: int) -> None:
        super().__init__("no")
        self.code = code


ERRORS = {
    "no credentials": (lambda: _botocore("NoCredentialsError"), AccessError),
    "no profile": (lambda: _botocore("ProfileNotFound", profile="x"), AccessError),
    "half credentials": (
        lambda: _botocore("PartialCredentialsError", provider="env", cred_var="x"),
        AccessError,
    ),
    "access denied": (lambda: _client_error("AccessDenied"), AccessError),
    "expired": (lambda: _client_error("ExpiredToken"), AccessError),
    "clock": (lambda: _client_error("RequestTimeTooSkewed"), AccessError),
    "expired, of STS": (lambda: _client_error("ExpiredTokenException"), AccessError),
    "a code of 403": (lambda: _client_error("NobodyKnowsThis", 403), AccessError),
    "a code of 503": (lambda: _client_error("NobodyKnowsThat", 503), StorageError),
    "no bucket": (lambda: _client_error("NoSuchBucket"), MissingFileError),
    "slow down": (lambda: _client_error("SlowDown"), StorageError),
    "away": (lambda: _botocore("EndpointConnectionError", endpoint_url="x"), StorageError),
    "connect": (lambda: _botocore("ConnectTimeoutError", endpoint_url="x"), StorageError),
    "stream": (
        lambda: _botocore("IncompleteReadError", actual_bytes=1, expected_bytes=2),
        StorageError,
    ),
    "http 403": (lambda: _HttpError(403), AccessError),
    "http 404": (lambda: _HttpError(404), MissingFileError),
    "http 429": (lambda: _HttpError(429), StorageError),
    "http 503": (lambda: _HttpError(503), StorageError),
    "aiohttp": (lambda: pytest.importorskip("aiohttp").ClientPayloadError("cut"), StorageError),
    "reset": (lambda: ConnectionResetError(errno.ECONNRESET, "reset"), StorageError),
    "timeout": (lambda: TimeoutError(), StorageError),
    "cancelled": (lambda: asyncio.CancelledError(), StorageError),
    "block size": (
        lambda: pytest.importorskip("fsspec.exceptions").BlocksizeMismatchError("x"),
        StorageError,
    ),
    "permission": (lambda: PermissionError("no"), AccessError),
    "read-only": (lambda: OSError(errno.EROFS, "read-only"), AccessError),
    "name": (lambda: OSError(errno.ENAMETOOLONG, "long"), AccessError),
    "not a folder": (lambda: NotADirectoryError(errno.ENOTDIR, "no"), AccessError),
    "gone": (lambda: FileNotFoundError(errno.ENOENT, "no"), MissingFileError),
    "full": (lambda: OSError(errno.ENOSPC, "full"), StorageError),
    "quota": (lambda: OSError(errno.EDQUOT, "quota"), StorageError),
    "io": (lambda: OSError(errno.EIO, "io"), StorageError),
    "memory": (lambda: MemoryError(), StorageError),
    "arrow memory": (lambda: pa.ArrowMemoryError("malloc"), StorageError),
    "arrow": (lambda: pa.ArrowInvalid("bad"), DamagedFileError),
    "not implemented": (lambda: pa.ArrowNotImplementedError("bad"), DamagedFileError),
    "pages": (lambda: OSError("Corrupt page"), DamagedFileError),
    "polars": (lambda: pl.exceptions.ComputeError("bad"), DamagedFileError),
    "panic": (lambda: PanicException("unwrap"), DamagedFileError),
    "json": (lambda: json.JSONDecodeError("x", "", 0), DamagedFileError),
    "unicode": (lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "x"), DamagedFileError),
    "zlib": (lambda: zlib.error("bad"), DamagedFileError),
}


class FaultyFileSystem(AbstractFileSystem):
    """The local disk as a store that fails as it is told: `fault` is raised by every call."""

    protocol = "faulty"
    fault: ClassVar[list[BaseException]] = []
    calls: ClassVar[list[str]] = []
    disk = LocalFileSystem()

    @classmethod
    def _strip_protocol(cls, path):
        return str(path).removeprefix("faulty://").rstrip("/")


def _faulty(name):
    def call(self, *args, **kwargs):
        FaultyFileSystem.calls.append(name)
        if FaultyFileSystem.fault:
            raise FaultyFileSystem.fault[0]
        return getattr(self.disk, name)(*args, **kwargs)

    return call


for _name in ("info", "ls", "find", "cat_file", "put_file", "pipe_file", "rm_file", "rm", "open"):
    setattr(FaultyFileSystem, _name, _faulty(_name))
for _name in ("mv", "makedirs"):
    setattr(FaultyFileSystem, _name, staticmethod(getattr(FaultyFileSystem.disk, _name)))


@pytest.fixture
def faulty(tmp_path):
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    FaultyFileSystem.fault.clear()
    FaultyFileSystem.calls.clear()
    (tmp_path / "x.json").write_text("{}")
    files.write_parquet(str(tmp_path / "x.parquet"), pa.table({"a": [1]}))
    yield f"faulty://{tmp_path}"
    FaultyFileSystem.fault.clear()
    FaultyFileSystem.clear_instance_cache()


CALLS = {
    "exists": lambda at: files.exists(f"{at}/x.json"),
    "read_bytes": lambda at: files.read_bytes(f"{at}/x.json"),
    "read_json": lambda at: files.read_json(f"{at}/x.json"),
    "read_parquet": lambda at: files.read_parquet(f"{at}/x.parquet"),
    "hash_file": lambda at: files.hash_file(f"{at}/x.parquet"),
    "hash_folder": lambda at: files.hash_folder(at),
    "write_bytes": lambda at: files.write_bytes(f"{at}/y.json", b"{}"),
    "write_parquet": lambda at: files.write_parquet(f"{at}/y.parquet", pa.table({"a": [1]})),
    "list_names": lambda at: files.list_names(at),
    "describe_folder": lambda at: files.describe_folder(at),
    "remove": lambda at: files.remove(f"{at}/x.json"),
    "remove_if_there": lambda at: files.remove_if_there(f"{at}/x.json"),
    "remove_folder": lambda at: files.remove_folder(f"{at}/gone"),
    "create": lambda at: files.create(f"{at}/z.json", b"{}"),
    "check_writable": lambda at: files.check_writable(at, "output.path"),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_a_store_that_works_do_what_they_say(faulty, call):
    CALLS[call](faulty)
    assert FaultyFileSystem.calls, "the store was asked"


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_of_a_store_leaves_as_one_of_ours(faulty, error):
    make, kind = ERRORS[error]
    wrong = []
    for name, call in CALLS.items():
        FaultyFileSystem.fault[:] = [make()]
        try:
            call(faulty)
        except NightshelfError as err:
            if not isinstance(err, kind) and name.startswith(("read", "hash_file")):
                wrong.append(f"{name}: {type(err).__name__}")
            text = str(err)
            assert "\n" not in text
            assert err.exit_code in (2, 4)
        except BaseException as err:
            wrong.append(f"{name}: {type(err).__name__} {err}")
        else:
            quiet = ("exists", "list_names", "remove_if_there", "remove_folder")
            assert kind is MissingFileError or error == "not a folder", name
            assert name in quiet, f"{name} says nothing"
    assert not wrong
    FaultyFileSystem.fault.clear()
    assert not files.exists(f"{faulty}/y.json")
    assert not files.exists(f"{faulty}/y.parquet")


@pytest.mark.parametrize("error", [KeyError("x"), AttributeError("x"), AssertionError("x")])
def test_a_fault_of_ours_is_not_dressed_up(error):
    assert kind_of(error) is None
    assert translate(error, "x") is None


def test_an_interrupt_is_no_storage_error(faulty):
    FaultyFileSystem.fault[:] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        files.read_bytes(f"{faulty}/x.json")


def test_a_store_that_is_away_is_asked_again_once_and_not_by_every_caller(faulty):
    FaultyFileSystem.fault[:] = [ConnectionResetError(errno.ECONNRESET, "reset")]
    for call in ("read_json", "remove_folder", "check_writable"):
        FaultyFileSystem.calls.clear()
        with pytest.raises(StorageError, match="store does not answer|Run the same command again"):
            CALLS[call](faulty)
        tries = [name for name in FaultyFileSystem.calls if name != "rm_file" or call[0] == "r"]
        assert 2 <= len(tries) <= 5, FaultyFileSystem.calls


def test_an_upload_that_breaks_off_leaves_nothing_at_the_name(faulty, tmp_path, monkeypatch):
    """A buffered file that is closed on an error would have sent the half that it had."""
    (tmp_path / "y.json").write_text("old")

    def half(self, source, target, **kwargs):
        with open(target, "wb") as handle:
            handle.write(b"ha")
        raise ConnectionResetError(errno.ECONNRESET, "reset by peer")

    monkeypatch.setattr(FaultyFileSystem, "put_file", half)
    with pytest.raises(StorageError, match="could not be written"):
        files.write_bytes(f"{faulty}/y.json", b"half and half")
    with pytest.raises(StorageError, match="could not be written"):
        files.write_parquet(f"{faulty}/new.parquet", pa.table({"a": [1, 2]}))
    assert (tmp_path / "y.json").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.json", "x.parquet", "y.json"]


def test_a_body_that_breaks_off_sends_nothing(faulty, tmp_path):
    with (
        pytest.raises(StorageError),
        files.atomic_target(f"{faulty}/y.json") as target,
    ):
        with open(target, "wb") as handle:
            handle.write(b"half")
        raise pa.ArrowInvalid("a column cannot be written")
    assert not (tmp_path / "y.json").exists()


@pytest.mark.parametrize("name", ["x" * 260, "x.json/below", "x.json"])
def test_a_name_that_no_file_can_have_is_not_writable(tmp_path, name):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(AccessError, match="run.work_dir is not writable") as caught:
        files.check_writable(str(tmp_path / name), "run.work_dir")
    assert caught.value.field == "run.work_dir"
    assert os.listdir(tmp_path) == ["x.json"]


def test_double_colons_are_part_of_a_name(tmp_path):
    path = str(tmp_path / "a::b" / "x.json")
    files.write_json(path, {"a": 1})
    assert files.read_json(path) == {"a": 1}
    assert (tmp_path / "a::b" / "x.json").exists()
