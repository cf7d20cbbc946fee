"""The files of a catalog as one table: the contract's columns, in one type each."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from pipelines.sources.column_values import converted
from pipelines.sources.one_type import OneType
from schemas.column_types import plain
from schemas.errors import TableError
from schemas.tables import ID_TYPES, TableContract, id_type

_TEXTS = ("title", "text")


def join_files(
    tables: Sequence[pa.Table], paths: Sequence[str], contract: TableContract
) -> pa.Table:
    """All rows, in order. A column that a file lacks and may lack is null there.

    Raises:
        TableError: a file breaks the contract, or writes a column in another type than the files
            before it.
    """
    types = OneType(contract.table)
    for table, path in zip(tables, paths, strict=True):
        contract.check(table.schema, path)
        for problem in types.problems(contract, table.schema, path):
            raise problem
    schema = pa.schema([(f.name, _target(f.name, f.type)) for f in types.schema()])
    return pa.concat_tables(
        [_plain(table, path, schema, contract) for table, path in zip(tables, paths, strict=True)]
    )


def _target(name: str, dtype: pa.DataType) -> pa.DataType:
    """The type that a catalog column has here."""
    if name == "item_id":
        return ID_TYPES[id_type(dtype)]
    if name in _TEXTS:
        return pa.string()
    if name == "popularity":
        return pa.float64()
    return pa.string() if pa.types.is_null(dtype) else plain(dtype)


def _plain(table: pa.Table, path: str, schema: pa.Schema, contract: TableContract) -> pa.Table:
    columns = []
    for field in schema:
        if field.name not in table.column_names:
            columns.append(pa.chunked_array([pa.nulls(len(table), field.type)]))
            continue
        try:
            chunks = [
                converted(chunk, field.type, field.name, path)
                for chunk in table.column(field.name).chunks
            ]
        except TableError as err:
            err.what = f"{contract.table}: {err.what}"
            raise
        columns.append(pa.chunked_array(chunks, field.type))
    return pa.table(columns, schema=schema)
