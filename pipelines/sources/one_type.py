"""That a column has one type in all files of a table, as far as a run reads it."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from schemas.column_types import is_empty, type_words
from schemas.errors import TableError
from schemas.tables import Column, TableContract

_ALIKE = "Integers of all widths, text in all encodings, and lists of all layouts are one type."


class OneType:
    """The types of a table's columns, file after file. A column that is empty in one file, and
    typed as null, has the type of the others.
    """

    def __init__(self, table: str) -> None:
        """Of the table that errors call `table`."""
        self._table = table
        self._first: dict[str, tuple[pa.Field, str]] = {}  # with values, else of the first file
        self._without: dict[str, str] = {}  # column -> the first file that lacks it
        self._names: list[str] | None = None

    def problems(
        self, contract: TableContract, schema: pa.Schema, file: str
    ) -> Iterator[TableError]:
        """Take the next file, which obeys its contract. The error of every column that differs
        from the files before.
        """
        if self._names is None:
            self._names = contract.present(schema)
        for column in contract.columns:
            if column.name not in schema.names:
                self._without.setdefault(column.name, file)
                yield from self._partly(column)
                continue
            field = schema.field(column.name)
            before = self._first.get(column.name)
            if before is None:
                self._first[column.name] = (field, file)
                yield from self._partly(column)
            elif not column.kind.alike(before[0].type, field.type):
                yield self._differs(column, before, field, file)
            elif is_empty(before[0].type) and not pa.types.is_null(field.type):
                self._first[column.name] = (field, file)

    def schema(self) -> pa.Schema:
        """The columns that are read, in the order of the first file, with the types that the table
        has.
        """
        names = dict.fromkeys([*(self._names or []), *self._first])
        return pa.schema([self._first[name][0] for name in names if name in self._first])

    def _differs(
        self, column: Column, before: tuple[pa.Field, str], field: pa.Field, file: str
    ) -> TableError:
        first, where = before
        return TableError(
            f"{self._table}: column {column.name!r} changes its type between files",
            expected=f"{type_words(first.type)}, as in {where}",
            got=type_words(field.type),
            where=file,
            do=f"Write all files of the table with one type. {_ALIKE}",
            field=column.name,
        )

    def _partly(self, column: Column) -> Iterator[TableError]:
        """The error of a column that only some files have, where that would say something."""
        if not column.in_all_or_none or not (
            column.name in self._first and column.name in self._without
        ):
            return
        yield TableError(
            f"{self._table}: column {column.name!r} is in some files and not in others",
            expected=f"in every file, as in {self._first[column.name][1]}, or in none",
            got=f"no such column in {self._without[column.name]}",
            where=self._without[column.name],
            do="Write the column into every file; null where there is nothing to say.",
            field=column.name,
        )
