"""CASES C: columns keep their types and rows their places, whatever wrote the files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from polars.testing import assert_frame_equal

from tests.cases.helpers import published, staged, with_column, write
from tests.factories import write_config, write_inputs


@pytest.fixture
def plain(nightshelf, tmp_path):
    """Inputs, their configuration, and what a run over them publishes."""
    tables = write_inputs(tmp_path, num_users=20)
    config = write_config(tmp_path, prompt__template="{user_vector}{segment}{history}")
    nightshelf("run", config)
    return tables, config, published(tmp_path)


def two_files(folder: Path, name: str, first: pa.Table, second: pa.Table) -> None:
    """The input `name` as a folder of two files."""
    (folder / f"{name}.parquet").unlink()
    (folder / name).mkdir()
    pq.write_table(first, folder / name / "1.parquet")
    pq.write_table(second, folder / name / "2.parquet")


def cast(table: pa.Table, column: str, dtype: pa.DataType) -> pa.Table:
    at = table.schema.get_field_index(column)
    return table.set_column(at, column, table.column(column).combine_chunks().cast(dtype))


@pytest.mark.parametrize("dtype", [pa.list_(pa.float32(), 2), pa.list_(pa.float64())])
def test_a_null_vector_shifts_nobody(nightshelf, tmp_path, dtype):
    """C16, arrow #35692: null fixed-size lists. [[1, 2], null, [3, 4]]."""
    catalog = {"item_id": ["a", "b", "c"], "sid": [[0, 1, 2], [0, 1, 3], [4, 0, 0]]}
    write(tmp_path, "catalog", catalog)
    config = write_config(
        tmp_path,
        prompt__template="{user_vector}",
        inputs={"users": "users.parquet", "catalog": "catalog.parquet"},
        task={"k": 3, "generate": {"width": 8}},
    )
    ids, vectors = ["u1", "u2", "u3"], [[1.0, 2.0], None, [3.0, 4.0]]
    alone = {}
    for user, vector in zip(ids, vectors, strict=True):
        if vector is not None:
            write(tmp_path, "users", {"user_id": [user], "embedding": pa.array([vector], dtype)})
            nightshelf("run", config)
            alone[user] = published(tmp_path)
    write(tmp_path, "users", {"user_id": ids, "embedding": pa.array(vectors, dtype)})
    summary = nightshelf("run", config, "--output", "json").json
    assert_frame_equal(published(tmp_path), pl.concat(alone.values()))
    assert staged(summary, "quarantine").select("key", "rule").rows() == [("u2", "null_vector")]


def test_ids_like_007_stay_text_in_folders_named_like_columns(nightshelf, tmp_path):
    """C17, arrow #39660 and #43303, polars #13177: "007" became 7."""
    catalog = {"item_id": ["007", "08", "9"], "sid": [[0, 1, 2], [0, 1, 3], [4, 0, 0]]}
    users = {"user_id": ["007", "7", "0007"], "history": [["007"], ["08", "9"], []]}
    for name, table in (("catalog", catalog), ("users", users)):
        (tmp_path / name / "bucket=007" / "user_id=7").mkdir(parents=True)
        write(tmp_path / name / "bucket=007" / "user_id=7", "part", table)
    write(tmp_path, "candidates", {"user_id": ["007", "0007"], "item_id": ["08", "007"]})
    config = write_config(
        tmp_path,
        prompt__template="Hi {history}",
        inputs={"users": "users", "catalog": "catalog", "candidates": "candidates.parquet"},
        task={"k": 3, "score": {}},
    )
    nightshelf("run", config)
    rows = published(tmp_path)
    assert rows.select("user_id", "item_id").rows() == [("0007", "007"), ("007", "08")]
    assert rows.schema["user_id"] == rows.schema["item_id"] == pl.String


def test_a_file_s_own_column_beats_the_folder_s_name(nightshelf, tmp_path, plain):
    """C31: the directory value of a Hive column replaced what the file says."""
    tables, config, want = plain
    (tmp_path / "users.parquet").unlink()
    folder = tmp_path / "users" / "segment=s9"
    folder.mkdir(parents=True)
    write(folder, "part", tables["users"])
    nightshelf("run", config, "--set", "inputs.users=users")
    assert_frame_equal(published(tmp_path), want)


def test_a_folder_written_by_polars_partitions_is_read(nightshelf, tmp_path, plain):
    """C18, arrow #47177: large_string columns of polars clashed with partition types."""
    tables, config, want = plain
    for name in ("users", "catalog", "candidates", "exclusions"):
        frame = pl.from_arrow(tables[name]).with_columns(pl.lit("x/y").alias("region"))
        key = "segment" if name == "users" else "region"
        frame = frame.with_columns(pl.col(key).alias("folder"))
        (tmp_path / f"{name}.parquet").unlink()
        frame.write_parquet(tmp_path / name, partition_by="folder")
        assert list((tmp_path / name).glob("folder=*/*.parquet"))
    folders = {name: name for name in tables}
    args = [a for name in folders for a in ("--set", f"inputs.{name}={name}")]
    nightshelf("run", config, *args)
    assert_frame_equal(published(tmp_path), want)


CHANGES = {
    "an extra column": lambda t: with_column(t, "extra", list(range(len(t)))),
    "float64 vectors": lambda t: cast(t, "embedding", pa.list_(pa.float64())),
    "fixed-size vectors": lambda t: cast(t, "embedding", pa.list_(pa.float32(), 4)),
    "large lists": lambda t: cast(t, "embedding", pa.large_list(pa.float32())),
    "dictionary ids": lambda t: cast(t, "user_id", pa.dictionary(pa.int32(), pa.string())),
    "large strings": lambda t: cast(cast(t, "user_id", pa.large_string()), "history",
                                    pa.large_list(pa.large_string())),
    "string views": lambda t: cast(t, "user_id", pa.string_view()),
    "dictionary texts": lambda t: cast(t, "segment", pa.dictionary(pa.int8(), pa.string())),
    "dictionaries in lists": lambda t: with_column(t, "history", pa.array(
        t.column("history").to_pylist(), pa.list_(pa.dictionary(pa.int32(), pa.string())))),
    "another order of columns": lambda t: t.select(t.column_names[::-1]),
    "required columns": lambda t: t.cast(
        pa.schema([f.with_nullable(False) for f in t.schema])),
}  # fmt: skip


@pytest.mark.parametrize("where", [0, 1], ids=["first file", "second file"])
@pytest.mark.parametrize("change", CHANGES)
def test_files_of_one_table_may_differ_in_how_they_hold_it(
    nightshelf, tmp_path, plain, change, where
):
    """C19, polars #20926 and #19842: the first file's schema was taken for all."""
    tables, config, want = plain
    parts = [tables["users"].slice(0, 11), tables["users"].slice(11)]
    parts[where] = CHANGES[change](parts[where])
    two_files(tmp_path, "users", *parts)
    summary = nightshelf("run", config, "--set", "inputs.users=users", "--output", "json").json
    assert summary["users_in"] == 20
    assert_frame_equal(published(tmp_path), want)


def test_float16_vectors_are_read_as_what_they_are(nightshelf, tmp_path):
    """C19: float16 is in the contract of the users table."""
    tables = write_inputs(tmp_path, num_users=6)
    halves = np.asarray(tables["users"].column("embedding").to_pylist(), dtype=np.float16)
    config = write_config(tmp_path, prompt__template="{user_vector}")
    rows = []
    for dtype, kind in ((np.float32, pa.float32()), (np.float16, pa.float16())):
        values = pa.array([list(v) for v in halves.astype(dtype)], pa.list_(kind))
        write(tmp_path, "users", with_column(tables["users"], "embedding", values))
        summary = nightshelf("run", config, "--output", "json").json
        assert summary["users_quarantined"] == 0
        rows.append(published(tmp_path))
    assert_frame_equal(*rows)


def test_int32_and_int64_ids_of_two_files_are_one_id(nightshelf, tmp_path):
    """C19: ids of another width join all the same."""
    tables = write_inputs(tmp_path, num_users=20, int_ids=True)
    config = write_config(tmp_path)
    nightshelf("run", config)
    want = published(tmp_path)
    assert want.schema["user_id"] == pl.Int64
    for name, changes in (
        ("users", {"user_id": pa.int32(), "history": pa.list_(pa.int16())}),
        ("candidates", {"user_id": pa.uint16(), "item_ids": pa.list_(pa.int32())}),
        ("catalog", {"item_id": pa.int32()}),
    ):
        first, second = tables[name].slice(0, 7), tables[name].slice(7)
        for column, dtype in changes.items():
            second = cast(second, column, dtype)
        two_files(tmp_path, name, first, second)
    args = [a for n in ("users", "candidates", "catalog") for a in ("--set", f"inputs.{n}={n}")]
    nightshelf("run", config, *args)
    assert_frame_equal(published(tmp_path), want)


@pytest.mark.parametrize(
    ("name", "column", "values"),
    [
        ("users", "user_id", list(range(9))),
        ("users", "embedding", ["x"] * 9),
        ("users", "history", [[1]] * 9),
        ("candidates", "item_ids", [[1]] * 9),
        ("catalog", "item_id", list(range(9))),
    ],
)
def test_a_second_file_of_another_type_is_named(nightshelf, tmp_path, name, column, values):
    """C19: a clear error that says which file, and never a column of nulls."""
    tables = write_inputs(tmp_path, num_users=20)
    odd = with_column(tables[name].slice(0, 9), column, values)
    two_files(tmp_path, name, tables[name].slice(9), odd)
    err = nightshelf("run", write_config(tmp_path, **{f"inputs__{name}": name}), check=3).err
    assert column in err
    assert f"{name}/2.parquet" in err


WITHOUT = pytest.mark.parametrize("without", [0, 1], ids=["first file", "second file"])


@WITHOUT
def test_an_optional_column_nobody_reads_may_be_in_one_file_only(nightshelf, tmp_path, without):
    """C19: `segment` is optional, and here neither the prompt nor the candidates use it."""
    tables = write_inputs(tmp_path, num_users=20)
    config = write_config(tmp_path)
    nightshelf("run", config)
    want = published(tmp_path)
    parts = [tables["users"].slice(0, 8), tables["users"].slice(8)]
    parts[without] = parts[without].drop(["segment"])
    two_files(tmp_path, "users", *parts)
    nightshelf("run", config, "--set", "inputs.users=users")
    assert_frame_equal(published(tmp_path), want)


@WITHOUT
def test_a_file_without_the_segment_that_candidates_need_is_named(nightshelf, tmp_path, without):
    """C19: candidates are by segment, and one of two users files has none."""
    tables = write_inputs(tmp_path, num_users=20)
    items = tables["catalog"].column("item_id").to_pylist()[:9]
    write(tmp_path, "candidates", {"segment": ["s0", "s1", "s2"], "item_ids": [items] * 3})
    parts = [tables["users"].slice(0, 8), tables["users"].slice(8)]
    parts[without] = parts[without].drop(["segment"])
    two_files(tmp_path, "users", *parts)
    config = write_config(tmp_path, inputs__users="users", task={"k": 3, "score": {}})
    err = nightshelf("run", config, check=3).err
    assert "segment" in err
    assert f"users/{without + 1}.parquet" in err


def test_hidden_and_temporary_files_are_not_read(nightshelf, tmp_path, plain):
    """C20, polars #21762: files of a job that was still writing were read."""
    tables, config, want = plain
    (tmp_path / "users.parquet").unlink()
    folder = tmp_path / "users"
    hidden = ("_temporary/0/task", ".staging", "_spark_metadata", "day=1/_committed_1")
    for name in hidden:
        (folder / name).mkdir(parents=True)
        write(folder / name, "q", tables["users"].slice(0, 3))
    (folder / "day=0").mkdir()
    write(folder / "day=0", "p", tables["users"].slice(0, 10))
    write(folder / "day=1", "p", tables["users"].slice(10))
    write(folder, "_half", tables["users"].slice(0, 3))
    write(folder, ".part-1", tables["users"].slice(0, 3))
    (folder / "_SUCCESS").touch()
    (folder / ".p.parquet.crc").write_bytes(b"x")
    for path in ("users", "users/**/*.parquet"):
        summary = nightshelf("run", config, "--set", f"inputs.users={path}", "--output", "json")
        assert summary.json["users_in"] == 20
        assert summary.json["users_quarantined"] == 0
        assert_frame_equal(published(tmp_path), want)


@pytest.mark.parametrize("name", ["users", "catalog", "candidates", "exclusions"])
def test_a_zero_byte_file_beside_good_ones_is_refused(nightshelf, tmp_path, name):
    """C31: a file of zero bytes was skipped without a word."""
    tables = write_inputs(tmp_path)
    two_files(tmp_path, name, tables[name].slice(0, 5), tables[name].slice(5))
    (tmp_path / name / "3.parquet").touch()
    err = nightshelf("run", write_config(tmp_path, **{f"inputs__{name}": name}), check=3).err
    assert "0 bytes" in err
    assert f"{name}/3.parquet" in err


def test_large_int64_ids_survive_a_null_beside_them(nightshelf, tmp_path):
    """C31: int64 ids with a null were corrupted through pandas, which makes them floats."""
    big, item = 2**53 + 1, 2**62 + 3  # no float64 has these
    users = {"user_id": pa.array([big, None, big + 1]), "history": [[item], [item], [None, item]]}
    write(tmp_path, "users", users)
    catalog = {"item_id": [item, item - 1], "sid": [[0, 1, 2], [0, 1, 3]]}
    write(tmp_path, "catalog", catalog)
    candidates = {"user_id": pa.array([big, None, big + 1]), "item_id": [item, item, item - 1]}
    write(tmp_path, "candidates", candidates)
    config = write_config(
        tmp_path,
        prompt__template="{history}",
        inputs__exclusions=None,
        task={"k": 2, "score": {}},
    )
    summary = nightshelf("run", config, "--output", "json").json
    rows = published(tmp_path).select("user_id", "item_id").rows()
    assert rows == [(big, item), (big + 1, item - 1)]
    bad = staged(summary, "quarantine")
    assert ("users", "null_user_id") in bad.select("table", "rule").rows()
    assert summary["users_quarantined"] == 1
