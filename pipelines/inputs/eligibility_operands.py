"""The right side of an eligibility comparison: values, exact, and fitted to a catalog column.

A value is compared for what it is, not for how it is stored: 2.5 lies between the integers 2 and 3,
a day begins at midnight, an instant is the same in every zone. So a value becomes an exact fraction
of the column's unit first, and then the nearest value of the column's own type, with the sign that
gives the same answer.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from schemas.column_types import is_text, is_whole, unpacked

Family = str  # "number", "text", "date", "time", "timestamp", "timestamp with a zone"
_NANOS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_DAY = 86_400 * 10**9
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_CLOCK = r"(\d\d:\d\d(?::\d\d)?)(?:\.(\d{1,9}))?"
_TIME = re.compile(_CLOCK)
_TIMESTAMP = re.compile(rf"(\d{{4}}-\d\d-\d\d)(?:[T ]{_CLOCK}(Z|[+-]\d\d:\d\d)?)?")
_OFFSET = re.compile(r"([+-])(\d\d):?(\d\d)?")
_DIGITS = 38  # of a decimal


def family(dtype: pa.DataType) -> Family:
    """What the values of a scalar type are compared as."""
    dtype = unpacked(dtype)
    if is_text(dtype):
        return "text"
    if pt.is_date(dtype):
        return "date"
    if pt.is_time(dtype):
        return "time"
    if pt.is_timestamp(dtype):
        return "timestamp" if dtype.tz is None else "timestamp with a zone"
    return "number"


def comparable(attribute: Family, operand: Family) -> bool:
    """Whether values of two families can be compared. A date is its midnight, in the zone of the
    attribute; an instant has no date without a zone.
    """
    also = {
        "date": {"timestamp"},
        "timestamp": {"date"},
        "timestamp with a zone": {"date"},
    }
    return attribute == operand or operand in also.get(attribute, set())


@dataclass(frozen=True, slots=True)
class Value:
    """A value, exact: text, a number (NaN is None), or nanoseconds since 1970 or since midnight.
    Of a date, those of its midnight, as if in UTC.
    """

    family: Family
    exact: str | Fraction | float | None
    digits: Fraction | None = None  # of a float: as it is written


def of_scalar(scalar: pa.Scalar) -> Value:
    """A value of a users column; not null."""
    dtype = unpacked(scalar.type)
    kind = family(dtype)
    if pt.is_dictionary(scalar.type):
        scalar = scalar.value
    if kind == "text":
        return Value(kind, scalar.as_py())
    if kind == "date":
        days = scalar.cast(pa.date32()).value
        return Value(kind, Fraction(days * _DAY))
    if kind != "number":
        return Value(kind, Fraction(scalar.value * _NANOS[dtype.unit]))
    number = scalar.as_py()
    if not pt.is_floating(dtype):
        return Value(kind, Fraction(number))
    if not math.isfinite(number):
        return Value(kind, None if math.isnan(number) else number)
    narrow = np.float64 if pt.is_float64(dtype) else np.float32
    return Value(kind, Fraction(number), Fraction(str(narrow(number))))


def of_literal(literal: str | float | bool, attribute: pa.DataType) -> Value:
    """A literal that is compared with an attribute of this type.

    Raises:
        ValueError: a text that is no date, time or timestamp where the attribute is one; says what
            was expected.
    """
    kind = family(attribute)
    if not isinstance(literal, str):
        digits = Fraction(str(literal)) if isinstance(literal, float) else None
        return Value("number", Fraction(literal), digits)
    if kind == "date":
        return Value(kind, Fraction(_day(literal) * _DAY))
    if kind == "time":
        return Value(kind, Fraction(_clock(_TIME.fullmatch(literal), 1)))
    if kind.startswith("timestamp"):
        return _timestamp(literal, unpacked(attribute).tz)
    return Value("text", literal)


def _day(text: str) -> int:
    if not _DATE.fullmatch(text):
        raise ValueError("a date, 'YYYY-MM-DD'")
    try:
        return dt.date.fromisoformat(text).toordinal() - _EPOCH.toordinal()
    except ValueError as err:
        raise ValueError("a day of the calendar, 'YYYY-MM-DD'") from err


def _clock(found: re.Match[str] | None, group: int) -> int:
    """Nanoseconds since midnight."""
    if found is None:
        raise ValueError("a time, 'HH:MM' or 'HH:MM:SS.fraction'")
    try:
        time = dt.time.fromisoformat(found[group])
    except ValueError as err:
        raise ValueError("a time of the day, 'HH:MM:SS'") from err
    seconds = time.hour * 3600 + time.minute * 60 + time.second
    return seconds * 10**9 + int((found[group + 1] or "").ljust(9, "0"))


def _timestamp(text: str, zone: str | None) -> Value:
    found = _TIMESTAMP.fullmatch(text)
    if found is None:
        raise ValueError("a timestamp, 'YYYY-MM-DD' or 'YYYY-MM-DD HH:MM:SS'")
    wall = _day(found[1]) * _DAY + (_clock(found, 2) if found[2] else 0)
    if zone is None:
        if found[4]:
            raise ValueError("a timestamp without an offset, as the column has no zone")
        return Value("timestamp", Fraction(wall))
    offset = found[4]
    if offset:
        tz = dt.UTC if offset == "Z" else _zone(offset)
        return Value("timestamp with a zone", Fraction(_instant(wall, tz)))
    return Value("timestamp with a zone", Fraction(_instant(wall, _zone(zone))))


def _zone(name: str) -> dt.tzinfo:
    """A zone by name, or an offset: `Europe/Berlin`, `+07:30`."""
    if found := _OFFSET.fullmatch(name):
        size = dt.timedelta(hours=int(found[2]), minutes=int(found[3] or 0))
        return dt.timezone(-size if found[1] == "-" else size)
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as err:
        raise ValueError(f"a zone that this machine knows, and not {name!r}") from err


def check_zone(attribute: pa.DataType) -> None:
    """Raise `ValueError` when nobody here knows the zone of a column."""
    if pt.is_timestamp(attribute) and attribute.tz is not None:
        _zone(attribute.tz)


def _instant(wall: int, zone: dt.tzinfo) -> int:
    """Nanoseconds of an instant whose clock in the zone shows `wall` nanoseconds since 1970; of a
    wall time that a zone has twice, the first.
    """
    seconds, rest = divmod(wall, 10**9)
    try:
        clock = (_EPOCH + dt.timedelta(seconds=seconds)).replace(tzinfo=zone)
        offset = clock.utcoffset() or dt.timedelta()
    except OverflowError:  # before year 1, after 9999
        offset = dt.timedelta()
    return (seconds - round(offset.total_seconds())) * 10**9 + rest


def in_units(value: Value, attribute: pa.DataType) -> Fraction | float | None:
    """A value in the units of an ordered column that counts something: 1, a cent of a decimal with
    two places, a day, a microsecond. None: NaN.
    """
    exact = value.exact
    assert not isinstance(exact, str), "text counts nothing"
    if exact is None or isinstance(exact, float):
        return exact
    if family(attribute) == "number":
        if pt.is_decimal(attribute):
            scale: int = 10**attribute.scale
            return (exact if value.digits is None else value.digits) * scale
        return exact
    if pt.is_date(attribute):
        return exact / _DAY
    if pt.is_timestamp(attribute) and attribute.tz is not None and value.family == "date":
        exact = Fraction(_instant(int(exact), _zone(attribute.tz)))
    unit: int = _NANOS[attribute.unit]
    return exact / unit


def limits(attribute: pa.DataType) -> tuple[int, int]:
    """The least and the greatest count that a column holds."""
    if pt.is_decimal(attribute):
        return 1 - 10**_DIGITS, 10**_DIGITS - 1
    bits = 31 if attribute.bit_width == 32 else 63
    return -(2**bits), 2**bits - 1


def scalar_of(count: int, attribute: pa.DataType) -> pa.Scalar:
    """A count as a value of the column."""
    if pt.is_decimal(attribute):
        digits = tuple(map(int, str(abs(count))))
        return pa.scalar(Decimal((int(count < 0), digits, -attribute.scale)), attribute)
    width = pa.int32() if attribute.bit_width == 32 else pa.int64()
    return pa.scalar(count, width).cast(attribute)


def nearest(value: Value, attribute: pa.DataType) -> float | None:
    """A number as a float of the column's width; None: NaN."""
    exact: Any = value.exact
    if exact is None or isinstance(exact, float):
        return exact
    try:
        wide = exact.numerator / exact.denominator
    except OverflowError:
        wide = math.inf if exact > 0 else -math.inf
    with np.errstate(over="ignore"):
        return float(np.float32(wide)) if pt.is_float32(attribute) else float(wide)


def counts(attribute: pa.DataType) -> bool:
    """Whether a column counts units, and is no float and no text."""
    return is_whole(attribute) or not (pt.is_floating(attribute) or is_text(attribute))
