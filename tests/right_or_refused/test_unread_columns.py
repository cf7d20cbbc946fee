"""Columns that a run does not read cannot fail it, whatever they are; those that it reads, and
cannot, are named. In prepared and in self-contained runs, in validate, run and evaluate.
"""

from __future__ import annotations

import base64
import datetime as dt
from decimal import Decimal

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

from tests.factories import write_config, write_inputs

USERS = 12


class _Kms(pe.KmsClient):
    """Keys in the clear, as no key service would."""

    def __init__(self, _config):
        super().__init__()

    def wrap_key(self, key, _name):
        return base64.b64encode(key)

    def unwrap_key(self, key, _name):
        return base64.b64decode(key)


def write_encrypted(path, table, columns, *, plaintext_footer=True):
    """A Parquet file with some columns that nobody reads without a key."""
    config = pe.EncryptionConfiguration(
        footer_key="f", column_keys={"k": columns}, plaintext_footer=plaintext_footer
    )
    factory = pe.CryptoFactory(_Kms)
    keys = factory.file_encryption_properties(pe.KmsConnectionConfig(), config)
    with pq.ParquetWriter(path, table.schema, encryption_properties=keys) as writer:
        writer.write_table(table)


def _odd(rows):
    """Columns of all kinds that a contract names none of."""
    moment = dt.datetime(2026, 11, 28, 9, 30)
    repeat = lambda value, dtype: pa.array([value] * rows, dtype)  # noqa: E731
    return [
        ("offset zone", repeat(moment, pa.timestamp("us", "+07:30"))),
        ("twice", repeat(1, pa.int8())),
        ("twice", repeat("x", pa.string())),
        ("wide decimal", repeat(Decimal(1), pa.decimal256(60, 2))),
        ("span", repeat(dt.timedelta(1), pa.duration("us"))),
        ("map", repeat([("a", 1)], pa.map_(pa.string(), pa.int8()))),
        ("struct", repeat({"user_id": "no", "history": [1]},
                          pa.struct([("user_id", pa.string()), ("history", pa.list_(pa.int8()))]))),
        ("nested", repeat([[1]], pa.list_(pa.list_(pa.int8())))),
        ("history.list.element", repeat(1, pa.int8())),
        ("USER_ID", repeat(None, pa.null())),
        ("bytes", pa.array([b"\xff"] * rows, pa.binary()).view(pa.string())),
        ("uuid", pa.ExtensionArray.from_storage(pa.uuid(), repeat(b"0" * 16, pa.binary(16)))),
    ]  # fmt: skip


def _with_odd(path):
    """The same rows, among odd columns: before, between and behind the others."""
    table = pq.read_table(path)
    odd = _odd(len(table))
    columns = [*odd[:4], *zip(table.column_names, table.columns, strict=True), *odd[4:]]
    names, arrays = zip(*columns, strict=True)
    pq.write_table(pa.Table.from_arrays(list(arrays), names=list(names)), path)


def _published(folder):
    rows = pl.read_parquet(folder / "out/**/*.parquet", hive_partitioning=False)
    return rows.drop("run_id").sort("user_id", "rank")


@pytest.fixture
def plain(tmp_path, nightshelf):
    """What the tables give without odd columns, prepared and self-contained."""
    write_inputs(tmp_path / "plain", num_users=USERS)
    nightshelf("run", write_config(tmp_path / "plain"))
    return _published(tmp_path / "plain")


def test_odd_columns_of_every_table_are_ignored(tmp_path, nightshelf, plain):
    write_inputs(tmp_path, num_users=USERS)
    for name in ("users", "catalog", "candidates", "exclusions"):
        _with_odd(tmp_path / f"{name}.parquet")
    config = write_config(tmp_path)
    nightshelf("validate", config)
    nightshelf("run", config)
    assert _published(tmp_path).equals(plain)


def _self_contained(folder):
    """The users table with each user's lists in it."""
    tables = write_inputs(folder, num_users=USERS)
    excluded: dict[str, list[str]] = {}
    for row in tables["exclusions"].to_pylist():
        excluded.setdefault(row["user_id"], []).append(row["item_id"])
    lists = [excluded.get(user, []) for user in tables["users"]["user_id"].to_pylist()]
    items = tables["candidates"]["item_ids"]
    users = tables["users"].append_column("item_ids", items)
    pq.write_table(users.append_column("excluded_item_ids", [lists]), folder / "users.parquet")
    return write_config(
        folder,
        inputs={"users": "users.parquet", "catalog": "catalog.parquet", "self_contained": True},
        run={"shard_users": 100, "workers": 0},
    )


def test_odd_columns_of_a_self_contained_table_are_ignored(tmp_path, nightshelf, plain):
    config = _self_contained(tmp_path)
    _with_odd(tmp_path / "users.parquet")
    nightshelf("run", config)
    assert _published(tmp_path).equals(plain)


def test_odd_columns_of_truth_and_of_segments_are_ignored(tmp_path, nightshelf):
    write_inputs(tmp_path, num_users=USERS)
    config = write_config(tmp_path)
    nightshelf("run", config)
    rows = _published(tmp_path).select("user_id", "item_id").unique("user_id")
    rows.write_parquet(tmp_path / "truth.parquet")
    pq.write_table(pq.read_table(tmp_path / "users.parquet"), tmp_path / "groups.parquet")
    command = ["evaluate", config, "--truth", tmp_path / "truth.parquet", "--by", "segment",
               "--users", tmp_path / "groups.parquet", "--output", "json"]  # fmt: skip
    want = nightshelf(*command).json
    _with_odd(tmp_path / "truth.parquet")
    _with_odd(tmp_path / "groups.parquet")
    got = nightshelf(*command).json
    assert [got[key] for key in ("methods", "segments", "users")] == [
        want[key] for key in ("methods", "segments", "users")
    ]


@pytest.mark.parametrize("column", ["user_id", "history", "embedding"])
def test_a_column_that_is_read_must_not_stand_twice(tmp_path, nightshelf, column):
    tables = write_inputs(tmp_path, num_users=USERS)
    users = tables["users"].append_column(column, tables["users"][column])
    pq.write_table(users, tmp_path / "users.parquet")
    for command in ("validate", "run"):
        done = nightshelf(command, write_config(tmp_path), "--output", "json", check=3)
        assert f"{column!r} stands 2 times" in done.out


@pytest.mark.parametrize("command", ["validate", "plan", "run"])
def test_an_encrypted_column_matters_only_where_it_is_read(tmp_path, nightshelf, command):
    tables = write_inputs(tmp_path, num_users=USERS)
    path = tmp_path / "users.parquet"
    users = tables["users"].append_column("secret", pa.array(range(USERS)))
    write_encrypted(path, users, ["secret"])
    nightshelf(command, write_config(tmp_path))
    for column in ("user_id", "segment"):
        write_encrypted(path, users, [column])
        config = write_config(tmp_path, prompt={"template": "{segment} {history}"})
        out = nightshelf(command, config, "--output", "json", check=3).out
        assert f"column {column!r} is encrypted" in out
        assert str(path) in out


def test_a_file_with_an_encrypted_footer_is_said_to_be_encrypted(tmp_path, nightshelf):
    tables = write_inputs(tmp_path, num_users=USERS)
    for name in ("users", "catalog"):
        path = tmp_path / f"{name}.parquet"
        column = "user_id" if name == "users" else "item_id"
        write_encrypted(path, tables[name], [column], plaintext_footer=False)
        message = nightshelf("run", write_config(tmp_path), "--output", "json", check=3).out
        assert "encrypted" in message
        assert "damaged" not in message
        assert str(path) in message
        pq.write_table(tables[name], path)


def test_a_decimal_of_more_than_38_digits_is_refused_by_file(tmp_path, nightshelf):
    tables = write_inputs(tmp_path, num_users=USERS)
    prices = pa.array([Decimal("1.50")] * USERS, pa.decimal256(60, 2))
    pq.write_table(tables["users"].append_column("price", prices), tmp_path / "users.parquet")
    config = write_config(tmp_path, prompt={"template": "{price} {history}"})
    done = nightshelf("run", config, "--output", "json", check=3)
    assert "decimal256(60, 2)" in done.json["error"]["message"]
    assert str(tmp_path / "users.parquet") in done.json["error"]["message"]


@pytest.mark.parametrize("task", [{"k": 5, "score": {}}, {"k": 5, "generate": {"width": 60}}])
def test_eligibility_on_dates_decides_what_is_published(tmp_path, nightshelf, task):
    tables = write_inputs(tmp_path, num_users=USERS)
    first = dt.date(2026, 11, 1)
    days = [first + dt.timedelta(days=i % 40) for i in range(60)]
    catalog = tables["catalog"].append_column("released", pa.array(days, pa.date32()))
    ends = pa.array(
        [dt.datetime(2026, 11, 28, i % 24) for i in range(60)], pa.timestamp("us", "UTC")
    )
    pq.write_table(catalog.append_column("ends", ends), tmp_path / "catalog.parquet")
    since = [dt.datetime(2026, 11, 5 + u) for u in range(USERS)]
    users = tables["users"].append_column("since", pa.array(since, pa.timestamp("ms")))
    pq.write_table(users, tmp_path / "users.parquet")
    rule = "released <= {user.since} and released < {ds} and ends >= '2026-11-28 03:00'"
    config = write_config(tmp_path, task={**task, "eligibility": rule})
    nightshelf("validate", config)
    nightshelf("run", config)
    spans = zip(days, ends.to_pylist(), strict=True)
    item = dict(zip(catalog["item_id"].to_pylist(), spans, strict=True))
    user = dict(zip(users["user_id"].to_pylist(), since, strict=True))
    rows = _published(tmp_path)
    assert len(rows)
    for row in rows.to_dicts():
        released, end = item[row["item_id"]]
        assert released <= user[row["user_id"]].date()
        assert released < dt.date(2026, 11, 28)
        assert end.hour >= 3


def test_segments_of_candidates_are_written_as_those_of_users(tmp_path, nightshelf):
    tables = write_inputs(tmp_path, num_users=USERS)
    values = [float(u % 3) for u in range(USERS)]
    users = tables["users"].drop_columns(["segment"])
    pq.write_table(users.append_column("segment", pa.array(values)), tmp_path / "users.parquet")
    items = tables["catalog"]["item_id"].to_pylist()
    sets = pa.table(
        {"segment": [0.0, 1.0, 2.0], "item_ids": [items[:20], items[20:40], items[40:]]}
    )
    pq.write_table(sets, tmp_path / "candidates.parquet")
    nightshelf("run", write_config(tmp_path, task={"k": 5, "score": {}}))
    rows = _published(tmp_path)
    assert rows["user_id"].n_unique() == USERS
    of = {user: sets["item_ids"][int(value)].as_py() for user, value in zip(
        users["user_id"].to_pylist(), values, strict=True)}  # fmt: skip
    assert all(row["item_id"] in of[row["user_id"]] for row in rows.to_dicts())
