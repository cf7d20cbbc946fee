"""Every operator of the grammar over every type that the contract accepts, against a literal, a
users column and the partition's date, compared with Python's own operators.
"""

from __future__ import annotations

import datetime as dt
import math
import operator
from decimal import Decimal
from itertools import product

import numpy as np
import pyarrow as pa
import pytest

from pipelines.inputs.eligibility import check_types, eligible_items
from schemas.column_types import ATTRIBUTE
from schemas.eligibility import OPERATORS, parse_eligibility, with_date
from schemas.errors import ConfigError
from tests.factories import write_config, write_inputs

DS = "2026-11-28"
DAYS = [dt.date(2026, 11, 27), dt.date(2026, 11, 28), dt.date(2026, 11, 29)]
WALLS = [dt.datetime(2026, 11, 28), dt.datetime(2026, 11, 28, 9, 30), dt.datetime(2026, 11, 29)]
CLOCKS = [dt.time(9), dt.time(9, 30, 15), dt.time(23, 59, 59)]


def _instants(zone: dt.tzinfo) -> list[dt.datetime]:
    return [wall.replace(tzinfo=zone) for wall in WALLS]


EAST = dt.timezone(dt.timedelta(hours=7, minutes=30))
NUMBERS, TEXTS = [1, 2, 3], ["a", "b", "c"]
# Three values of each type, ascending, and the literal of the second.
INTEGERS = (
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
)
TIMES = (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"))
STAMP, UTC_STAMP = "'2026-11-28 09:30:00'", "'2026-11-28T09:30'"
PRICES = [Decimal("0.10"), Decimal("9.99"), Decimal("10.00")]
TYPES: dict[pa.DataType, tuple[list, str]] = {
    **dict.fromkeys(INTEGERS, (NUMBERS, "2")),
    **dict.fromkeys((pa.float16(), pa.float32(), pa.float64()), ([0.5, 1.5, 2.5], "1.5")),
    **dict.fromkeys((pa.string(), pa.large_string(), pa.string_view()), (TEXTS, "'b'")),
    pa.dictionary(pa.int32(), pa.string()): (TEXTS, '"b"'),
    pa.bool_(): ([False, True], "true"),
    pa.date32(): (DAYS, "'2026-11-28'"),
    pa.date64(): (DAYS, "'2026-11-28'"),
    **dict.fromkeys(TIMES, (CLOCKS, "'09:30:15'")),
    **{pa.timestamp(unit): (WALLS, STAMP) for unit in ("s", "ms", "us", "ns")},
    **{pa.timestamp(unit, "UTC"): (_instants(dt.UTC), UTC_STAMP) for unit in ("ms", "us", "ns")},
    pa.timestamp("us", "+07:30"): (_instants(EAST), "'2026-11-28 02:00:00+00:00'"),
    pa.decimal128(9, 2): (PRICES, "9.99"),
    pa.decimal128(38, 0): ([Decimal(1), Decimal(2), Decimal(10**18)], "2"),
    pa.decimal64(9, 2): (PRICES, "9.99"),
}
COMPARE = {"=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
           ">": operator.gt, ">=": operator.ge}  # fmt: skip


def test_every_type_of_the_contract_is_in_the_table():
    """Types are looked for among all that Arrow makes: one that is accepted is tested."""
    made = [
        pa.null(), pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(),
        pa.uint16(), pa.uint32(), pa.uint64(), pa.float16(), pa.float32(), pa.float64(),
        pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(),
        pa.binary(4), pa.binary_view(), pa.date32(), pa.date64(), pa.time32("s"), pa.time32("ms"),
        pa.time64("us"), pa.time64("ns"), pa.duration("s"), pa.month_day_nano_interval(),
        *(pa.timestamp(u) for u in ("s", "ms", "us", "ns")), pa.decimal64(9, 2),
        pa.timestamp("us", "UTC"), pa.decimal128(9, 2), pa.decimal128(38, 0), pa.decimal256(50, 2),
        pa.struct([("a", pa.int8())]), pa.map_(pa.int8(), pa.int8()), pa.list_(pa.list_(pa.int8())),
        pa.dictionary(pa.int32(), pa.string()),
    ]  # fmt: skip
    accepted = {dtype for dtype in made if ATTRIBUTE.accepts(dtype)}
    assert accepted <= TYPES.keys()
    assert all(ATTRIBUTE.accepts(dtype) and ATTRIBUTE.accepts(pa.list_(dtype)) for dtype in TYPES)
    assert not {pa.duration("s"), pa.binary(), pa.decimal256(50, 2)} & accepted


def _array(dtype, values):
    if pa.types.is_float16(dtype):
        return pa.array([None if v is None else np.float16(v) for v in values], dtype)
    if pa.types.is_list(dtype):
        offsets = np.cumsum([0] + [len(v or []) for v in values]).tolist()
        flat = _array(dtype.value_type, [x for v in values for x in (v or [])])
        mask = pa.array([v is None for v in values])
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat, mask=mask)
    return pa.array(values, dtype)


def _got(source, catalog, users):
    """Masks of the users, from the parsed and checked expression."""
    rule = parse_eligibility(source)
    check_types(rule, users.schema, catalog.schema)
    found = eligible_items(with_date(rule, DS), users, catalog)
    return [found.eligible[s].tolist() for s in found.segment]


def _plain(sign, left, right):
    """The comparison in Python; None where the attribute is null."""
    if left is None:
        return None
    if sign == "contains":
        return right in left
    if sign in ("in", "not in"):
        found = left in (right if isinstance(right, list) else [right])
        return found if sign == "in" else not found
    return COMPARE[sign](left, right)


def _rows(dtype, sign):
    """Catalog values, a null among them; lists for `contains`."""
    values, _ = TYPES[dtype]
    if sign == "contains":
        lists = [[values[0]], [values[0], values[1]], [], None, [None, values[1]], [None]]
        return pa.table({"x": _array(pa.list_(dtype), lists)}), lists
    rows = [*values, None]
    return pa.table({"x": _array(dtype, rows)}), rows


PAIRS = [pytest.param(t, o, id=f"{t}-{o}") for t, o in product(TYPES, OPERATORS)]


@pytest.mark.parametrize(("dtype", "sign"), PAIRS)
def test_an_attribute_against_a_literal(dtype, sign):
    values, literal = TYPES[dtype]
    catalog, rows = _rows(dtype, sign)
    users = pa.table({"u": [1, 2]})
    source = f"x {sign} [{literal}]" if "in" in sign.split() else f"x {sign} {literal}"
    want = [_plain(sign, row, values[1]) for row in rows]
    assert _got(source, catalog, users) == [[w is True for w in want]] * 2
    assert _got(f"not x {sign} {literal}", catalog, users)[0] == [w is False for w in want]


@pytest.mark.parametrize(("dtype", "sign"), PAIRS)
def test_an_attribute_against_a_users_column(dtype, sign):
    values, _ = TYPES[dtype]
    catalog, rows = _rows(dtype, sign)
    users = pa.table({"u": _array(dtype, values)})
    want = [[_plain(sign, row, value) is True for row in rows] for value in values]
    assert _got(f"x {sign} {{user.u}}", catalog, users) == want


@pytest.mark.parametrize(("dtype", "sign"), list(product(TYPES, ("in", "not in"))), ids=str)
def test_an_attribute_against_a_users_list(dtype, sign):
    values, _ = TYPES[dtype]
    catalog, rows = _rows(dtype, sign)
    lists = [values[:1], values[1:], [], [None, values[0]]]
    users = pa.table({"u": _array(pa.list_(dtype), lists)})
    want = [[_plain(sign, row, one) is True for row in rows] for one in lists]
    assert _got(f"x {sign} {{user.u}}", catalog, users) == want


DATED = [t for t in TYPES if pa.types.is_date(t) or pa.types.is_timestamp(t)]


@pytest.mark.parametrize(("dtype", "sign"), list(product(DATED, COMPARE)), ids=str)
def test_the_partitions_date_is_its_midnight_in_the_columns_zone(dtype, sign):
    values, _ = TYPES[dtype]
    day = DAYS[1] if pa.types.is_date(dtype) else WALLS[0].replace(tzinfo=values[0].tzinfo)
    catalog, rows = _rows(dtype, sign)
    want = [_plain(sign, row, day) is True for row in rows]
    assert _got(f"x {sign} {{ds}}", catalog, pa.table({"u": [1]})) == [want]


def test_the_partitions_date_is_a_text_beside_texts():
    catalog = pa.table({"x": ["2026-11-27", "2026-11-28", None]})
    assert _got("x >= {ds}", catalog, pa.table({"u": [1]})) == [[False, True, False]]


_FAMILY = {
    "number": lambda t: pa.types.is_integer(t) or pa.types.is_floating(t) or pa.types.is_decimal(t)
    or pa.types.is_boolean(t),
    "text": lambda t: pa.types.is_dictionary(t) or "string" in str(t),
    "date": pa.types.is_date,
    "time": pa.types.is_time,
    "wall": lambda t: pa.types.is_timestamp(t) and t.tz is None,
    "instant": lambda t: pa.types.is_timestamp(t) and t.tz is not None,
}  # fmt: skip
_ALSO = {("date", "wall"), ("wall", "date"), ("instant", "date")}


def _family(dtype):
    return next(name for name, holds in _FAMILY.items() if holds(dtype))


@pytest.mark.parametrize(("left", "right"), list(product(TYPES, TYPES)), ids=str)
def test_two_types_are_compared_by_value_or_refused(left, right):
    """Each pair of an attribute's and a users column's type, every sign."""
    catalog, rows = _rows(left, "=")
    values = TYPES[right][0]
    users = pa.table({"u": _array(right, values)})
    kinds = (_family(left), _family(right))
    if kinds[0] != kinds[1] and kinds not in _ALSO:
        with pytest.raises(ConfigError, match="cannot be compared") as found:
            _got("x < {user.u}", catalog, users)
        assert "x < {user.u}" in str(found.value)
        return
    for sign in COMPARE:
        want = [[_exact(sign, row, value, left, right) for row in rows] for value in values]
        assert _got(f"x {sign} {{user.u}}", catalog, users) == want, sign


def _exact(sign, row, value, left, right):
    """By value: dates as midnights, a float against a decimal by its digits."""
    if row is None:
        return False
    if pa.types.is_decimal(left) and isinstance(value, float):
        value = Decimal(str(value))
    if isinstance(row, float) and isinstance(value, Decimal):
        value = float(value)
    if pa.types.is_date(left) and pa.types.is_timestamp(right):
        row = dt.datetime.combine(row, dt.time())
    if pa.types.is_timestamp(left) and pa.types.is_date(right):
        value = dt.datetime.combine(value, dt.time(), row.tzinfo)
    return COMPARE[sign](row, value)


@pytest.mark.parametrize(
    ("dtype", "values", "literal", "want"),
    [
        (pa.int8(), [-128, 127], "1000", [True, True]),
        (pa.int64(), [-(2**63), 2**63 - 1], str(2**70), [True, True]),
        (pa.int64(), [2, 3], "2.5", [True, False]),
        (pa.int64(), [-3, -2], "-2.5", [True, False]),
        (pa.int64(), [2**53, 2**53 + 1], str(2**53 + 1), [True, False]),
        (pa.decimal128(38, 2), [Decimal("0.29"), Decimal("0.30")], "0.295", [True, False]),
        (pa.float64(), [math.nan, -math.inf, math.inf], "5", [False, True, False]),
        (pa.float32(), [0.1, 0.2], "0.2", [True, False]),
    ],
)  # fmt: skip
def test_values_at_the_edges(dtype, values, literal, want):
    catalog = pa.table({"x": pa.array(values, dtype)})
    users = pa.table({"u": [1]})
    assert _got(f"x < {literal}", catalog, users) == [want]
    known = [not (isinstance(v, float) and math.isnan(v)) for v in values]
    assert _got(f"x >= {literal}", catalog, users) == [
        [k and not w for k, w in zip(known, want, strict=True)]
    ]


def test_nanoseconds_are_exact():
    stamps = pa.array([1, 2, 3], pa.int64()).cast(pa.timestamp("ns"))
    catalog = pa.table({"x": stamps})
    users = pa.table({"u": pa.array([2], pa.int64()).cast(pa.timestamp("ns"))})
    assert _got("x = {user.u}", catalog, users) == [[False, True, False]]
    assert _got("x > '1970-01-01 00:00:00.000000002'", catalog, users) == [[False, False, True]]


@pytest.mark.parametrize(
    ("dtype", "source", "expected"),
    [
        (pa.date32(), "x >= '2026-02-30'", "day of the calendar"),
        (pa.date32(), "x >= 'soon'", "'YYYY-MM-DD'"),
        (pa.date32(), "x >= '2026-11-28 10:00'", "a date"),
        (pa.date32(), "x >= 5", "a date"),
        (pa.date32(), "x in ['2026-11-28', '2026-13-01']", "day of the calendar"),
        (pa.timestamp("us"), "x < '2026-11-28T10:00:00+01:00'", "without an offset"),
        (pa.timestamp("us", "UTC"), "x < '10:00'", "a timestamp"),
        (pa.time64("us"), "x < '25:00'", "time of the day"),
        (pa.time64("us"), "x < {ds}", "a time"),
        (pa.int64(), "x < {ds}", "a number"),
        (pa.int64(), "x = 'a'", "a number"),
        (pa.string(), "x = 5", "a text"),
        (pa.string(), "x", "a boolean column"),
        (pa.list_(pa.string()), "x = 'a'", "contains"),
        (pa.list_(pa.string()), "x in ['a']", "contains"),
        (pa.string(), "x contains 'a'", "contains"),
        (pa.string(), "x = ['a', 'b']", "one value"),
        (pa.list_(pa.string()), "x contains ['a']", "one value"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_its_comparison(dtype, source, expected):
    catalog = pa.schema([("x", dtype)])
    with pytest.raises(ConfigError, match="cannot be compared") as found:
        check_types(parse_eligibility(source), pa.schema([]), catalog)
    assert found.value.exit_code == 2
    assert expected in str(found.value)
    assert source in str(found.value)


def test_a_column_without_a_value_matches_nothing():
    catalog = pa.table({"x": pa.nulls(2), "y": pa.array([[], None], pa.list_(pa.null()))})
    users = pa.table({"u": [5]})
    for source in ("x = 5", "not x = 5", "x in ['a']", "y contains {user.u}", "x", "x < {ds}"):
        assert _got(source, catalog, users) == [[False, False]], source
    assert _got("not y contains 5", catalog, users) == [[True, False]]


@pytest.mark.parametrize("command", ["validate", "plan"])
@pytest.mark.parametrize(
    "source",
    [
        "(" * 200 + "popularity > 1" + ")" * 200,
        "(" * 5000,
        "not " * 3000 + "popularity > 1",
        "(not " * 400 + "popularity > 1" + ")" * 400,
        "popularity = " + "9" * 5000,
        "popularity in [1, -" + "9" * 5000 + "]",
        "popularity > 0." + "1" * 5000,
    ],
    ids=["parentheses", "open", "not", "both", "digits", "in a list", "places"],
)
def test_what_no_parser_holds_is_refused_by_its_setting(nightshelf, tmp_path, command, source):
    write_inputs(tmp_path)
    config = write_config(tmp_path, task__eligibility=source)
    done = nightshelf(command, config, "--output", "json", check=2)
    assert "task.eligibility cannot be read" in done.out
    assert "at most" in done.out


def test_an_expression_may_be_long_and_nested_as_people_nest():
    assert parse_eligibility(" and ".join(["x = 1"] * 3000))
    assert parse_eligibility("(" * 20 + "not (x = 1 or y = 2)" + ")" * 20)
