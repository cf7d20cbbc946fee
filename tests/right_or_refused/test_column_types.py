"""A column has one type in all files of a table: each pair of types is read as a plain reading
would, or refused by both names. Every pair of the contract's types is tried.
"""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from itertools import product

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.inputs.shard_columns import schema_of, shard_type
from pipelines.sources.column_values import as_text, converted
from pipelines.sources.input_columns import Piece, Wanted, scan_columns
from schemas.column_types import ATTRIBUTE, ID, ID_LIST, SCALAR, is_empty
from schemas.errors import TableError
from schemas.tables import Column, TableContract, id_type

DAY, CLOCK = dt.date(2026, 11, 28), dt.time(9, 30, 0, 250_000)
NAIVE = dt.datetime(2026, 11, 28, 9, 30)
AWARE = NAIVE.replace(tzinfo=dt.UTC)
WHOLE = {str(t): (t, 7) for t in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(),
         pa.uint16(), pa.uint32(), pa.uint64())}  # fmt: skip
TEXTS = {
    str(t): (t, "seven")
    for t in (
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
    )
}
OTHERS = [
    (pa.bool_(), True), (pa.float16(), 0.5), (pa.float32(), 0.5), (pa.float64(), 0.1),
    (pa.date32(), DAY), (pa.date64(), DAY), (pa.time32("ms"), CLOCK), (pa.time64("us"), CLOCK),
    (pa.time64("ns"), CLOCK), (pa.timestamp("ms"), NAIVE), (pa.timestamp("us"), NAIVE),
    (pa.timestamp("ns"), NAIVE), (pa.timestamp("us", "UTC"), AWARE),
    (pa.timestamp("us", "Europe/Berlin"), AWARE), (pa.timestamp("us", "+07:30"), AWARE),
    (pa.decimal128(9, 0), Decimal(7)), (pa.decimal128(9, 2), Decimal("1.50")),
    (pa.decimal128(30, 2), Decimal("1.50")), (pa.decimal128(9, 3), Decimal("1.500")),
    (pa.null(), None),
]  # fmt: skip
TYPES = {**WHOLE, **TEXTS, **{str(t): (t, v) for t, v in OTHERS}}
_GROUPS = (
    set(WHOLE) | {"decimal128(9, 0)"},
    set(TEXTS),
    {"date32[day]", "date64[ms]"},
    {"decimal128(9, 2)", "decimal128(30, 2)"},
)
PAIRS = list(product(TYPES, TYPES))


def _may_stand_together(one: str, other: str) -> bool:
    return "null" in (one, other) or one == other or any({one, other} <= g for g in _GROUPS)


def _array(dtype, value):
    if pa.types.is_float16(dtype):
        return pa.array(np.array([value, value], np.float16))
    return pa.array([value, value], dtype) if value is not None else pa.nulls(2, dtype)


def _write(folder, arrays):
    paths = []
    for place, array in enumerate(arrays):
        paths.append(str(folder / f"{place}.parquet"))
        pq.write_table(pa.table({"x": array}), paths[-1])
    return paths


def _read(folder, arrays, kind, use):
    """The rows of all files as a shard has them, or the error."""
    paths = _write(folder, arrays)
    try:
        schema = schema_of("users", paths, TableContract("users", (Column("x", kind),)))
    except TableError as err:
        return paths, err
    found = schema.field("x").type
    item = "string" if is_empty(found) else id_type(found)
    wanted = [Wanted("x", "x", shard_type("x", use, found, item))]
    frame = scan_columns("users", [Piece(path, 0) for path in paths], wanted).collect()
    return paths, frame["x"].to_list()


def _refused_by_name(err, paths, types):
    text = str(err)
    return err.exit_code == 3 and all(p in text for p in paths) and all(t in text for t in types)


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_two_types_of_a_prompt_column_have_one_text_or_are_refused(tmp_path, one, other):
    arrays = [_array(*TYPES[one]), _array(*TYPES[other])]
    paths, got = _read(tmp_path, arrays, SCALAR, "text")
    if not _may_stand_together(one, other):
        assert _refused_by_name(got, paths, [str(pq.read_schema(p).field(0).type) for p in paths])
        return
    assert got == [_plain_text(a[0]) for a in arrays for _ in range(2)]


def _plain_text(scalar):
    """As Python writes it."""
    value, dtype = scalar.as_py(), scalar.type
    digits = {"s": "seconds", "ms": "milliseconds", "us": "microseconds"}
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if pa.types.is_timestamp(dtype) or pa.types.is_time(dtype):
        nanos = "000" if dtype.unit == "ns" else ""
        spec = digits.get(dtype.unit, "microseconds")
        whole = (
            value.isoformat(" ", spec) if pa.types.is_timestamp(dtype) else value.isoformat(spec)
        )
        return whole + nanos
    return str(value)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (pa.array([1.0, 0.1, 1e16, 1e-7, float("nan"), float("-inf")]),
         ["1.0", "0.1", "1e+16", "1e-7", "NaN", "-inf"]),
        (pa.array([0.1, 16777216.0], pa.float32()), ["0.1", "16777216.0"]),
        (pa.array([Decimal("0.00000001"), Decimal("1.50")], pa.decimal128(20, 8)),
         ["0.00000001", "1.50000000"]),
        (pa.array([True, False, None]), ["true", "false", None]),
        (pa.array([2**64 - 1], pa.uint64()), ["18446744073709551615"]),
        (pa.array([DAY], pa.date64()), ["2026-11-28"]),
        (pa.array([CLOCK, dt.time(9)], pa.time32("ms")), ["09:30:00.250", "09:00:00"]),
        (pa.array([CLOCK], pa.time64("us")), ["09:30:00.250000"]),
        (pa.array([NAIVE], pa.timestamp("s")), ["2026-11-28 09:30:00.000"]),
        (pa.array([NAIVE], pa.timestamp("ns")), ["2026-11-28 09:30:00.000000000"]),
        (pa.array([AWARE], pa.timestamp("us", "UTC")), ["2026-11-28 09:30:00.000000+00:00"]),
        (pa.array([AWARE], pa.timestamp("ms", "+07:30")), ["2026-11-28 17:00:00.000+07:30"]),
        (pa.array([AWARE], pa.timestamp("ms", "America/New_York")),
         ["2026-11-28 04:30:00.000-05:00"]),
        (pa.array(["a", None]).dictionary_encode(), ["a", None]),
    ],
)  # fmt: skip
def test_each_type_is_written_one_way(array, text):
    assert as_text(array).to_pylist() == text


IDS = {**WHOLE, **TEXTS, "decimal128(9, 0)": TYPES["decimal128(9, 0)"], "null": TYPES["null"],
       "double": TYPES["double"], "bool": TYPES["bool"]}  # fmt: skip


@pytest.mark.parametrize(("one", "other"), list(product(IDS, IDS)))
def test_ids_of_two_files_are_of_one_type_or_refused(tmp_path, one, other):
    arrays = [_array(*IDS[one]), _array(*IDS[other])]
    paths, got = _read(tmp_path, arrays, ID, "item")
    if {one, other} & {"double", "bool"}:
        assert got.exit_code == 3
        assert "wrong type" in str(got)
    elif _may_stand_together(one, other):
        assert got == [IDS[one][1]] * 2 + [IDS[other][1]] * 2
    else:
        assert _refused_by_name(got, paths, [str(pq.read_schema(p).field(0).type) for p in paths])


LISTS = {
    "list<int8>": pa.list_(pa.int8()),
    "list<int64>": pa.list_(pa.int64()),
    "large_list<int32>": pa.large_list(pa.int32()),
    "fixed<uint64>": pa.list_(pa.uint64(), 2),
    "list<string>": pa.list_(pa.string()),
    "large_list<large_string>": pa.large_list(pa.large_string()),
    "list<dictionary>": pa.list_(pa.dictionary(pa.int32(), pa.string())),
    "list<null>": pa.list_(pa.null()),
    "null": pa.null(),
}


@pytest.mark.parametrize(("one", "other"), list(product(LISTS, LISTS)))
@pytest.mark.parametrize(("kind", "use"), [(ID_LIST, "item"), (ATTRIBUTE, "as it is")])
def test_lists_of_two_files_are_of_one_type_or_refused(tmp_path, one, other, kind, use):
    def rows(name):
        inner = [None, None] if "null" in name else ["7", "8"] if "str" in name else [7, 8]
        inner = ["7", "8"] if "dict" in name else inner
        return [None, None] if name == "null" else [inner, None]

    arrays = [pa.array(rows(name), LISTS[name]) for name in (one, other)]
    _, got = _read(tmp_path, arrays, kind, use)
    text = ["str" in name or "dict" in name for name in (one, other) if "null" not in name]
    if len(set(text)) > 1:
        assert got.exit_code == 3
        assert "changes its type between files" in str(got)
    elif text or use == "item":
        assert got == rows(one) + rows(other)


@pytest.mark.parametrize("dtype", [pa.uint64(), pa.decimal128(38, 0)], ids=str)
@pytest.mark.parametrize("listed", [False, True])
def test_a_number_beyond_int64_is_refused_with_its_value(tmp_path, dtype, listed):
    value = Decimal(2**63) if pa.types.is_decimal(dtype) else 2**63
    array = pa.array([[value]], pa.list_(dtype)) if listed else pa.array([value], dtype)
    (path,) = _write(tmp_path, [array])
    target = pa.list_(pa.int64()) if listed else pa.int64()
    with pytest.raises(TableError, match=str(2**63)) as found:
        scan_columns("users", [Piece(path, 0)], [Wanted("x", "x", target)]).collect()
    assert found.value.exit_code == 3
    assert path in str(found.value)


def test_numbers_at_the_edges_of_int64_are_read(tmp_path):
    edges = [-(2**63), 2**63 - 1]
    (path,) = _write(tmp_path, [pa.array([Decimal(e) for e in edges], pa.decimal128(38, 0))])
    rows = scan_columns("users", [Piece(path, 0)], [Wanted("x", "x", pa.int64())]).collect()
    assert rows["x"].to_list() == edges


def test_a_null_vector_of_a_fixed_size_shifts_no_other(tmp_path):
    rows = [[1.0, 2.0], None, [3.0, 4.0]]
    (path,) = _write(tmp_path, [pa.array(rows, pa.list_(pa.float64(), 2))])
    wanted = [Wanted("x", "x", pa.list_(pa.float32()))]
    assert scan_columns("users", [Piece(path, 0)], wanted).collect()["x"].to_list() == rows


def test_text_that_is_not_utf8_is_refused_by_file(tmp_path):
    bad = pa.array([b"\xff\xfe"], pa.binary()).view(pa.string())
    (path,) = _write(tmp_path, [bad])
    with pytest.raises(TableError, match="UTF-8") as found:
        scan_columns("users", [Piece(path, 0)], [Wanted("x", "x", pa.string())]).collect()
    assert path in str(found.value)


def test_any_part_of_a_file_is_what_a_whole_reading_gives_there(tmp_path):
    path = str(tmp_path / "a.parquet")
    rows = pa.table({"x": range(1000), "y": [[i] * (i % 3) for i in range(1000)]})
    pq.write_table(rows, path, row_group_size=170)
    wanted = [Wanted("y", "y", pa.list_(pa.int64())), Wanted("x", "x", pa.string())]
    for first, count in [
        (0, 1000),
        (0, 1),
        (169, 2),
        (170, 170),
        (333, 400),
        (999, 1),
        (500, None),
    ]:
        piece = Piece(path, 7, first, count)
        got = scan_columns("users", [piece], wanted, numbers="n").collect()
        whole = rows.slice(first, count)
        assert got["x"].to_list() == [str(x) for x in whole["x"].to_pylist()]
        assert got["y"].to_list() == whole["y"].to_pylist()
        assert got["n"].to_list() == list(range(7, 7 + len(whole)))
    lazy = scan_columns("users", [Piece(path, 0)], wanted)
    assert lazy.filter(pl.col("x") == "5").select("y").collect()["y"].to_list() == [[5, 5]]
    assert lazy.select(pl.len()).collect().item() == 1000
    assert lazy.head(3).collect()["x"].to_list() == ["0", "1", "2"]


@pytest.mark.parametrize("view", [pa.list_view, pa.large_list_view])
@pytest.mark.parametrize("rows", [[], [[1, 2], None, [], [3]], [[5]] * 4])
@pytest.mark.parametrize("skip", [0, 1])
def test_lists_that_lie_anywhere_in_their_values_are_read(view, rows, skip):
    column = pa.array(rows, view(pa.int8()))[skip:]
    read = converted(column, pa.list_(pa.int64()), "history", "users.parquet")
    read.validate(full=True)
    assert read.to_pylist() == rows[skip:]


def test_lists_that_share_their_values_in_another_order_are_read():
    views = pa.ListViewArray.from_arrays([2, 0, 0], [1, 2, 1], pa.array([7, 8, 9]))
    read = converted(views, pa.list_(pa.int64()), "history", "users.parquet")
    assert read.to_pylist() == [[9], [7, 8], [7]]
