"""The values of input columns in the types that a run works with.

Arrow's own casts do the work, and none that would change a value: what does not fit is an error
that names it. How a value is written as text, in a prompt and as a segment, is decided here alone.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from schemas.column_types import is_list, is_text, unpacked
from schemas.errors import TableError, quoted

_INT64 = (-(2**63), 2**63 - 1)


def converted(column: pa.Array, dtype: pa.DataType, name: str, where: str) -> pa.Array:
    """A column of one of the contract's types as `dtype`: string (how a prompt writes it), int64,
    a float, the type itself, or a list of these.

    Args:
        column: as the file has it.
        name, where: the column and the file, for errors.

    Raises:
        TableError: a whole number beyond 64 bits, or text that is not UTF-8.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pt.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pt.is_null(column.type):
        return pa.nulls(len(column), dtype)
    if is_list(dtype):
        return _list(column, dtype, name, where)
    if is_text(column.type):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as err:
            raise TableError(
                f"column {name!r} holds text that is not UTF-8",
                expected="UTF-8, as Parquet says of strings",
                where=where,
                do="Write the file again from text that is.",
                field=name,
            ) from err
    if dtype == pa.string():
        return as_text(column)
    if pt.is_floating(dtype):
        return column.cast(dtype, safe=False)  # the nearest float, as the contract says
    try:
        return column.cast(dtype)
    except pa.ArrowInvalid as err:
        raise TableError(
            f"column {name!r} holds a number that is too large",
            expected=f"whole numbers from {_INT64[0]} to {_INT64[1]}",
            got=quoted(_beyond(column)),
            where=where,
            do="Correct the row, or write the column as text.",
            field=name,
        ) from err


def _list(column: pa.Array, dtype: pa.DataType, name: str, where: str) -> pa.Array:
    if pt.is_list_view(column.type) or pt.is_large_list_view(column.type):
        column = _one_after_the_other(column)
    elif not pt.is_list(column.type):  # fixed, or large
        column = column.cast(pa.list_(column.type.value_type))
    if column.offset:
        column = pa.concat_arrays([column])  # its offsets begin at 0 then
    values = converted(column.values, dtype.value_type, name, where)
    mask = column.is_null() if column.null_count else None
    return pa.ListArray.from_arrays(column.offsets, values, mask=mask).cast(dtype)


def _one_after_the_other(views: pa.Array) -> pa.ListArray:
    """Lists that may lie anywhere in their values, in any order, as lists. Arrow's own cast makes
    lists of too few offsets.
    """
    lengths = np.asarray(pc.list_value_length(views).fill_null(0))
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    mask = views.is_null() if views.null_count else None
    return pa.ListArray.from_arrays(offsets, views.flatten(), mask=mask)


def _beyond(column: pa.Array) -> object:
    """The first value that int64 does not hold."""
    low, high = _INT64
    values = (value for value in column.to_pylist() if value is not None)
    return next((int(value) for value in values if not low <= value <= high), "?")


def as_text(column: pa.Array) -> pa.Array:
    """Values as a prompt and a segment write them; null stays null.

    | type | text |
    |---|---|
    | string | itself |
    | integer | its digits |
    | boolean | `true`, `false` |
    | float | the fewest digits that give the value back, with a point or an exponent: `1.0`, |
    | | `0.1`, `1e+16`; `NaN`, `inf`, `-inf` |
    | decimal | all its places: `1.50` |
    | date | `2026-11-28` |
    | time | `09:30:00`, and a fraction of a second where there is one: `09:30:00.250` |
    | timestamp | `2026-11-28 09:30:00.000`, a digit for each place of its unit; one with a zone |
    | | in that zone's time, with the offset: `2026-11-28 09:30:00.000000+00:00` |
    """
    dtype = unpacked(column.type)
    if pt.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pt.is_floating(dtype) or pt.is_decimal(dtype):
        if pt.is_float16(dtype):
            column = column.cast(pa.float32())
        text = pl.Series(pl.from_arrow(column)).cast(pl.String)
        return text.to_arrow().cast(pa.string())
    if pt.is_time(dtype):
        return pc.replace_substring_regex(column.cast(pa.string()), r"\.0+$", "")
    if pt.is_timestamp(dtype):
        if dtype.unit == "s":
            column = column.cast(pa.timestamp("ms", dtype.tz))
        text = column.cast(pa.string())
        if dtype.tz is None:
            return text
        text = pc.replace_substring_regex(text, r"Z$", "+00:00")
        return pc.replace_substring_regex(text, r"([+-]\d\d)(\d\d)$", r"\1:\2")
    return column.cast(pa.string())
