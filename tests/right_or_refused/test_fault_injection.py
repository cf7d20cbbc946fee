"""Whatever a library raises, wherever the product calls it, a command ends with a documented exit
code and one sentence, and nothing is published by half.

Each trial makes one function of a library raise one error, at its first call or a later one. The
libraries themselves are real, and so is everything else of the run.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import importlib
import json
import os
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from tests.factories import tiny_model, write_config, write_inputs

DOCUMENTED = (0, 2, 3, 4, 5, 6, 130)
PARTITION = "ds=2026-11-28/surface=home"


class PanicException(BaseException):
    """As polars, deltalake and tokenizers each have one."""


def _client(name: str, **facts: str) -> Exception:
    error: Exception = getattr(pytest.importorskip("botocore.exceptions"), name)(**facts)
    return error


def _delta() -> Exception:
    error: Exception = pytest.importorskip("deltalake.exceptions").DeltaError("no")
    return error


def _iceberg() -> Exception:
    error: Exception = pytest.importorskip("pyiceberg.exceptions").ServerError("no")
    return error


def _database() -> Exception:
    sql = pytest.importorskip("sqlalchemy.exc")
    error: Exception = sql.OperationalError("select", {}, Exception("database is locked"))
    return error


ERRORS = {
    "full": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "io": lambda: OSError(errno.EIO, "Input/output error"),
    "read-only": lambda: OSError(errno.EROFS, "Read-only file system"),
    "no number": lambda: OSError("Unexpected end of stream"),
    "permission": lambda: PermissionError(errno.EACCES, "Permission denied"),
    "gone": lambda: FileNotFoundError(errno.ENOENT, "No such file or directory"),
    "reset": lambda: ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    "timeout": lambda: TimeoutError(),
    "cancelled": lambda: asyncio.CancelledError(),
    "credentials": lambda: _client("NoCredentialsError"),
    "endpoint": lambda: _client("EndpointConnectionError", endpoint_url="http://x"),
    "arrow": lambda: pa.ArrowInvalid("Corrupt snappy compressed data"),
    "arrow memory": lambda: pa.ArrowMemoryError("malloc of size 1 failed"),
    "polars": lambda: pl.exceptions.ComputeError("parquet: File out of specification"),
    "schema": lambda: pl.exceptions.SchemaError("type Int64 is incompatible"),
    "memory": lambda: MemoryError(),
    "panic": lambda: PanicException("called `Option::unwrap()` on a `None` value"),
    "interrupt": lambda: KeyboardInterrupt(),
    "delta": _delta,
    "iceberg": _iceberg,
    "database": _database,
    "bare": lambda: Exception("a library that raises Exception itself"),
    "unicode": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
}
DISK = ("full", "io", "read-only", "permission", "gone", "interrupt")
STORE = ("reset", "timeout", "cancelled", "credentials", "endpoint", "permission")
ARROW = ("no number", "arrow", "arrow memory", "memory", "unicode")
RUST = ("no number", "polars", "schema", "panic", "memory", "interrupt")

BOUNDARIES: dict[str, tuple[str, ...]] = {
    "pyarrow.parquet.ParquetFile": (*ARROW, "io"),
    "pyarrow.parquet.ParquetFile.read": ARROW,
    "pyarrow.parquet.ParquetFile.iter_batches": ARROW,
    "pyarrow.parquet.write_table": (*ARROW, "full"),
    "pyarrow.ipc.open_file": ("arrow", "io", "memory"),
    "polars.scan_parquet": RUST,
    "polars.read_parquet": RUST,
    "polars.LazyFrame.collect": RUST,
    "polars.LazyFrame.sink_parquet": (*RUST, "full"),
    "polars.LazyFrame.collect_schema": ("polars", "schema", "panic"),
    "polars.from_arrow": ("panic", "memory", "arrow"),
    "fsspec.filesystem": ("credentials", "permission"),
    "fsspec.implementations.local.LocalFileSystem.info": (*DISK, *STORE),
    "fsspec.implementations.local.LocalFileSystem.ls": (*DISK, "reset"),
    "fsspec.implementations.local.LocalFileSystem.find": (*DISK, "endpoint"),
    "fsspec.implementations.local.LocalFileSystem.open": (*DISK, *STORE),
    "fsspec.implementations.local.LocalFileSystem.cat_file": (*DISK, *STORE),
    "fsspec.implementations.local.LocalFileSystem.makedirs": DISK,
    "fsspec.implementations.local.LocalFileSystem.rm_file": DISK,
    "os.replace": DISK,
    "os.fsync": ("full", "io", "interrupt"),
    "os.link": ("full", "io"),
}
LAKES: dict[str, dict[str, tuple[str, ...]]] = {
    "delta": {
        "deltalake.DeltaTable.__init__": ("delta", "reset", "panic", "memory", "bare"),
        "deltalake.DeltaTable.create_write_transaction": ("delta", "panic", "bare", "interrupt"),
    },
    "iceberg": {
        "pyiceberg.catalog.sql.SqlCatalog.load_table": ("iceberg", "database", "io"),
        "pyiceberg.catalog.sql.SqlCatalog.commit_table": ("iceberg", "database", "reset", "bare"),
    },
}
TRIALS = [(where, error) for where, errors in BOUNDARIES.items() for error in errors]


def break_at(monkeypatch: Any, where: str, error: str, call: int) -> list[int]:
    """Let a function of a library raise at its n-th call; counts the calls."""
    parts, attributes = where.split("."), list[str]()
    while True:
        try:
            owner: Any = importlib.import_module(".".join(parts))
            break
        except ImportError:
            attributes.insert(0, parts.pop())
    for name in attributes[:-1]:
        owner = getattr(owner, name)
    plain, calls = getattr(owner, attributes[-1]), [0]

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > call:  # and from then on: a disk that is full stays so
            raise ERRORS[error]()
        return plain(*args, **kwargs)

    if isinstance(plain, type):  # a class stays one: others ask whether something is of it
        monkeypatch.setattr(plain, "__init__", _init(plain.__init__, calls, error, call))
    else:
        monkeypatch.setattr(owner, attributes[-1], broken)
    return calls


def _init(plain: Any, calls: list[int], error: str, call: int) -> Any:
    def broken(self: Any, *args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        if calls[0] > call:
            raise ERRORS[error]()
        plain(self, *args, **kwargs)

    return broken


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder, num_users=12)
    return folder


@pytest.fixture
def config(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    paths = {p.stem: str(p) for p in inputs.glob("*.parquet")}
    return write_config(tmp_path, inputs=paths, run__shard_users=6, report={"examples": 0})


def ended(done: Any, out: Path, what: str) -> None:
    """A documented end, with one sentence; and all of the rows, or none that readers see."""
    assert done.code in DOCUMENTED, f"{what}: exit {done.code}\n{done.err}"
    assert "Traceback" not in done.err
    if done.code == 0:
        return
    last = json.loads(done.out.strip().splitlines()[-1])
    assert last["error"]["exit_code"] == done.code, what
    assert last["error"]["message"], what
    assert done.err.strip().splitlines()[-1].startswith("nightshelf: "), what
    if (out / PARTITION / "_SUCCESS").exists():
        assert len({row["user_id"] for row in whole_rows(out)}) > 0, what


def whole_rows(out: Path) -> list[dict[str, Any]]:
    return pl.read_parquet(out / PARTITION, hive_partitioning=False).to_dicts()


@pytest.mark.parametrize(("where", "error"), TRIALS, ids=[f"{w}-{e}" for w, e in TRIALS])
def test_a_run_ends_as_documented_whatever_a_library_raises(
    nightshelf, tmp_path, config, where, error
):
    codes = []
    for call in (0, 5):
        with pytest.MonkeyPatch.context() as patch:
            calls = break_at(patch, where, error, call)
            out = tmp_path / f"out{call}"
            changed = ("--set", f"output.path={out}", "--set", f"run.work_dir={tmp_path / 'w'}")
            done = nightshelf("run", config, *changed, "--output", "json", check=None)
        ended(done, out, f"{where} raised {error} at call {call + 1}")
        codes.append(done.code)
        if call >= calls[0]:
            assert done.code == 0, "nothing went wrong"
    if error == "interrupt":
        assert set(codes) <= {0, 130}


@pytest.mark.parametrize("command", ["validate", "plan"])
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("pyarrow.parquet.ParquetFile", "panic"),
        ("fsspec.implementations.local.LocalFileSystem.open", "credentials"),
        ("fsspec.implementations.local.LocalFileSystem.info", "endpoint"),
        ("fsspec.implementations.local.LocalFileSystem.info", "permission"),
        ("os.replace", "read-only"),
        ("os.replace", "full"),
        ("polars.LazyFrame.collect", "panic"),
    ],
)
def test_what_comes_before_a_run_ends_as_documented(
    nightshelf, tmp_path, config, monkeypatch, command, where, error
):
    break_at(monkeypatch, where, error, 0)
    done = nightshelf(command, config, "--output", "json", check=None)
    assert done.code in DOCUMENTED, done.err
    json.loads(done.out.strip().splitlines()[-1])
    if error in ("credentials", "permission", "read-only"):
        assert done.code in (2, 3), done.out
    if error in ("endpoint", "full"):
        assert done.code == 4, done.out


LAKE_TRIALS = [
    (lake, where, error)
    for lake, places in LAKES.items()
    for where, errors in places.items()
    for error in errors
]


@pytest.mark.parametrize(("lake", "where", "error"), LAKE_TRIALS)
def test_a_table_format_that_breaks_publishes_nothing(
    nightshelf, tmp_path, config, lake, where, error
):
    pytest.importorskip({"delta": "deltalake", "iceberg": "pyiceberg"}[lake])
    for call in (0, 1):
        with pytest.MonkeyPatch.context() as patch:
            break_at(patch, where, error, call)
            changed = ("--set", f"output.format={lake}", "--set", f"output.path={tmp_path / 'out'}")
            done = nightshelf("run", config, *changed, "--output", "json", check=None)
        assert done.code in DOCUMENTED, f"exit {done.code}\n{done.err}"
        if done.code:
            assert json.loads(done.out.strip().splitlines()[-1])["error"]["message"]
    nightshelf("run", config, *changed)


@pytest.mark.parametrize("error", ["bare", "panic", "memory", "unicode", "io", "interrupt"])
@pytest.mark.parametrize("method", ["from_file", "encode_batch"])
def test_a_tokenizer_that_breaks_ends_as_documented(
    nightshelf, tmp_path, config, monkeypatch, method, error
):
    from engine.prompts import tokenizer

    model = tiny_model(tmp_path / "model")
    plain = tokenizer.FastTokenizer

    class Broken:
        """The class of a Rust library cannot be changed: this one stands before it."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            if name.startswith(method):
                raise ERRORS[error]()
            return getattr(self._inner, name)

        @staticmethod
        def from_file(path: str) -> Any:
            if method == "from_file":
                raise ERRORS[error]()
            return Broken(plain.from_file(path))

    monkeypatch.setattr(tokenizer, "FastTokenizer", Broken)
    changed = ("--set", f"engine.model={model}", "--set", "prompt.template=a {text:segment}")
    for command in ("run", "validate"):
        done = nightshelf(command, config, *changed, "--output", "json", check=None)
        assert done.code in DOCUMENTED, f"{command}: exit {done.code}\n{done.err}"
        json.loads(done.out.strip().splitlines()[-1])


def _mounted(folder: Path, options: str) -> bool:
    folder.mkdir()
    if os.geteuid() != 0 or not hasattr(os, "getuid"):
        return False
    return os.system(f"mount -t tmpfs -o {options} tmpfs '{folder}' 2>/dev/null") == 0


@pytest.fixture
def mount(tmp_path):
    """Mount a small disk; where that is not permitted, the test is skipped."""
    mounted = []

    def small(options: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        if not _mounted(folder, options):
            pytest.skip("mounting a tmpfs is not permitted here")
        mounted.append(folder)
        return folder

    yield small
    for folder in mounted:
        os.system(f"umount '{folder}'")


@pytest.mark.parametrize("options", ["size=128k", "size=64m,nr_inodes=6"])
@pytest.mark.parametrize("setting", ["run.work_dir", "output.path"])
def test_a_disk_without_room_ends_with_4_and_names_it(
    nightshelf, tmp_path, config, mount, options, setting
):
    disk = mount(options)
    if "size=128k" in options:
        (disk / "others").write_bytes(os.urandom(120 << 10))
    place = ("--set", f"{setting}={disk}/place", "--output", "json")
    done = nightshelf("run", config, *place, check=4)
    assert str(disk) in done.err
    assert "Free space, inodes or memory" in done.err
    assert not (disk / "place" / PARTITION / "_SUCCESS").exists()


@pytest.mark.parametrize("setting", ["run.work_dir", "output.path", "run.metrics_dir"])
@pytest.mark.parametrize("command", ["run", "validate"])
def test_a_disk_that_is_read_only_is_no_place(nightshelf, config, mount, setting, command):
    disk = mount("size=1m")
    (disk / "there").mkdir()
    assert os.system(f"mount -o remount,ro '{disk}'") == 0
    for place in (disk / "there", disk / "new" / "folder"):
        done = nightshelf(
            command, config, "--set", f"{setting}={place}", "--output", "json", check=2
        )
        assert f"{setting} is not writable" in done.out + done.err


def test_an_error_of_ours_stays_exit_1(nightshelf, config, monkeypatch):
    """A fault of the product is not dressed up as one of the disk."""

    def wrong(*args: Any) -> None:
        raise builtins.KeyError("x")

    monkeypatch.setattr("jobs.running.run.audit_run", wrong)
    assert "unexpected KeyError" in nightshelf("run", config, check=1).err
