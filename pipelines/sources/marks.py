"""How a folder shows that it is a table with a log: Delta, Iceberg, Hudi.

The files of such a folder are not its rows: they hold what was deleted and replaced too. Which of
them count stands in the log alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fsspec import AbstractFileSystem

Kind = Literal["Delta", "Iceberg", "Hudi"]

_FOLDERS: dict[str, Kind] = {"_delta_log": "Delta", ".hoodie": "Hudi"}
_METADATA = "metadata"
_SNAPSHOTS = re.compile(r"(v\d+|\d+-[^/]+)(\.gz)?\.metadata\.json(\.gz)?")


@dataclass(frozen=True, slots=True)
class LoggedTable:
    """A folder that is a table with a log; `root` is a path inside its file system."""

    kind: Kind
    root: str


def is_snapshot(name: str) -> bool:
    """Whether a file's name is that of an Iceberg table's metadata."""
    return _SNAPSHOTS.fullmatch(name) is not None


def table_at(fs: AbstractFileSystem, folder: str) -> LoggedTable | None:
    """The table whose log is in a folder."""
    for name, kind in _FOLDERS.items():
        if _is_folder(fs, f"{folder}/{name}"):
            return LoggedTable(kind, folder)
    metadata = f"{folder}/{_METADATA}"
    if _is_folder(fs, metadata):
        names = (path.rpartition("/")[2] for path in fs.ls(metadata, detail=False))
        if any(is_snapshot(name) for name in names):
            return LoggedTable("Iceberg", folder)
    return None


def table_around(fs: AbstractFileSystem, path: str) -> LoggedTable | None:
    """The table that a path lies in: that of the nearest folder above it with a log."""
    for folder in _above(path):
        try:
            found = table_at(fs, folder)
        except PermissionError:
            return None  # nothing is known of folders that are not ours to read
        if found is not None:
            return found
    return None


def table_of_file(path: str) -> LoggedTable | None:
    """The table that a listed file shows to be one, by the names above it."""
    folder, _, name = path.rpartition("/")
    parts = folder.split("/")
    for at, part in enumerate(parts):
        if part in _FOLDERS:
            return LoggedTable(_FOLDERS[part], "/".join(parts[:at]))
    if parts[-1] == _METADATA and is_snapshot(name):
        return LoggedTable("Iceberg", "/".join(parts[:-1]))
    return None


def _above(path: str) -> Iterator[str]:
    while "/" in path.rstrip("/"):
        path = path.rstrip("/").rpartition("/")[0]
        if path.strip("/"):
            yield path


def _is_folder(fs: AbstractFileSystem, path: str) -> bool:
    try:
        return bool(fs.info(path)["type"] == "directory")
    except (FileNotFoundError, NotADirectoryError):
        return False
