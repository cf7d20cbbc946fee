"""An input as files that hold its rows: those at its path, the live ones of a table with a log, or
a copy, where columns or deletions stand elsewhere than in the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from pipelines.sources.copies import copy_parts
from pipelines.sources.delta import read_delta
from pipelines.sources.hive import NULL, folder_columns, with_folder_columns
from pipelines.sources.iceberg import read_iceberg
from pipelines.sources.listing import Listing, list_path
from pipelines.sources.parts import TableParts
from pipelines.sources.wanted import columns_of
from pipelines.storage import files
from schemas.errors import ConfigError, StorageError, TableError
from schemas.input_tables import DeltaInput, FolderInput, IcebergInput, Source
from schemas.settings import RunConfig


@dataclass(frozen=True, slots=True)
class Located:
    """An input's files, and which snapshot of a table with a log they are."""

    files: list[str]
    snapshot: str | None = None


def locate_input(config: RunConfig, name: str) -> Located:
    """The files with the rows of an input. A copy is made in the work folder where the files of the
    table do not hold its rows and columns as they are.

    Raises:
        TableError: there is no such table, or it cannot be read rightly.
        ConfigError: a folder may not be listed, or the work folder not be written to.
    """
    source: Source = getattr(config.inputs, name)
    wanted = columns_of(config, name)
    types: Mapping[str, str] = {}
    if isinstance(source, FolderInput):
        types, source = source.hive, source.path
    parts: TableParts | None
    if isinstance(source, DeltaInput):
        parts = read_delta(source.delta, name, wanted, version=source.version)
    elif isinstance(source, IcebergInput):
        parts = read_iceberg(source, name, wanted)
    else:
        listing = list_path(source, name)
        if listing.table is not None:
            parts = _logged(listing, source, name, wanted)
        else:
            parts = with_folder_columns(listing.files, name, wanted, types)
            if parts is None:
                return Located([file.path for file in listing.files])
    if parts.plain:
        return Located([part.path for part in parts.parts], parts.snapshot)
    try:
        files.check_writable(config.run.work_dir, "run.work_dir")
    except StorageError as err:
        raise ConfigError(
            err.what,
            expected=f"a folder for a copy of {name}, whose files do not hold it as it is",
            got=err.got,
            where=err.where,
            field="run.work_dir",
        ) from err
    return Located(copy_parts(config.run.work_dir, name, parts), parts.snapshot)


def list_parquet(path: str, table: str) -> list[str]:
    """The Parquet files that a path names: a file, a folder (recursively) or a glob, sorted, listed
    fresh; of a Delta or Iceberg table those that are live. Every file that is not hidden is among
    them, whatever its suffix: one that is not Parquet is refused where it is opened.

    Raises:
        TableError: nothing is there; folders name other columns for one file than for another; a
            table with a log whose files do not hold its rows as they are.
        ConfigError: a folder may not be listed.
    """
    listing = list_path(path, table)
    if listing.table is None:
        folder_columns(listing.files, table)
        return [file.path for file in listing.files]
    parts = _logged(listing, path, table, None)
    if not parts.plain:
        raise TableError(
            f"{table}: the files of the {listing.table.kind} table are not its rows",
            expected="a table with rows, and without deletions, renamed or added columns",
            got=parts.snapshot or "",
            where=path,
            do="Write what it holds now as Parquet, and name that.",
        )
    return [part.path for part in parts.parts]


def _logged(listing: Listing, path: str, table: str, wanted: set[str] | None) -> TableParts:
    """A table with a log that a path names, or one of its partitions."""
    found, below = listing.table, listing.below
    assert found is not None, "a listing is files or a table"
    if found.kind == "Hudi":
        raise TableError(
            f"{table}: the path is a Hudi table, which is not read",
            expected="Parquet, Delta or Iceberg",
            where=path,
            do="Write what it holds now as Parquet, and name that.",
        )
    if found.kind == "Delta" and all("=" in part[1:] for part in below):
        pairs = (part.partition("=") for part in below)
        values = {unquote(n): None if v == NULL else unquote(v) for n, _, v in pairs}
        return read_delta(found.root, table, wanted, partition=values)
    if below:
        raise TableError(
            f"{table}: the path leads into a {found.kind} table, whose log says which files count",
            expected=f"the table itself, {found.root}",
            got="/".join(below),
            where=path,
            do=f"Name {{{found.kind.lower()}: {found.root}}}, or write what is meant as Parquet.",
        )
    return read_iceberg(IcebergInput(iceberg=found.root), table, wanted)
