"""Files through fsspec, and its only user: fresh listings, atomic writes, hashes."""

from __future__ import annotations

import datetime as dt
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_random_exponential

from schemas.errors import NightshelfError, StorageError, TableError, quoted
from schemas.runs import InputFile

_CHUNK = 1 << 22
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "r2"}
_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def is_damage(error: BaseException) -> bool:
    """Whether an error may say that a file's content cannot be decoded, and not that it could not
    be had: Arrow raises OSErrors without a number for pages that are no Parquet. So do some stores
    when they are busy, which is why it is tried again all the same.
    """
    if isinstance(error, NightshelfError):
        return error.__cause__ is not None and is_damage(error.__cause__)
    if isinstance(error, OSError) and not isinstance(error, TimeoutError | ConnectionError):
        return error.errno is None
    return isinstance(error, pa.ArrowException)


def _may_pass(error: BaseException) -> bool:
    """A busy store or a dropped connection may pass; a missing file or a full disk will not."""
    if isinstance(error, NightshelfError):  # ours are raised from what happened
        return error.__cause__ is not None and _may_pass(error.__cause__)
    return (
        isinstance(error, OSError)
        and not isinstance(error, _PERMANENT)
        and not isinstance(error, pa.ArrowInvalid)
        and error.errno not in (28, 30, 122)  # no space, read-only, quota
    )


retried = retry(
    retry=retry_if_exception(_may_pass),
    wait=wait_random_exponential(multiplier=0.2, max=5.0),
    stop=stop_after_attempt(5),
    reraise=True,
)


def join(base: str, *parts: str) -> str:
    """A path below `base`, which may be a URL."""
    return "/".join([base.rstrip("/"), *parts])


def filesystem(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a path or URL, and the path inside it."""
    try:
        fs, inside = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as err:
        raise StorageError(
            "the path cannot be opened",
            got=str(err),
            where=path,
            do="Install the fsspec package of this protocol (s3fs, gcsfs, adlfs).",
        ) from err
    return fs, inside


def local_path(path: str) -> str | None:
    """The path on this machine's disk, or None for a remote one."""
    fs, inside = filesystem(path)
    return inside if isinstance(fs, LocalFileSystem) else None


@retried
def exists(path: str) -> bool:
    """Whether a file or folder is there now."""
    fs, inside = filesystem(path)
    fs.invalidate_cache()
    return bool(fs.exists(inside))


def _hidden(relative: str) -> bool:
    return any(
        part.startswith((".", "_")) and "=" not in part for part in PurePosixPath(relative).parts
    )


@retried
def list_parquet(path: str, table: str) -> list[str]:
    """The Parquet files a path names: a file, a folder (recursively) or a glob; sorted, listed
    fresh.

    Hidden files and everything below hidden folders (`_temporary`, `.staging`) are left out.

    Raises:
        TableError: nothing is there.
    """
    fs, inside = filesystem(path)
    fs.invalidate_cache()
    if any(char in inside for char in "*?["):
        root = inside.split("*")[0].split("?")[0].split("[")[0].rpartition("/")[0]
        found = [p for p in fs.glob(inside) if not fs.isdir(p)]
    elif fs.isdir(inside):
        root, found = inside, fs.find(inside)
    elif fs.exists(inside):
        root, found = inside.rpartition("/")[0], [inside]
    else:
        raise TableError(
            f"{table}: nothing is at the path",
            expected="a Parquet file, a folder of them, or a glob",
            where=path,
        )
    kept = [
        p for p in sorted(found) if p.endswith(".parquet") and not _hidden(os.path.relpath(p, root))
    ]
    if not kept:
        raise TableError(
            f"{table}: no Parquet file is at the path",
            expected="files ending in .parquet",
            got=f"{len(found)} other files" if found else "an empty folder",
            where=path,
        )
    return [str(fs.unstrip_protocol(p)) if "://" in path else str(p) for p in kept]


@retried
def describe_file(path: str, table: str) -> tuple[InputFile, pa.Schema]:
    """Size, rows, version and Arrow schema of one Parquet file.

    Raises:
        TableError: the file is empty or not Parquet.
    """
    fs, inside = filesystem(path)
    try:
        info = fs.info(inside)
        if info["size"] == 0:
            raise TableError(
                f"{table}: the file is empty (0 bytes)", expected="a Parquet file", where=path
            )
        with fs.open(inside, "rb") as handle:
            parquet = pq.ParquetFile(handle)
            rows, schema = parquet.metadata.num_rows, parquet.schema_arrow
    except (OSError, pa.ArrowException) as err:
        raise TableError(
            f"{table}: the file cannot be read as Parquet", got=_first_line(err), where=path
        ) from err
    version = info.get("ETag") or info.get("etag") or f"{info['size']}-{info.get('mtime', 0):.6f}"
    return InputFile(path=path, bytes=info["size"], rows=rows, version=str(version)), schema


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def first_list_lengths(path: str, column: str, rows: int = 10_000) -> NDArray[np.int64]:
    """Lengths of the non-empty lists among the first rows of a Parquet file."""
    fs, inside = filesystem(path)
    with fs.open(inside, "rb") as handle:
        parquet = pq.ParquetFile(handle, pre_buffer=False)
        batches = parquet.iter_batches(batch_size=rows, columns=[column], use_threads=False)
        first = next(batches, None)
        if first is None:
            return np.empty(0, dtype=np.int64)
        lengths = pc.list_value_length(first.column(0)).drop_null().to_numpy()
    found: NDArray[np.int64] = lengths[lengths > 0].astype(np.int64)
    return found


@contextmanager
def _rows_of_input(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as err:
        if not is_damage(err):
            raise
        raise unreadable("", path, err) from err


def unreadable(table: str, path: str, error: BaseException) -> TableError:
    """The error of an input file whose rows cannot be decoded."""
    return TableError(
        f"{table}: rows cannot be read" if table else "rows of an input file cannot be read",
        expected="a whole Parquet file",
        got=_first_line(error),
        where=path,
        do="The file is damaged: write it again.",
    )


@retried
def column_range(path: str, column: str) -> tuple[Any, Any] | None:
    """Smallest and largest value of a column by the file's statistics; None where they are silent.

    Bounds hold even where a writer cut long texts short.
    """
    fs, inside = filesystem(path)
    with fs.open(inside, "rb") as handle:
        footer = pq.ParquetFile(handle, pre_buffer=False).metadata
    leaves = [footer.schema.column(i).path for i in range(len(footer.schema))]
    at = leaves.index(column)  # a struct before it may have a field of that name
    groups = (footer.row_group(i).column(at) for i in range(footer.num_row_groups))
    ranges = []
    for group in groups:
        found = group.statistics
        if found is None or not found.has_min_max:
            return None
        ranges.append((found.min, found.max))
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None


@retried
def read_head(path: str, rows: int, columns: list[str] | None = None) -> pa.Table:
    """The first rows of a Parquet file, at most as many."""
    fs, inside = filesystem(path)
    with _rows_of_input(path), fs.open(inside, "rb") as handle:
        parquet = pq.ParquetFile(handle, pre_buffer=False)
        # Without threads: one that still reads ahead when the process ends takes it down.
        batches = parquet.iter_batches(batch_size=rows, columns=columns, use_threads=False)
        batch = next(batches, None)
        schema = parquet.schema_arrow
    return schema.empty_table() if batch is None else pa.Table.from_batches([batch])


@retried
def read_bytes(path: str) -> bytes:
    """A whole file."""
    fs, inside = filesystem(path)
    data: bytes = fs.cat_file(inside)
    return data


def read_json(path: str) -> Any:
    """A JSON file; `StorageError` when it is damaged."""
    try:
        return json.loads(read_bytes(path))
    except ValueError as err:
        raise StorageError(
            "a file of the run is damaged", got=_first_line(err), where=path
        ) from err


@retried
def write_bytes(path: str, data: bytes) -> None:
    """Write a whole file so that readers see all of it or nothing."""
    with atomic_target(path) as target:
        fs, inside = filesystem(target)
        with fs.open(inside, "wb") as handle:
            handle.write(data)


def write_json(path: str, value: Any) -> None:
    """Write JSON, readable by people."""
    write_bytes(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


@retried
def write_parquet(path: str, table: pa.Table, *, sorted_by: str | None = None) -> int:
    """Write one Parquet file, atomically; returns its size in bytes."""
    row_group = max(1, min(len(table), _rows_per_group(table)))
    order = None
    if sorted_by is not None:
        order = [pq.SortingColumn(table.schema.get_field_index(sorted_by))]
    with atomic_target(path) as target:
        fs, inside = filesystem(target)
        with fs.open(inside, "wb") as handle:
            pq.write_table(
                table, handle, compression="zstd", row_group_size=row_group, sorting_columns=order
            )
    fs, inside = filesystem(path)
    fs.invalidate_cache()
    size: int = fs.info(inside)["size"]
    return size


def _rows_per_group(table: pa.Table) -> int:
    """About 64 MiB per row group: the default of a million rows is 4 GiB of 1024-d vectors."""
    per_row = max(1, int(table.nbytes) // max(1, len(table)))
    return max(1024, (64 << 20) // per_row)


def make_folder(fs: fsspec.AbstractFileSystem, folder: str) -> None:
    """Make a folder where a store has folders. In an object store it would be a new bucket."""
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    if not protocols & _OBJECT_STORES:
        fs.makedirs(folder, exist_ok=True)


@contextmanager
def atomic_target(path: str) -> Iterator[str]:
    """A path to write to, which becomes `path` at the end of the block, or is removed on an error.

    On a local disk this is a rename after fsync; an object store's put is whole by itself.

    Raises:
        StorageError: the file could not be written.
    """
    fs, inside = filesystem(path)
    local = isinstance(fs, LocalFileSystem)
    folder, _, name = inside.rpartition("/")
    target = f"{folder}/.{name}.{uuid.uuid4().hex[:8]}.tmp" if local else inside
    try:
        make_folder(fs, folder)
        yield target if local else path
        if local:
            with open(target, "rb") as handle:
                os.fsync(handle.fileno())
            os.replace(target, inside)
    except OSError as err:
        raise StorageError(
            "a file could not be written",
            got=_first_line(err),
            where=path,
            do="Check permissions and free space, then run the same command again.",
        ) from err
    finally:
        if local and os.path.exists(target):
            os.remove(target)


@retried
def read_parquet(path: str, columns: list[str] | None = None) -> pa.Table:
    """One Parquet file, without partition columns from its path.

    Raises:
        StorageError: the file is missing or damaged.
    """
    fs, inside = filesystem(path)
    try:
        with fs.open(inside, "rb") as handle:
            return pq.ParquetFile(handle, pre_buffer=False).read(columns=columns, use_threads=False)
    except (OSError, pa.ArrowException) as err:
        if not isinstance(err, FileNotFoundError) and not is_damage(err):
            raise
        raise StorageError("a file cannot be read", got=_first_line(err), where=path) from err


@retried
def remove(path: str) -> None:
    """Remove a file that is there."""
    fs, inside = filesystem(path)
    fs.rm_file(inside)


@retried
def remove_if_there(path: str) -> None:
    """Remove a file; somebody else may have done it."""
    fs, inside = filesystem(path)
    try:
        fs.rm_file(inside)
    except FileNotFoundError:
        return


@retried
def remove_folder(path: str) -> None:
    """Remove a folder and everything below it, if it is there. Its `_done`, which says that it is
    whole, goes first.
    """
    fs, inside = filesystem(path)
    remove_if_there(join(path, "_done"))
    fs.invalidate_cache()
    with suppress(FileNotFoundError):
        fs.rm(inside, recursive=True)


def describe_folder(path: str) -> tuple[int, float]:
    """Bytes of everything below a folder, and when any of it was written last (seconds, 0 when
    there is nothing).
    """
    fs, inside = filesystem(path)
    fs.invalidate_cache()
    size, latest = 0, 0.0
    for info in fs.find(inside, detail=True).values():
        changed = info.get("mtime") or info.get("LastModified") or info.get("last_modified")
        changed = changed or info.get("updated") or 0.0
        if isinstance(changed, str):
            changed = dt.datetime.fromisoformat(changed)
        latest = max(latest, changed.timestamp() if hasattr(changed, "timestamp") else changed)
        size += int(info.get("size") or 0)
    return size, latest


@retried
def list_names(folder: str) -> list[str]:
    """Names of the files directly in a folder, listed fresh; empty when there is no such folder."""
    fs, inside = filesystem(folder)
    fs.invalidate_cache()
    try:
        return sorted(p.rpartition("/")[2] for p in fs.ls(inside, detail=False))
    except FileNotFoundError:
        return []


@retried
def list_sizes(folder: str) -> dict[str, int]:
    """Bytes of each file directly in a folder, listed fresh; empty when there is no such folder."""
    fs, inside = filesystem(folder)
    fs.invalidate_cache()
    try:
        found = fs.ls(inside, detail=True)
    except FileNotFoundError:
        return {}
    return {info["name"].rpartition("/")[2]: int(info["size"] or 0) for info in found}


def hash_bytes(*parts: bytes) -> str:
    """xxh3-128 of the parts, as hex."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return str(digest.hexdigest())


@retried
def hash_file(path: str) -> str:
    """xxh3-128 of a file's content, as hex."""
    fs, inside = filesystem(path)
    digest = xxhash.xxh3_128()
    with fs.open(inside, "rb") as handle:
        while block := handle.read(_CHUNK):
            digest.update(block)
    return str(digest.hexdigest())


def hash_folder(path: str) -> str:
    """xxh3-128 over the names and contents of a folder's files, as hex."""
    fs, inside = filesystem(path)
    found = sorted(fs.find(inside))

    def full(found: str) -> str:
        return str(fs.unstrip_protocol(found)) if "://" in path else found

    parts = [f"{os.path.relpath(p, inside)} {hash_file(full(p))}\n".encode() for p in found]
    return hash_bytes(*parts)


def check_writable(path: str, setting: str) -> None:
    """Raise `StorageError`, naming the setting, when nothing can be written below a path."""
    probe = join(path, f".nightshelf-{uuid.uuid4().hex[:8]}")
    try:
        write_bytes(probe, b"")
        remove(probe)
    except StorageError as err:
        raise StorageError(
            f"{setting} is not writable", got=err.got or quoted(str(err)), where=path
        ) from err


@retried
def create(path: str, data: bytes) -> bool:
    """Create a file that is whole when it appears; False when the name is taken.

    Raises:
        StorageError: it cannot be written.
    """
    local = local_path(path)
    try:
        if local is not None:
            _link(local, data)
        else:
            fs, inside = filesystem(path)
            fs.pipe_file(inside, data, mode="create")
    except FileExistsError:
        return False
    except OSError as err:
        raise StorageError("a file could not be created", got=str(err), where=path) from err
    return True


def _link(path: str, data: bytes) -> None:
    folder, _, name = path.rpartition("/")
    os.makedirs(folder, exist_ok=True)
    draft = f"{folder}/.{name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        with open(draft, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.link(draft, path)
    finally:
        if os.path.exists(draft):
            os.remove(draft)
