"""What stands where a table is to be: a table of another format, or what is left of a lost one."""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from pipelines.publish.names import pointer_root
from pipelines.sources.marks import table_around
from pipelines.storage import files
from pipelines.storage.stores import filesystem
from schemas.errors import ConfigError, quoted

Found = TypeVar("Found")
_OURS_TO_IGNORE = {"_SUCCESS", "_temporary"}


def lake_at(path: str) -> str | None:
    """The format of the lake table whose folder this is; None where it is none."""
    names = set(files.list_names(path))
    if "_delta_log" in names:
        return "Delta"
    if ".hoodie" in names:
        return "Hudi"
    if "catalog.db" in names:
        return "Iceberg"
    if "metadata" in names:
        inside = files.list_names(files.join(path, "metadata"))
        if any(name.endswith(".metadata.json") or name == "version-hint.text" for name in inside):
            return "Iceberg"
    return None


def check_not_inside(path: str) -> None:
    """Raise `ConfigError` where a folder of a lake table lies above a path: its own maintenance
    removes files that its log does not name.
    """
    fs, inside = filesystem(path)
    if (found := table_around(fs, inside)) is not None:
        raise ConfigError(
            f"output.path is inside a table of {found.kind}",
            expected="a folder of its own",
            got=f"the table {found.root}",
            where=path,
            do="Nothing was touched. Publish to another folder.",
            field="output.path",
        )


def check_no_lake(path: str) -> None:
    """Raise `ConfigError` where Parquet files would go into a lake table's folder, or below it."""
    check_not_inside(path)
    if (found := lake_at(path)) is not None:
        known = found.lower() in ("delta", "iceberg")
        raise ConfigError(
            f"output.format is parquet, but the folder is a table of {found}",
            expected=f"output.format: {found.lower()}" if known else "another output.path",
            got="output.format: parquet",
            where=path,
            do="Nothing was touched. Say the format, or publish to another folder.",
            field="output.format",
        )


def check_new_table(path: str, format: str) -> None:
    """Raise `ConfigError` where a new lake table would be made over what is there already: a table
    of another format, or data files whose log is lost; or inside another table.
    """
    check_not_inside(path)
    found = lake_at(path)
    if found is not None and not (format == "delta" and found == "Delta"):
        if format == "iceberg" and found == "Iceberg":
            return
        raise ConfigError(
            f"output.format is {format}, but the folder is a table of {found}",
            got=f"output.format: {format}",
            where=path,
            do="Nothing was touched. Say the format, or publish to another folder.",
            field="output.format",
        )
    if files.list_names(pointer_root(path)):
        raise ConfigError(
            f"output.format is {format}, but the folder is a Parquet table",
            expected="output.format: parquet",
            got=f"output.format: {format}",
            where=pointer_root(path),
            do="Nothing was touched. Say the format, or publish to another folder.",
            field="output.format",
        )
    there = [
        name
        for name in files.list_names(path)
        if not name.startswith((".", "_")) and name not in _OURS_TO_IGNORE
    ]
    if there:
        lost = "its _delta_log" if format == "delta" else "its catalog"
        raise ConfigError(
            f"the folder of a new {format} table is not empty",
            expected=f"an empty folder, or a {format} table",
            got=", ".join(there[:3]) + (", …" if len(there) > 3 else ""),
            where=path,
            do=f"If it was a table, {lost} is lost: restore it first, or older dates would vanish. "
            "Else publish to another folder.",
            field="output.path",
        )


def wait_for(load: Callable[[], Found | None], check: Callable[[], None]) -> Found | None:
    """The table, which another publisher may be making at this moment; None where `check` lets a
    new one be made.

    Raises: what `check` raises, for a while.
    """
    for tries_left in reversed(range(10)):
        try:
            check()
        except ConfigError:
            if (found := load()) is not None:
                return found
            if not tries_left:
                raise
            time.sleep(0.2)
        else:
            return None
    return None


def check_no_links(path: str) -> None:
    """Raise `ConfigError` on a disk without hard links, by which Delta's log takes a version."""
    local = files.local_path(path)
    if local is None:
        return
    folder = local
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    probe = f"{folder}/.nightshelf-{uuid.uuid4().hex[:8]}"
    try:
        with open(probe, "wb"):
            pass
        os.link(probe, f"{probe}-link")
    except OSError as err:
        if err.errno in (errno.EACCES, errno.EROFS) and not os.path.exists(probe):
            return  # cannot be written at all, which is said elsewhere
        raise ConfigError(
            "the disk has no hard links, which a Delta table needs",
            got=quoted(str(err)),
            where=path,
            do="Use output.format: parquet or iceberg there, or another disk.",
            field="output.format",
        ) from err
    finally:
        for name in (probe, f"{probe}-link"):
            with suppress(OSError):
                os.remove(name)


def check_create(path: str) -> None:
    """Try what a publish does beside a table: create a file by its name, once, and remove it.

    Raises:
        StorageError: that cannot be done there.
    """
    probe = files.join(path, f".nightshelf-{uuid.uuid4().hex[:8]}")
    files.create(probe, b"1")
    files.remove(probe)
