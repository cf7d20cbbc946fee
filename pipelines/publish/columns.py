"""Whether the rows of a run fit the columns of a table that is there."""

from __future__ import annotations

import pyarrow as pa

from schemas.column_types import is_list
from schemas.errors import ConfigError

_OPTIONAL = {"labels"}  # of label scoring only; null in rows of other tasks


def missing_columns(there: pa.Schema, mine: pa.Schema, where: str) -> list[pa.Field]:
    """Columns that the table lacks and may get. Columns that it has besides, and that may be null,
    stay null in our rows.

    Raises:
        ConfigError: the table has other columns, or other types.
    """
    _check_names(there, mine.names, where)
    for field in mine:
        if field.name not in there.names:
            continue
        want, got = type_key(there.field(field.name).type), type_key(field.type)
        if want != got:
            raise ConfigError(
                f"the table holds column {field.name!r} in another type",
                expected=want,
                got=got,
                where=where,
                do="Publish to another table.",
            )
    return [field for field in mine if field.name not in there.names]


def check_width(rows: pa.Table, mine: pa.Schema, where: str) -> None:
    """Raise `ConfigError` when vectors of a table have another length than those to be published.

    Args:
        rows: a row of the table with its `embedding`, or none.
        mine: columns to be published; a length of 1 is one that is not known.
    """
    want = mine.field("embedding").type.list_size
    have = [len(vector) for vector in rows["embedding"].to_pylist() if vector is not None]
    if want > 1 and have and have[0] != want:
        raise ConfigError(
            "the table holds vectors of another length",
            expected=f"{want} numbers, as the model gives",
            got=f"{have[0]}",
            where=where,
            do="Publish to another table: vectors of two models cannot be compared.",
        )


def _check_names(there: pa.Schema, mine: list[str], where: str) -> None:
    lacking = [name for name in mine if name not in there.names and name not in _OPTIONAL]
    if lacking:
        raise ConfigError(
            "the table has other columns",
            expected=", ".join(mine),
            got=", ".join(there.names),
            where=where,
            do="Layouts (output.layout) and embeddings need a table each.",
        )
    required = [f.name for f in there if not f.nullable and f.name not in mine]
    if required:
        raise ConfigError(
            "the table needs a value in a column that a publish does not write",
            expected="columns beside its own that may be null",
            got=", ".join(required),
            where=where,
            do="Let them be null (ALTER TABLE … DROP NOT NULL), or publish to another table.",
        )


def type_key(dtype: pa.DataType) -> str:
    """A type as tables tell types apart: lists by their elements, texts and texts alike."""
    if is_list(dtype) or pa.types.is_list_view(dtype) or pa.types.is_large_list_view(dtype):
        return f"list<{type_key(dtype.value_type)}>"
    if pa.types.is_struct(dtype):
        inner = ", ".join(f"{field.name}: {type_key(field.type)}" for field in dtype)
        return f"struct<{inner}>"
    if pa.types.is_large_string(dtype) or pa.types.is_string_view(dtype):
        return "string"
    return str(dtype)
