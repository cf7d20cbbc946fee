"""Columns that stand in the names of folders, `country=se`, and not in the files below."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

from pipelines.sources.listing import Found
from schemas.errors import TableError

NULL = "__HIVE_DEFAULT_PARTITION__"  # how Hive and Spark write that there is no value

Values = dict[str, str | None]


def values_of(folders: Sequence[str]) -> Values:
    """The columns that folders name, and their values as text."""
    pairs = (part.partition("=") for part in folders if "=" in part[1:])
    return {unquote(name): None if value == NULL else unquote(value) for name, _, value in pairs}


def folder_columns(files: Sequence[Found], table: str) -> list[Values]:
    """The values of each file's folders; the same columns for every file.

    Raises:
        TableError: folders name other columns for one file than for another.
    """
    for file in files:
        names = [unquote(part.partition("=")[0]) for part in file.folders if "=" in part[1:]]
        if len(set(names)) < len(names):
            raise TableError(
                f"{table}: folders name a column twice", got=", ".join(names), where=file.path
            )
    found = [values_of(file.folders) for file in files]
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


def _words(values: Values) -> str:
    return ", ".join(f"{name}=" for name in values) or "no column"
