"""Seals: what proves that derived files are what was written.

A folder of derived files ends with `_done`, written last, which names every file with its size and
the hash of its content. A file that is cut short, empty or has one bit flipped is told by it, and
whoever finds that writes the files again.
"""

from __future__ import annotations

import os

from fsspec.implementations.local import LocalFileSystem

from pipelines.storage import files
from pipelines.storage.files import Written
from pipelines.storage.storage_errors import retried, translated
from schemas.errors import StorageError

_DONE = "_done"
_FORMAT = 1
_proven: dict[tuple[str, str], str] = {}  # (path, its version) -> hash of its content


def write_seal(folder: str, written: dict[str, Written]) -> None:
    """Say that the files of a folder are whole; the last thing that is written."""
    found = {name: {"bytes": one.bytes, "xxh3": one.xxh3} for name, one in written.items()}
    files.write_record(files.join(folder, _DONE), {"format": _FORMAT, "files": found})


def read_seal(folder: str) -> dict[str, Written] | None:
    """What was written, by name; None where nothing says so, or nothing that can be believed."""
    path = files.join(folder, _DONE)
    if not files.exists(path):
        return None
    try:
        found = files.read_json(path)
        return {name: Written(one["bytes"], one["xxh3"]) for name, one in found["files"].items()}
    except (StorageError, KeyError, TypeError, AttributeError):
        return None


def break_seal(folder: str) -> None:
    """Take back what `write_seal` said."""
    files.remove_if_there(files.join(folder, _DONE))


def is_written(path: str, written: Written) -> bool:
    """Whether a file is what was written, by its content. A file that has not been touched since
    this process looked is not read again.
    """
    try:
        key = (path, version_of(path))
        if key not in _proven:
            _proven[key] = files.hash_file(path)
    except StorageError:
        return False
    return _proven[key] == written.xxh3


@retried
def version_of(path: str) -> str:
    """What changes when a file is written again: size, time and place on a disk, elsewhere the etag
    or size and time.

    Raises:
        MissingFileError: it is not there.
    """
    fs, inside = files.filesystem(path)
    with translated(path):
        if isinstance(fs, LocalFileSystem):
            found = os.stat(inside)
            return f"{found.st_size}-{found.st_mtime_ns}-{found.st_ino}"
        fs.invalidate_cache()
        info = fs.info(inside)
    times = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")
    return f"{info.get('size')}-" + "-".join(str(info[name]) for name in times if name in info)
