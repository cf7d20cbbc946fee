"""Files through fsspec: fresh listings, atomic writes, hashes. What a run writes and reads again;
input tables are in pipelines/input_files.py.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from fsspec.implementations.local import LocalFileSystem
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_random_exponential

from schemas.errors import NightshelfError, StorageError, quoted

_CHUNK = 1 << 22
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
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
    """The file system of a path or URL, and the path inside it. `::` is part of a name: fsspec
    would chain file systems there.
    """
    protocol = path.partition("://")[0] if _URL.match(path) else "file"
    try:
        kind = fsspec.get_filesystem_class(protocol)
        fs = fsspec.filesystem(protocol, **kind._get_kwargs_from_urls(path))
        inside = str(fs._strip_protocol(path))
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


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


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
        raise StorageError("a file of the run is damaged", got=first_line(err), where=path) from err


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
            got=first_line(err),
            where=path,
            do="Check permissions and free space, then run the same command again.",
        ) from err
    finally:
        if local:
            with suppress(FileNotFoundError, NotADirectoryError):  # renamed, cleared, never made
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
        raise StorageError("a file cannot be read", got=first_line(err), where=path) from err


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
