"""What a column's values are, whatever a file wraps them in.

Files write the same values in several Arrow types: int32 and int64, a string and a dictionary of
strings, a list and a large_list. Two types are alike where every value of one means the same in the
other, and is written with the same characters: 1 and 1.0 are not, nor a date and its midnight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.types as pt

ENCRYPTED = b"nightshelf.encrypted"  # metadata of a field whose values need a key
_UNITS = {"s": "ms"}  # Parquet has no seconds: a file of them holds milliseconds


def is_list(dtype: pa.DataType) -> bool:
    """Any of the list types."""
    return bool(
        pt.is_list(dtype)
        or pt.is_large_list(dtype)
        or pt.is_fixed_size_list(dtype)
        or pt.is_list_view(dtype)
        or pt.is_large_list_view(dtype)
    )


def is_text(dtype: pa.DataType) -> bool:
    """A string in any encoding."""
    dtype = unpacked(dtype)
    return bool(pt.is_string(dtype) or pt.is_large_string(dtype) or pt.is_string_view(dtype))


def is_whole(dtype: pa.DataType) -> bool:
    """Integers: of any width, or a decimal without places."""
    dtype = unpacked(dtype)
    return bool(pt.is_integer(dtype) or (is_decimal(dtype) and dtype.scale == 0))


def is_decimal(dtype: pa.DataType) -> bool:
    """A decimal of at most 38 digits; what is longer, nothing here reads."""
    return bool(pt.is_decimal(dtype) and not pt.is_decimal256(dtype))


def unpacked(dtype: pa.DataType) -> pa.DataType:
    """The type inside a dictionary."""
    return dtype.value_type if pt.is_dictionary(dtype) else dtype


def type_words(dtype: pa.DataType) -> str:
    """An Arrow type in words, without the names that files give to list elements."""
    if is_list(dtype):
        size = f", {dtype.list_size}" if pt.is_fixed_size_list(dtype) else ""
        return f"list<{type_words(dtype.value_type)}{size}>"
    return str(dtype)


def is_empty(dtype: pa.DataType) -> bool:
    """A column without a value in it, as writers type one that holds nulls only."""
    return bool(pt.is_null(dtype) or (is_list(dtype) and pt.is_null(dtype.value_type)))


def plain(dtype: pa.DataType) -> pa.DataType:
    """The one type that stands for all types of these values: string, int64, date32, a list of one
    of these… A type that no contract accepts stays as it is.
    """
    dtype = unpacked(dtype)
    if is_list(dtype):
        return pa.list_(plain(dtype.value_type))
    if is_text(dtype):
        return pa.string()
    if is_whole(dtype):
        return pa.int64()
    if pt.is_float16(dtype):
        return pa.float32()
    if pt.is_date(dtype):
        return pa.date32()
    if is_decimal(dtype):
        return pa.decimal128(38, dtype.scale)
    if pt.is_time(dtype):
        unit = _UNITS.get(dtype.unit, dtype.unit)
        return pa.time32(unit) if unit == "ms" else pa.time64(unit)
    if pt.is_timestamp(dtype):
        return pa.timestamp(_UNITS.get(dtype.unit, dtype.unit), dtype.tz)
    return dtype


def portable(dtype: pa.DataType) -> pa.DataType:
    """A `plain` type that polars can hold too: it knows no zone that is an offset, and an instant
    is the same in every zone; what is empty is text.
    """
    if is_list(dtype):
        return pa.list_(portable(dtype.value_type))
    if pt.is_timestamp(dtype) and dtype.tz is not None:
        return pa.timestamp(dtype.unit, "UTC")
    return pa.string() if pt.is_null(dtype) else dtype


def alike(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether equal values of two types are the same and are written alike. What is empty is like
    everything.
    """
    if pt.is_null(one) or pt.is_null(other):
        return True
    if is_list(one) and is_list(other):
        return alike(one.value_type, other.value_type)
    one, other = unpacked(one), unpacked(other)
    if pt.is_floating(one) or pt.is_floating(other):  # 0.1 has other digits in another width
        return bool(one == other)
    return bool(plain(one) == plain(other))


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of Arrow types a column may have. `alike` says whether two of them may stand in two
    files of one table.
    """

    words: str
    accepts: Callable[[pa.DataType], bool]
    alike: Callable[[pa.DataType, pa.DataType], bool] = alike


def _is_id(dtype: pa.DataType) -> bool:
    return is_text(dtype) or is_whole(dtype)


def _list_of(inner: Callable[[pa.DataType], bool]) -> Callable[[pa.DataType], bool]:
    return lambda dtype: is_list(dtype) and (is_empty(dtype) or inner(dtype.value_type))


def _is_scalar(dtype: pa.DataType) -> bool:
    dtype = unpacked(dtype)
    simple = pt.is_integer(dtype) or pt.is_floating(dtype) or pt.is_boolean(dtype)
    date = pt.is_date(dtype) or pt.is_time(dtype) or pt.is_timestamp(dtype)
    return bool(simple or is_text(dtype) or date or is_decimal(dtype))


def _is_number(dtype: pa.DataType) -> bool:
    return bool(pt.is_integer(dtype) or pt.is_floating(dtype))


ID = Kind("string or int64", _is_id)
ID_LIST = Kind("list of string or of int64", _list_of(_is_id))


def _as_numbers(_one: pa.DataType, _other: pa.DataType) -> bool:
    return True  # each is read as the same float


VECTOR = Kind(
    "list or fixed_size_list of float16, float32 or float64", _list_of(pt.is_floating), _as_numbers
)
INT_LIST = Kind("list of integers", _list_of(is_whole))
SCALAR = Kind("string, number, boolean, date, time or timestamp", _is_scalar)
ATTRIBUTE = Kind(
    "string, number, boolean, date, time, timestamp, or a list of them",
    lambda dtype: _is_scalar(dtype) or _list_of(_is_scalar)(dtype),
)
TEXT = Kind("string", is_text)
NUMBER = Kind("number", _is_number, _as_numbers)
INTEGER = Kind("integer", is_whole)
LABELS = Kind("list of string or of int64", _list_of(_is_id))
SID = Kind(
    "list of codes, list of token strings, or one string '<a_1><b_2>'",
    lambda dtype: is_text(dtype) or _list_of(lambda t: is_whole(t) or is_text(t))(dtype),
)
