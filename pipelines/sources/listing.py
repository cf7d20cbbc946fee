"""The files that a path names: a file, a folder with all below it, or a pattern.

Every file that is found is named to the caller, whatever its suffix. Left out is only what Spark
leaves out too: names that begin with `_` or `.`, and all below such folders. A folder
`_country=se` is no hidden one: its name is a column.

A path that is there is that path: `*`, `?` and brackets are a pattern only where nothing has that
very name, part by part.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipelines.sources.marks import LoggedTable, table_around, table_at, table_of_file
from pipelines.storage.files import filesystem, retried
from pipelines.storage.storage_errors import StoreAwayError, translate
from schemas.errors import AccessError, ConfigError, TableError

_MAGIC = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Found:
    """A file, and the folders between what was named and it."""

    path: str
    folders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """What is at a path: files, or a table whose log says which files count.

    Attributes:
        files: sorted by path; paths as the rest of the program opens them.
        table: the table that the path is, or lies in; `files` are then empty.
        below: where in the table the path is, empty for the table itself.
    """

    files: tuple[Found, ...] = ()
    table: LoggedTable | None = None
    below: tuple[str, ...] = ()


@dataclass(slots=True)
class _Walk:
    """One listing: where it is done, for which table, and whether links were followed."""

    fs: AbstractFileSystem
    table: str
    path: str
    kind: str  # of the files that are wanted, in words
    linked: bool = field(default=False)

    @property
    def local(self) -> bool:
        """Whether the files are on this machine."""
        return isinstance(self.fs, LocalFileSystem)


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is no part of a table."""
    if name.startswith("_"):
        return "=" not in name
    return name.startswith(".") or name.endswith("._COPYING_")


@retried
def list_path(path: str, table: str, kind: str = "Parquet") -> Listing:
    """What is at a path, listed fresh.

    Args:
        path: a file, a folder or a glob.
        table: which table it is, for errors.
        kind: of the files that are wanted, for errors.

    Raises:
        TableError: nothing is there, or something that is neither file nor folder; a link leads
            nowhere, or gives a file a second name; a table with a log lies below the path.
        ConfigError: a folder may not be listed.
        StorageError: the store does not answer.
    """
    fs, inside = filesystem(path)
    fs.invalidate_cache()
    walk = _Walk(fs, table, path, kind)
    try:
        return _list(walk, inside)
    except PermissionError as err:
        raise ConfigError(
            f"inputs.{table} may not be listed",
            got=str(err),
            where=path,
            do="Give whoever runs this the right to list and read it.",
        ) from err
    except Exception as err:
        found = translate(err, path, done="listed", what=f"inputs.{table}")
        if found is err or not isinstance(found, AccessError | StoreAwayError):
            raise
        found.field = f"inputs.{table}"
        raise found from err


def _list(walk: _Walk, inside: str) -> Listing:
    named, fixed = _named(walk, inside.rstrip("/"))
    if not named:
        pattern = fixed != inside
        what = "no Parquet file" if pattern and walk.kind == "Parquet" else "nothing"
        raise TableError(
            f"{walk.table}: {what} is at the path",
            expected=f"a {walk.kind} file, a folder of them, or a glob",
            got="a pattern that matches nothing" if pattern else "",
            where=walk.path,
        )
    within = table_at(walk.fs, fixed) if _is_folder(walk.fs, fixed) else None
    within = within or table_around(walk.fs, fixed)
    if within is not None:
        below = inside[len(within.root) :].strip("/")
        if below and fixed != inside.rstrip("/"):
            _refuse_table(walk, within)
        root = _full(walk, within.root)
        return Listing(
            table=LoggedTable(within.kind, root), below=tuple(below.split("/")) if below else ()
        )
    found: dict[str, Found] = {}
    for one in named:
        folders = tuple(part for part in one[len(fixed) :].split("/") if part)
        for file in _below(walk, one, folders):
            found.setdefault(file.path, file)
    if not found:
        raise TableError(
            f"{walk.table}: no {walk.kind} file is at the path",
            expected="files whose names begin with neither _ nor .",
            got="an empty folder, or hidden files",
            where=walk.path,
        )
    files = sorted(found.values(), key=lambda file: file.path)
    if walk.local:
        _check_links(walk, files)
    if walk.linked:
        _check_one_name_each(walk, files)
    full = (Found(_full(walk, file.path), file.folders) for file in files)
    return Listing(tuple(full))


def _full(walk: _Walk, inside: str) -> str:
    """A path inside the file system as it is written outside of it."""
    if walk.local or "://" not in walk.path:
        return inside
    return str(walk.fs.unstrip_protocol(inside))


def _named(walk: _Walk, inside: str) -> tuple[list[str], str]:
    """The files and folders that a path or pattern names, and the part of it that is no pattern."""
    parts = inside.split("/")
    fixed, at = parts[0], 1
    while at < len(parts) and not _is_pattern(walk.fs, fixed, parts[at]):
        fixed, at = f"{fixed}/{parts[at]}", at + 1
    if at >= len(parts):
        there = _exists(walk, fixed)
        return ([fixed] if there else []), fixed
    found = [fixed] if _is_folder(walk.fs, fixed or "/") else []
    for part in parts[at:]:
        found = [match for folder in found for match in _matches(walk, folder, part)]
    return list(dict.fromkeys(found)), fixed


def _is_pattern(fs: AbstractFileSystem, folder: str, part: str) -> bool:
    return _MAGIC.search(part) is not None and not fs.exists(f"{folder}/{part}")


def _matches(walk: _Walk, folder: str, part: str) -> Iterator[str]:
    """The paths in a folder that one part of a pattern names."""
    _refuse_table(walk, table_at(walk.fs, folder))
    if part == "**":
        yield from _folders_below(walk, folder, frozenset())
        return
    if not _is_pattern(walk.fs, folder, part):
        if walk.fs.exists(f"{folder}/{part}"):
            yield f"{folder}/{part}"
        return
    for name, _ in _entries(walk, folder):
        wanted = not is_hidden(name) or part[0] in "._"  # who writes _* means it
        if wanted and fnmatch.fnmatchcase(name, part):
            yield f"{folder}/{name}"


def _folders_below(walk: _Walk, folder: str, above: frozenset[str]) -> Iterator[str]:
    """A folder and all below it that are not hidden; a link back up is not followed."""
    real = os.path.realpath(folder) if walk.local else folder
    if real in above:
        return
    yield folder
    for name, is_folder in _entries(walk, folder):
        if is_folder and not is_hidden(name):
            yield from _folders_below(walk, f"{folder}/{name}", above | {real})


def _entries(walk: _Walk, folder: str) -> list[tuple[str, bool]]:
    """Names in a folder, and which are folders."""
    if not _is_folder(walk.fs, folder or "/"):
        return []
    _refuse_table(walk, table_at(walk.fs, folder))
    if walk.local:
        with os.scandir(folder or "/") as entries:
            return sorted((entry.name, entry.is_dir()) for entry in entries)
    found = (info for info in walk.fs.ls(folder, detail=True) if not _is_folder_mark(info))
    names = ((info["name"].rstrip("/").rpartition("/")[2], info["type"]) for info in found)
    return sorted((name, kind == "directory") for name, kind in names if name)


def _below(walk: _Walk, path: str, folders: tuple[str, ...]) -> Iterator[Found]:
    """All files of what was named; `folders` lead to it, and its own name is the last of them."""
    if not _is_folder(walk.fs, path):
        if walk.local:
            _check_regular(walk, path)
        yield Found(path, folders[:-1])
    elif walk.local:
        yield from _walk_local(walk, path, folders, frozenset())
    else:
        for info in walk.fs.find(path, detail=True).values():
            name = info["name"]
            _refuse_table(walk, table_of_file(name))
            parts = [part for part in name[len(path) :].split("/") if part]
            if parts and not any(map(is_hidden, parts)) and not _is_folder_mark(info):
                yield Found(name, (*folders, *parts[:-1]))


def _is_folder_mark(info: dict[str, object]) -> bool:
    """Whether an object stands for a folder, in stores that have none."""
    name = str(info["name"])
    return not info.get("size") and (name.endswith(("/", "_$folder$")))


def _walk_local(
    walk: _Walk, folder: str, folders: tuple[str, ...], above: frozenset[str]
) -> Iterator[Found]:
    """Everything below a folder of this machine, through links, each folder once on the way down:
    what a link back up leads to is listed already.
    """
    real = os.path.realpath(folder)
    if real in above:
        return
    _refuse_table(walk, table_at(walk.fs, folder))
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if is_hidden(entry.name):
            continue
        walk.linked |= entry.is_symlink()
        if entry.is_dir():
            yield from _walk_local(walk, entry.path, (*folders, entry.name), above | {real})
        else:
            _check_regular(walk, entry.path)
            yield Found(entry.path, folders)


def _check_regular(walk: _Walk, path: str) -> None:
    """Refuse a link to nowhere, and what would be waited for and never read: pipes, devices."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise TableError(
            f"{walk.table}: a link leads nowhere",
            expected="a file or a folder",
            got=os.readlink(path) if os.path.islink(path) else "nothing",
            where=path,
            do="Take the link away, or write what it points at.",
        ) from None
    if not stat.S_ISREG(mode):
        raise TableError(
            f"{walk.table}: something at the path is neither a file nor a folder",
            expected="Parquet files",
            where=path,
            do="Take it away, or begin its name with _ or a dot.",
        )


def _check_links(walk: _Walk, files: list[Found]) -> None:
    """Refuse what links lead to inside a table with a log, whatever the path looks like."""
    folders = {os.path.dirname(file.path) for file in files}
    folders |= {os.path.dirname(os.path.realpath(f.path)) for f in files if os.path.islink(f.path)}
    for real in sorted({os.path.realpath(folder) for folder in folders}):
        _refuse_table(walk, table_at(walk.fs, real) or table_around(walk.fs, real))


def _check_one_name_each(walk: _Walk, files: list[Found]) -> None:
    """Refuse a file that links give two names: its rows would count twice."""
    seen: dict[str, str] = {}
    for file in files:
        first = seen.setdefault(os.path.realpath(file.path), file.path)
        if first != file.path:
            raise TableError(
                f"{walk.table}: a file has two names below the path, by a link",
                expected="every file once",
                got=f"{first} and {file.path}",
                where=walk.path,
                do="Name the folder that is meant, or take the link away.",
            )


def _refuse_table(walk: _Walk, table: LoggedTable | None) -> None:
    """A table with a log, met on the way: its files are not its rows."""
    if table is not None:
        where = _full(walk, table.root)
        raise TableError(
            f"{walk.table}: the path leads to files of a {table.kind} table",
            expected="Parquet files, or a path that is the table itself",
            got=where,
            where=walk.path,
            do="Its log says which of its files count: name the table, such as "
            f"{{{table.kind.lower()}: {where}}}."
            if table.kind != "Hudi"
            else "Write what it holds now as Parquet: Hudi tables are not read.",
        )


def _exists(walk: _Walk, path: str) -> bool:
    return os.path.lexists(path) if walk.local else bool(walk.fs.exists(path))


def _is_folder(fs: AbstractFileSystem, path: str) -> bool:
    return bool(fs.isdir(path))
