"""Files through fsspec: fresh listings, whole writes, checked reads. What a run writes and reads
again; input tables are in pipelines/sources/input_files.py.

Whatever a disk, a store or a decoder raises leaves this module as one of our errors
(pipelines/storage/storage_errors.py), after it was tried again where that may help.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from fsspec.implementations.local import LocalFileSystem

from pipelines.storage.atomic_writes import atomic_target, create
from pipelines.storage.hashes import hash_bytes, hash_local
from pipelines.storage.storage_errors import first_line, is_damage, retried, translated
from pipelines.storage.stores import filesystem, join, local_path, make_folder
from schemas.errors import (
    AccessError,
    DamagedFileError,
    MissingFileError,
    StorageError,
    quoted,
)

# What others take from here, beside what is defined here.
__all__ = [
    "atomic_target",
    "create",
    "filesystem",
    "first_line",
    "hash_bytes",
    "is_damage",
    "join",
    "local_path",
    "make_folder",
    "retried",
]
_CHUNK = 1 << 22
_CHECKSUM = "checksum"  # of a record, in the record


@dataclass(frozen=True, slots=True)
class Written:
    """A file as it was written: its size and the xxh3-128 of its content, as hex."""

    bytes: int
    xxh3: str


@retried
def exists(path: str) -> bool:
    """Whether a file or folder is there now."""
    fs, inside = filesystem(path)
    with translated(path):
        fs.invalidate_cache()
        try:  # not fs.exists: many say no to whatever goes wrong
            os.stat(inside) if isinstance(fs, LocalFileSystem) else fs.info(inside)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True


@retried
def read_bytes(path: str) -> bytes:
    """A whole file.

    Raises:
        MissingFileError: it is not there.
    """
    fs, inside = filesystem(path)
    with translated(path):
        data: bytes = fs.cat_file(inside)
        return data


def read_json(path: str) -> Any:
    """A JSON file; of one that `write_record` wrote, what was given to it.

    Raises:
        MissingFileError: it is not there.
        DamagedFileError: it is no JSON, or not what was written.
    """
    try:
        value = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as err:
        raise _damaged(path, first_line(err)) from err
    if not isinstance(value, dict) or _CHECKSUM not in value:
        return value
    found = value.pop(_CHECKSUM)
    if found != _checksum(value):
        raise _damaged(path, "another content than was written")
    return value


def _damaged(path: str, got: str) -> DamagedFileError:
    return DamagedFileError("a file of the run is damaged", got=got, where=path)


def _checksum(value: dict[str, Any]) -> str:
    return hash_bytes(json.dumps(value, sort_keys=True).encode())


@retried
def write_bytes(path: str, data: bytes) -> None:
    """Write a whole file so that readers see all of it or nothing."""
    with atomic_target(path) as target, open(target, "wb") as handle:
        handle.write(data)


def write_json(path: str, value: Any) -> None:
    """Write JSON, readable by people."""
    write_bytes(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def write_record(path: str, value: dict[str, Any]) -> None:
    """Write JSON with a checksum of itself, which `read_json` holds it to."""
    value = json.loads(json.dumps(value))  # as a reader gets it: keys are texts
    write_json(path, {**value, _CHECKSUM: _checksum(value)})


def write_parquet(path: str, table: pa.Table, *, sorted_by: str | None = None) -> int:
    """Write one Parquet file, atomically; returns its size in bytes."""
    return write_table(path, table, sorted_by=sorted_by).bytes


@retried
def write_table(path: str, table: pa.Table, *, sorted_by: str | None = None) -> Written:
    """Write one Parquet file, atomically, its pages with checksums."""
    row_group = max(1, min(len(table), _rows_per_group(table)))
    order = None
    if sorted_by is not None:
        order = [pq.SortingColumn(table.schema.get_field_index(sorted_by))]
    with atomic_target(path) as target:
        pq.write_table(
            table,
            target,
            compression="zstd",
            row_group_size=row_group,
            sorting_columns=order,
            write_page_checksum=True,
        )
        return Written(os.path.getsize(target), hash_local(target))


def _rows_per_group(table: pa.Table) -> int:
    """About 64 MiB per row group: the default of a million rows is 4 GiB of 1024-d vectors."""
    per_row = max(1, int(table.nbytes) // max(1, len(table)))
    return max(1024, (64 << 20) // per_row)


@retried
def read_parquet(
    path: str, columns: list[str] | None = None, *, proof: Written | None = None
) -> pa.Table:
    """One Parquet file, without partition columns from its path.

    Args:
        path: the file.
        columns: those to read; None: all.
        proof: what the file was when it was written; it is held to that.

    Raises:
        MissingFileError: the file is not there.
        DamagedFileError: it cannot be decoded, or is not what was written.
    """
    fs, inside = filesystem(path)
    with translated(path):
        if proof is not None:
            source = pa.BufferReader(_proven(path, fs.cat_file(inside), proof))
            return _read_table(source, columns)
        with fs.open(inside, "rb") as handle:
            return _read_table(handle, columns)


def _read_table(source: Any, columns: list[str] | None) -> pa.Table:
    parquet = pq.ParquetFile(source, pre_buffer=False, page_checksum_verification=True)
    return parquet.read(columns=columns, use_threads=False)


def _proven(path: str, data: bytes, proof: Written) -> bytes:
    if len(data) != proof.bytes:
        raise _damaged(path, f"{len(data)} bytes, and {proof.bytes} were written")
    if hash_bytes(data) != proof.xxh3:
        raise _damaged(path, "another content than was written")
    return data


@retried
def remove(path: str) -> None:
    """Remove a file that is there."""
    fs, inside = filesystem(path)
    with translated(path, done="removed"):
        fs.rm_file(inside)


@retried
def remove_if_there(path: str) -> None:
    """Remove a file; somebody else may have done it."""
    fs, inside = filesystem(path)
    with translated(path, done="removed"), suppress(FileNotFoundError):
        fs.rm_file(inside)


@retried
def remove_folder(path: str) -> None:
    """Remove a folder and everything below it, if it is there. Its `_done`, which says that it is
    whole, goes first.
    """
    fs, inside = filesystem(path)
    remove_if_there(join(path, "_done"))
    with translated(path, done="removed", what="a folder"), suppress(FileNotFoundError):
        fs.invalidate_cache()
        fs.rm(inside, recursive=True)


@retried
def describe_folder(path: str) -> tuple[int, float]:
    """Bytes of everything below a folder, and when any of it was written last (seconds, 0 when
    there is nothing).
    """
    fs, inside = filesystem(path)
    with translated(path, done="listed", what="a folder"):
        fs.invalidate_cache()
        found = fs.find(inside, detail=True).values()
    size, latest = 0, 0.0
    for info in found:
        changed = info.get("mtime") or info.get("LastModified") or info.get("last_modified")
        changed = changed or info.get("updated") or 0.0
        if isinstance(changed, str):
            changed = dt.datetime.fromisoformat(changed)
        latest = max(latest, changed.timestamp() if hasattr(changed, "timestamp") else changed)
        size += int(info.get("size") or 0)
    return size, latest


def list_names(folder: str) -> list[str]:
    """Names of the files directly in a folder, listed fresh; empty when there is no such folder."""
    return sorted(list_sizes(folder))


@retried
def list_sizes(folder: str) -> dict[str, int]:
    """Bytes of each file directly in a folder, listed fresh; empty when there is no such folder."""
    fs, inside = filesystem(folder)
    with translated(folder, done="listed", what="a folder"):
        fs.invalidate_cache()
        try:
            found = fs.ls(inside, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
    return {info["name"].rpartition("/")[2]: int(info["size"] or 0) for info in found}


@retried
def find(folder: str) -> list[str]:
    """Paths of all files below a folder, relative to it, sorted and listed fresh."""
    fs, inside = filesystem(folder)
    with translated(folder, done="listed", what="a folder"):
        fs.invalidate_cache()
        return sorted(os.path.relpath(found, inside) for found in fs.find(inside))


@retried
def hash_file(path: str) -> str:
    """xxh3-128 of a file's content, as hex."""
    fs, inside = filesystem(path)
    with translated(path):
        if isinstance(fs, LocalFileSystem):
            return hash_local(inside)
        digest = xxhash.xxh3_128()
        with fs.open(inside, "rb") as handle:
            while block := handle.read(_CHUNK):
                digest.update(block)
        return str(digest.hexdigest())


def find_visible(folder: str) -> list[str]:
    """What `find` gives, without hidden files: a download leaves its bookkeeping in them."""
    return [name for name in find(folder) if not any(p[:1] == "." for p in name.split("/"))]


def hash_folder(path: str) -> str:
    """xxh3-128 over the names and contents of a folder's files, as hex; hidden ones left out."""
    parts = [f"{name} {hash_file(join(path, name))}\n".encode() for name in find_visible(path)]
    return hash_bytes(*parts)


def check_writable(path: str, setting: str) -> None:
    """Try a path by writing below it.

    Raises:
        AccessError: naming the setting: nothing may be written there, now or later.
        StorageError: it could not be tried: the disk is full, or the store does not answer.
    """
    probe = join(path, f".nightshelf-{uuid.uuid4().hex[:8]}")
    try:
        write_bytes(probe, b"")
        remove(probe)
    except (AccessError, MissingFileError) as err:
        raise AccessError(
            f"{setting} is not writable",
            got=err.got or quoted(str(err)),
            where=path,
            do="Choose a folder you may write to.",
            field=setting,
        ) from err
    except StorageError as err:
        err.what = f"{setting}: {err.what}"
        err.field = setting
        raise
