"""A table with a log that cannot be read here, as the error it is."""

from __future__ import annotations

from pipelines.sources.marks import LoggedTable
from schemas.errors import TableError


def refuse_logged(found: LoggedTable, path: str, table: str) -> TableError:
    """The error for a path that is a table with a log, or lies in one."""
    return TableError(
        f"{table}: the path is a {found.kind} table, whose log says which of its files count",
        expected="Parquet files that are all live",
        got=f"the log of {found.root}",
        where=path,
        do="Write what it holds now as Parquet, and name that.",
    )
