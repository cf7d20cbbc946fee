"""Columns that stand in the names of folders, `country=se`, and not in the files below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from urllib.parse import unquote

import pyarrow as pa

from pipelines.sources.listing import Found
from pipelines.sources.parts import Part, TableParts, file_identity, file_rows, file_schema
from schemas.errors import TableError, quoted

NULL = "__HIVE_DEFAULT_PARTITION__"  # how Hive and Spark write that there is no value
TYPES = {
    "text": pa.string(),
    "int64": pa.int64(),
    "double": pa.float64(),
    "bool": pa.bool_(),
    "date": pa.date32(),
}

Values = dict[str, str | None]


def folder_columns(files: Sequence[Found], table: str) -> list[Values]:
    """The columns that the folders of each file name, and their values as text; the same columns
    for every file.

    Raises:
        TableError: folders name other columns for one file than for another, or one twice.
    """
    found = [_values_of(file, table) for file in files]
    for file, values in zip(files, found, strict=True):
        if list(values) != list(found[0]):
            raise TableError(
                f"{table}: the folders of two files name different columns",
                expected=f"{_words(found[0])}, as of {files[0].path}",
                got=_words(values),
                where=file.path,
                do="Name the folder whose files belong together, or a glob of them.",
            )
    return found


def with_folder_columns(
    files: Sequence[Found], table: str, wanted: set[str], types: Mapping[str, str]
) -> TableParts | None:
    """The parts of a table of which some wanted columns stand in the names of folders; None where
    all of them stand in the files. A column that the files hold too is theirs.

    Args:
        files: of the table.
        table: which it is, for errors.
        wanted: columns that may be read.
        types: of columns of folders, text where nothing is said; see `TYPES`.

    Raises:
        TableError: some files hold such a column and some do not; a value is not of its type.
    """
    values = folder_columns(files, table)
    if unknown := [name for name in types if name not in values[0]]:
        raise TableError(
            f"{table}: no folder names the column {unknown[0]!r}, which has a type",
            expected=f"folders {unknown[0]}=VALUE",
            got=_words(values[0]),
            where=files[0].path,
            field=f"inputs.{table}",
        )
    columns = [name for name in values[0] if name in wanted]
    if not columns:
        return None
    schemas = [file_schema(file.path, table) for file in files]
    columns = [name for name in columns if not _is_held(name, files, schemas, table)]
    if not columns:
        return None
    added = [pa.field(name, TYPES[types.get(name, "text")]) for name in columns]
    parts = []
    for file, one, schema in zip(files, values, schemas, strict=True):
        scalars = {column.name: _scalar(column, one, file, table) for column in added}
        held = [f.remove_metadata() for f in schema if f.name in wanted and f.name not in scalars]
        whole = pa.schema([*held, *added])
        rows = partial(file_rows, file.path, table, whole, values=scalars)
        parts.append(
            Part(file.path, plain=False, schema=whole, rows=rows, identity=file_identity(file.path))
        )
    told = [f"{column.name} {column.type}" for column in added]
    return TableParts(tuple(parts), parts[0].schema, identity=f"folders {told} {values}")


def _values_of(file: Found, table: str) -> Values:
    pairs = [part.partition("=") for part in file.folders if "=" in part[1:]]
    values = {unquote(n): None if v == NULL else unquote(v) for n, _, v in pairs}
    if len(values) < len(pairs):
        raise TableError(f"{table}: folders name a column twice", where=file.path)
    return values


def _words(values: Values) -> str:
    return ", ".join(f"{name}=" for name in values) or "no column"


def _is_held(name: str, files: Sequence[Found], schemas: Sequence[pa.Schema], table: str) -> bool:
    """Whether the files hold a column that their folders name too."""
    held = [name in schema.names for schema in schemas]
    if any(held) and not all(held):
        raise TableError(
            f"{table}: column {name!r} stands in some files, and in the folders of all",
            expected="one of the two for the whole table",
            got=f"no such column in {files[held.index(False)].path}",
            where=files[held.index(True)].path,
            field=name,
        )
    return all(held)


def _scalar(column: pa.Field, values: Values, file: Found, table: str) -> pa.Scalar:
    value = values[column.name]
    if value is None:
        return pa.scalar(None, column.type)
    try:
        return pa.scalar(value).cast(column.type)
    except pa.ArrowException as err:
        raise TableError(
            f"{table}: a folder's value for {column.name!r} is not of the type that is declared",
            expected=str(column.type),
            got=quoted(value),
            where=file.path,
            field=column.name,
        ) from err
