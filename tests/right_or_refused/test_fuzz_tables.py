"""Mutated Parquet inputs: a run refuses them in words, or publishes what a plain reading gives.

The plain reading is slow and obvious: each column of each file by pyarrow, on its own, as Python
values; written again as one file per table in the plainest types. The run over that must publish
the very same rows. What a mutation may cost: `HARMLESS` ones change nothing, `ROWS` set rows aside,
`REFUSED` ones end in exit 3, or in the rows of the plain reading.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from schemas.errors import NightshelfError

SEEDS = 320
PER_TEST = 16
KEEP = ("user_id", "rank", "item_id", "score", "source", "exact")

Table = list[dict[str, Any]]  # rows


# --- the tables before they are mutated -----------------------------------------------------------


def plain_tables(rng: random.Random) -> dict[str, Table]:
    items = [f"i{n:02d}" for n in range(24)]
    rng.shuffle(items)
    users = [f"u{n}" for n in range(9)]
    return {
        "users": [
            {
                "user_id": user,
                "embedding": [rng.randrange(-8, 9) / 4 for _ in range(4)],
                "history": rng.sample(items, rng.randrange(1, 5)),
                "bio": rng.choice(["", "likes jazz", "naïve – ☕", "a\tb", "01", "None", "nan"]),
                "segment": rng.randrange(3),
                "age": rng.randrange(-3, 120),
            }
            for user in users
        ],
        "catalog": [
            {
                "item_id": item,
                "sid": [n % 4, n // 4 % 3, n // 12],
                "popularity": n,
                "title": f"T{n}",
            }
            for n, item in enumerate(items)
        ],
        "candidates": [
            {"segment": segment, "item_ids": rng.sample(items, 10)} for segment in range(3)
        ],
        "exclusions": [
            {"user_id": rng.choice(users), "item_id": rng.choice(items)} for _ in range(8)
        ],
    }


TYPES = {
    "user_id": pa.string(), "item_id": pa.string(), "bio": pa.string(), "title": pa.string(),
    "segment": pa.int64(), "age": pa.int64(), "popularity": pa.int64(),
    "embedding": pa.list_(pa.float32()), "history": pa.list_(pa.string()),
    "item_ids": pa.list_(pa.string()), "sid": pa.list_(pa.int64()),
}  # fmt: skip
TEXTS = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
INTS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16()]
SIGNED = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]


class Written:
    """The tables as files, before they are on disk: rows, types and names that mutations change."""

    def __init__(self, tables: dict[str, Table]) -> None:
        self.files: dict[str, list[tuple[str, Table, dict[str, pa.DataType]]]] = {
            name: [("part-0.parquet", rows, {c: TYPES[c] for c in rows[0]})]
            for name, rows in tables.items()
        }
        self.extra: list[tuple[str, int, pa.Field, pa.Array]] = []  # table, file, column
        self.options: dict[str, Any] = {}

    def split(self, name: str, rng: random.Random, parts: int) -> None:
        (_, rows, types), *_ = self.files[name]
        cuts = sorted(rng.sample(range(1, len(rows)), parts - 1))
        pieces = [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
        self.files[name] = [
            (f"part-{n}.parquet", piece, dict(types)) for n, piece in enumerate(pieces)
        ]

    def save(self, folder: Path) -> None:
        for name, files in self.files.items():
            for number, (path, rows, types) in enumerate(files):
                fields, arrays = [], []
                for column, dtype in types.items():
                    fields.append(pa.field(column, dtype))
                    arrays.append(array_of([row[column] for row in rows], dtype))
                for table, at, field, array in self.extra:
                    if (table, at) == (name, number):
                        fields.append(field)
                        arrays.append(array.take(pa.array([0] * len(rows), pa.int64())))
                target = folder / name / path
                target.parent.mkdir(parents=True, exist_ok=True)
                table = pa.Table.from_arrays(arrays, schema=pa.schema(fields))
                pq.write_table(table, target, **self.options)


def array_of(values: list[Any], dtype: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(dtype):
        return pa.array(values, dtype.value_type).dictionary_encode().cast(dtype)
    if pa.types.is_decimal(dtype):
        values = [None if v is None else decimal.Decimal(v) for v in values]
    if pa.types.is_timestamp(dtype) or pa.types.is_date(dtype):
        utc = dt.UTC if pa.types.is_timestamp(dtype) and dtype.tz else None
        day: Any = dt.datetime(2026, 1, 1, tzinfo=utc)
        day = day.date() if pa.types.is_date(dtype) else day
        values = [None if v is None else day + dt.timedelta(days=int(v)) for v in values]
    return pa.array(values, dtype)


# --- mutations ------------------------------------------------------------------------------------


def pick(rng: random.Random, written: Written) -> tuple[str, int, Table, dict[str, pa.DataType]]:
    name = rng.choice([*written.files, "users"])
    at = rng.randrange(len(written.files[name]))
    _, rows, types = written.files[name][at]
    return name, at, rows, types


def other_encoding(rng: random.Random, written: Written) -> None:
    """The same values in another type of the same family, in one file."""
    _, _, _, types = pick(rng, written)
    column = rng.choice(list(types))
    dtype = types[column]
    if pa.types.is_string(dtype):
        types[column] = rng.choice(TEXTS)
    elif pa.types.is_int64(dtype):
        types[column] = rng.choice(SIGNED if column == "age" else INTS)
    elif column == "embedding":
        inner = rng.choice([pa.float16(), pa.float32(), pa.float64()])
        types[column] = rng.choice(
            [pa.list_(inner), pa.large_list(inner), pa.list_(inner, 4)]
        )  # fmt: skip
    elif pa.types.is_list(dtype):
        inner = rng.choice(INTS if column == "sid" else TEXTS[:3])
        types[column] = rng.choice([pa.list_, pa.large_list])(inner)


def more_files(rng: random.Random, written: Written) -> None:
    name = rng.choice([n for n, files in written.files.items() if len(files) == 1] or ["none"])
    if name != "none":
        written.split(name, rng, rng.choice([2, 3]) if len(written.files[name][0][1]) > 3 else 2)


def odd_names(rng: random.Random, written: Written) -> None:
    name = rng.choice(list(written.files))
    odd = rng.sample(
        ["000000_0", "2.PARQUET", "b.parq", "deep/er/x.parquet", "c.snappy.parquet", "[1].parquet",
         "day=1/x.parquet", "ü ☕.parquet", "%20.parquet", "a::b.parquet"],
        len(written.files[name]),
    )  # fmt: skip
    if sum("day=1" in one for one in odd):
        odd = [one if "day=1" in one else f"day=2/{n}.parquet" for n, one in enumerate(odd)]
    written.files[name] = [
        (path, rows, types) for path, (_, rows, types) in zip(odd, written.files[name], strict=True)
    ]


ODD_COLUMNS = [
    pa.field("when", pa.timestamp("us", "+07:30")), pa.field("took", pa.duration("ns")),
    pa.field("price", pa.decimal256(60, 3)), pa.field("raw", pa.binary()),
    pa.field("nothing", pa.null()), pa.field("", pa.int32()), pa.field("USER_ID", pa.int64()),
    pa.field("pair", pa.struct([("a", pa.int8()), ("user_id", pa.string())])),
    pa.field("tags", pa.map_(pa.string(), pa.int32())),
    pa.field("nested", pa.list_(pa.list_(pa.int8()))),
    pa.field("__shard", pa.string()), pa.field("__file", pa.int64()), pa.field("a.b", pa.string()),
]  # fmt: skip


def unused_columns(rng: random.Random, written: Written) -> None:
    name, at, *_ = pick(rng, written)
    field = rng.choice(ODD_COLUMNS)
    written.extra.append((name, at, field, pa.nulls(1, field.type)))
    if rng.random() < 0.3:  # a name that stands twice
        written.extra.append((name, at, field, pa.nulls(1, field.type)))


def other_layout(rng: random.Random, written: Written) -> None:
    written.options |= rng.choice(
        [{"row_group_size": 1}, {"compression": "none"}, {"compression": "gzip"},
         {"version": "1.0"},
         {"use_dictionary": False}, {"data_page_version": "2.0"}, {"store_schema": False},
         {"write_statistics": False}, {"compression": "brotli"}, {"write_page_checksum": True}]
    )  # fmt: skip


def no_rows(rng: random.Random, written: Written) -> None:
    """One more file, without rows."""
    name = rng.choice(list(written.files))
    _, _, types = written.files[name][0]
    written.files[name].append((f"empty-{len(written.files[name])}.parquet", [], dict(types)))


def other_order(rng: random.Random, written: Written) -> None:
    """Columns in another order in one file."""
    name, at, rows, types = pick(rng, written)
    names = list(types)
    rng.shuffle(names)
    written.files[name][at] = (written.files[name][at][0], rows, {c: types[c] for c in names})


def bad_values(rng: random.Random, written: Written) -> None:
    rows = written.files["users"][rng.randrange(len(written.files["users"]))][1]
    if not rows:
        return
    row, column = rng.randrange(len(rows)), rng.choice(["user_id", "embedding", "history", "bio"])
    worse: dict[str, list[Any]] = {
        "user_id": [None, "", rows[0]["user_id"], " u1", "u1\n", "U1"],
        "embedding": [None, [], [1.0], [float("nan")] * 4, [float("inf")] + [0.0] * 3],
        "history": [None, [], ["nowhere"], [None], ["", "i01", "i01"]],
        "bio": [None, "\x00", "\ufeffx", "é", "é", "x" * 60, "<a_1><b_2><c_0>"],
    }
    value = rng.choice(worse[column])
    dtype = written.files["users"][0][2][column]
    if pa.types.is_fixed_size_list(dtype) and value is not None and len(value) != 4:
        return
    rows[row] = {**rows[row], column: value}


def bad_items(rng: random.Random, written: Written) -> None:
    name, column = rng.choice([("candidates", "item_ids"), ("exclusions", "item_id")])
    rows = written.files[name][0][1]
    if rows:
        row = rng.randrange(len(rows))
        value = rng.choice([["nowhere", "i01"], [None], [], None] if column == "item_ids"
                           else ["nowhere", None, ""])  # fmt: skip
        rows[row] = {**rows[row], column: value}


def another_type(rng: random.Random, written: Written) -> None:
    """A type of another family in one file: the texts would differ, or nothing would join."""
    name, column = rng.choice([("users", "segment"), ("users", "age"), ("candidates", "segment")])
    at = rng.randrange(len(written.files[name]))
    dtype = rng.choice([
        pa.float64(), pa.float32(), pa.string(), pa.decimal128(9, 2), pa.decimal128(9, 0),
        pa.date32(), pa.timestamp("us"), pa.timestamp("ms", "UTC"), pa.uint64(), pa.float16(),
    ])  # fmt: skip
    path, rows, types = written.files[name][at]
    if column not in types:
        return
    if pa.types.is_string(dtype):
        rows = [{**row, column: None if row[column] is None else str(row[column])} for row in rows]
    elif pa.types.is_string(types[column]):  # changed before
        return
    elif pa.types.is_uint64(dtype):
        rows = [{**row, column: abs(row[column])} for row in rows]
    written.files[name][at] = (path, rows, {**types, column: dtype})


def lost_rows(rng: random.Random, written: Written) -> None:
    """Pages so small that Arrow writes lists that it reads back as fewer rows, without a word."""
    written.options |= {"data_page_size": 1, "row_group_size": 1}


def no_column(rng: random.Random, written: Written) -> None:
    """A column is missing in one file."""
    name, at, rows, types = pick(rng, written)
    column = rng.choice(list(types))
    kept = {c: dtype for c, dtype in types.items() if c != column}
    if kept:
        written.files[name][at] = (written.files[name][at][0], rows, kept)


HARMLESS = [other_encoding, more_files, odd_names, unused_columns, other_layout, no_rows,
            other_order]  # fmt: skip
ROWS = [bad_values, bad_items]
REFUSED = [another_type, no_column, another_type, no_column, lost_rows]
Mutation = Callable[[random.Random, Written], None]


def mutations(rng: random.Random) -> list[Mutation]:
    chosen: list[Mutation] = [more_files, *rng.choices(HARMLESS, k=rng.randrange(2, 6))]
    chosen += rng.choices(ROWS, k=rng.choice([0, 0, 1, 2]))
    return chosen + rng.choices(REFUSED, k=rng.choice([0, 0, 0, 1]))


# --- the plain reading ----------------------------------------------------------------------------


def read_plainly(folder: Path, name: str, columns: list[str]) -> pa.Table:
    """All rows of a table's files, by their names, in the plainest type of their family."""
    parts: dict[str, list[Any]] = {column: [] for column in columns}
    kinds: dict[str, set[pa.DataType]] = {column: set() for column in columns}
    for path in sorted(p for p in (folder / name).rglob("*") if p.is_file()):
        file = pq.ParquetFile(path)
        for column in columns:
            at = file.schema_arrow.get_all_field_indices(column)
            assert len(at) == 1, "read only where the run accepted it"
            read = file.read(columns=[column]).column(0)
            assert len(read) == file.metadata.num_rows, f"{path} gives fewer rows than it has"
            parts[column] += read.to_pylist()
            kinds[column].add(plainest(read.type))
    for column, found in kinds.items():
        assert len(found) == 1, f"{name}.{column} is of several types: {found}"
    return pa.table({c: pa.array(parts[c], kinds[c].pop()) for c in columns})


def plainest(dtype: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(dtype):
        return plainest(dtype.value_type)
    if pa.types.is_large_string(dtype) or pa.types.is_string_view(dtype):
        return pa.string()
    if pa.types.is_integer(dtype) or (pa.types.is_decimal(dtype) and dtype.scale == 0):
        return pa.int64()
    if (
        pa.types.is_list(dtype)
        or pa.types.is_large_list(dtype)
        or pa.types.is_fixed_size_list(dtype)
    ):
        inner = plainest(dtype.value_type)
        return pa.list_(pa.float32() if pa.types.is_floating(inner) else inner)
    return dtype


# --- runs -----------------------------------------------------------------------------------------


def config_of(folder: Path) -> Path:
    config = {
        "surface": "home",
        "ds": "2026-11-28",
        "engine": {"backend": "fake"},
        "sid": {"sizes": [4, 3, 2], "tokens": ["<a_{code}>", "<b_{code}>", "<c_{code}>"]},
        "prompt": {
            "template": "{user_vector}{history} {text:bio}|{segment}|{age}",
            "null_text": "?",
        },
        "inputs": {n: n for n in ("users", "catalog", "candidates", "exclusions")},
        "task": {"k": 12, "score": {}},
        "output": {"path": "out"},
        "run": {"shard_users": 4, "workers": 0},
        "report": {"examples": 0},
        "audit": {"max_unknown_history": 1.0, "max_quarantine_rate": 1.0},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def published(folder: Path) -> list[tuple[Any, ...]]:
    found = list(folder.glob("out/ds=2026-11-28/surface=home/*.parquet"))
    if not found:
        return []
    rows = pl.read_parquet(found, hive_partitioning=False)
    return rows.select(KEEP).sort("user_id", "rank").rows()


@pytest.fixture
def no_page(monkeypatch):
    """The page of a run takes longer than the run, and is not what is tested."""

    def skip(*_: Any) -> None:
        raise NightshelfError("no page in this test")

    monkeypatch.setattr("pipelines.report.write_report", skip)


@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_mutated_tables_are_refused_or_read_as_they_are(nightshelf, tmp_path, no_page, first):
    for seed in range(first, first + PER_TEST):
        check(nightshelf, tmp_path / str(seed), seed)


def check(nightshelf: Any, folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    written = Written(plain_tables(rng))
    columns = {name: list(files[0][2]) for name, files in written.files.items()}
    chosen = mutations(rng)
    for mutate in chosen:
        mutate(rng, written)
    written.save(folder)
    story = f"seed {seed}: {', '.join(m.__name__ for m in chosen)}"
    done = nightshelf("run", config_of(folder), "--output", "json", check=None)
    assert done.code in (0, 3, 6), f"{story}: exit {done.code}\n{done.err}"
    assert done.json["status"] in ("published", "failed"), story
    if done.code == 3:
        assert set(chosen) & set(REFUSED), f"{story}: refused\n{done.err}"
        assert not published(folder), story
        assert "\n" not in json.dumps(done.json["error"]["message"]), story
        return
    try:
        tables = {name: read_plainly(folder, name, columns[name]) for name in columns
                  if not optional_only(written, name, columns[name])}  # fmt: skip
    except AssertionError as err:
        raise AssertionError(f"{story}: exit {done.code}, but {err}") from err
    again = folder / "plain"
    for name in columns:
        (again / name).mkdir(parents=True)
        table = tables.get(name)
        if table is None:  # an optional column is missing in a file: nobody reads it here
            kept = [c for c in columns[name] if all(c in f[2] for f in written.files[name])]
            table = read_plainly(folder, name, kept)
        pq.write_table(table, again / name / "all.parquet")
    plain = nightshelf("run", config_of(again), "--output", "json", check=None)
    assert plain.code == done.code, f"{story}: {done.code}, plainly {plain.code}\n{plain.err}"
    assert published(folder) == published(again), story
    for count in ("users_in", "users_quarantined", "users_recommended", "rows_quarantined"):
        assert done.json.get(count) == plain.json.get(count), f"{story}: {count}"


def optional_only(written: Written, name: str, columns: list[str]) -> bool:
    missing = {c for c in columns for file in written.files[name] if c not in file[2]}
    return bool(missing) and missing <= {"popularity", "title"}


# --- what the mutations have found, kept by itself ------------------------------------------------


def test_a_first_file_without_rows_does_not_decide_the_length_of_vectors(nightshelf, tmp_path):
    written = Written(plain_tables(random.Random(1)))
    ((_, rows, types),) = written.files["users"]
    written.files["users"] = [("a.parquet", [], types), ("b.parquet", rows, types)]
    written.save(tmp_path)
    done = nightshelf("run", config_of(tmp_path), "--output", "json")
    assert (done.json["users_in"], done.json["users_quarantined"]) == (9, 0)


@pytest.mark.parametrize("table", ["users", "catalog", "candidates"])
def test_rows_that_the_reader_loses_are_noticed(nightshelf, tmp_path, table):
    written = Written(plain_tables(random.Random(2)))
    written.save(tmp_path)
    path = tmp_path / table / "part-0.parquet"
    whole = pq.read_table(path)
    pq.write_table(whole, path, data_page_size=1, row_group_size=1)
    column = next(f.name for f in whole.schema if pa.types.is_list(f.type))
    assert len(pq.ParquetFile(path).read(columns=[column])) < len(whole), "Arrow reads it rightly"
    err = nightshelf("run", config_of(tmp_path), check=3).err
    assert "rows" in err
    assert str(path) in err
