"""Columns that stand in the names of folders are columns of the table."""

from __future__ import annotations

import shutil
from urllib.parse import quote

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pipelines.planning.plan import plan_run
from pipelines.sources.locate import locate_input
from schemas.config_file import load_config
from schemas.errors import TableError
from tests.factories import write_config, write_inputs

VALUES = ("se", "s e", "n/o", "100%", "a=b", "ø", "", "007", "[x]*", "null")


def spread(table, folder, column, sep=""):
    """Write a table with one column in the names of folders, as Spark and Hive do."""
    for number, value in enumerate(dict.fromkeys(table.column(column).to_pylist())):
        name = "__HIVE_DEFAULT_PARTITION__" if value is None else quote(str(value), safe="")
        part = folder / f"{sep}{column}={name}"
        part.mkdir(parents=True)
        mask = pa.array([one == value for one in table.column(column).to_pylist()])
        kept = table.filter(mask).drop_columns([column])
        pq.write_table(kept, part / f"part-{number}")


def config_of(folder, **changes):
    base = {
        "inputs__candidates": None,
        "task__score": None,
        "prompt__template": "{country}{history}",
    }
    return write_config(folder, **{**base, "prompt__null_text": "none", **changes})


def rows_of(config, name="users"):
    found = locate_input(load_config(config), name).files
    return pa.concat_tables([pq.ParquetFile(one).read() for one in found]).to_pylist()


def published(folder):
    frame = pl.read_parquet(folder / "out/**/*.parquet", hive_partitioning=False)
    return frame.drop("run_id").sort("user_id", "rank")


def with_countries(tables, values):
    users = tables["users"]
    column = [values[at % len(values)] for at in range(len(users))]
    return users.append_column("country", pa.array(column))


@pytest.mark.parametrize("use", ["prompt", "segment", "k", "eligibility"])
def test_a_column_of_folders_is_as_one_of_files(nightshelf, tmp_path, use):
    """In prompts, as the segment, as k, in the eligibility: the rows are those of one file."""
    tables = write_inputs(tmp_path)
    column, values, changes = {
        "prompt": ("country", [*VALUES, None], {}),
        "segment": ("segment", ["s0", "s1"], {"inputs__candidates": "sets.parquet",
                    "task__score": {}, "task__generate": None, "prompt__template": "{history}"}),
        "k": ("wanted", [1, 2, 3], {"task__k_column": "wanted", "prompt__template": "{history}"}),
        "eligibility": ("least", [0, 20, 30], {"prompt__template": "{history}",
                        "task__eligibility": "popularity >= {user.least}"}),
    }[use]  # fmt: skip
    users = tables["users"].drop_columns(["segment"])
    users = users.append_column(
        column, pa.array([values[at % len(values)] for at in range(len(users))])
    )
    sets = {"segment": ["s0", "s1"], "item_ids": [["i001", "i002"], ["i003", "i004", "i005"]]}
    pq.write_table(pa.table(sets), tmp_path / "sets.parquet")
    pq.write_table(users, tmp_path / "users.parquet")
    nightshelf("run", config_of(tmp_path, **changes))
    want = published(tmp_path)
    shutil.rmtree(tmp_path / "out")
    spread(users, tmp_path / "parts", column)
    number = use in ("k", "eligibility")
    source = {"path": "parts", "hive": {column: "int64"}} if number else "parts"
    config = config_of(tmp_path, inputs__users=source, **changes)
    nightshelf("run", config)
    assert published(tmp_path).equals(want)
    nightshelf("validate", config)


def test_values_are_decoded_and_typed(tmp_path):
    tables = write_inputs(tmp_path)
    table = with_countries(tables, [*VALUES, None])
    spread(table, tmp_path / "parts", "country")
    read = rows_of(config_of(tmp_path, inputs__users="parts"))
    want = {row["user_id"]: row["country"] for row in table.to_pylist()}
    assert {row["user_id"]: row["country"] for row in read} == want
    spread(with_countries(tables, [1, 2, None]), tmp_path / "numbers", "country")
    for kind, one, two in (("text", "1", "2"), ("int64", 1, 2), ("double", 1.0, 2.0)):
        source = {"path": "numbers", "hive": {"country": kind}}
        read = rows_of(config_of(tmp_path, inputs__users=source))
        assert {row["country"] for row in read} == {one, two, None}
    for kind in ("date", "bool"):
        source = {"path": "parts", "hive": {"country": kind}}
        with pytest.raises(TableError, match="not of the type that is declared"):
            rows_of(config_of(tmp_path, inputs__users=source))
    with pytest.raises(TableError, match="no folder names the column 'town'"):
        rows_of(config_of(tmp_path, inputs__users={"path": "parts", "hive": {"town": "text"}}))


def test_globs_and_named_folders(tmp_path):
    tables = write_inputs(tmp_path)
    spread(with_countries(tables, ["se", "no", "dk"]), tmp_path / "parts", "country")
    read = rows_of(config_of(tmp_path, inputs__users="parts/country=[sn]*"))
    assert {row["country"] for row in read} == {"se", "no"}
    # A folder that the path names itself is no column: what it holds is what was asked for.
    named = config_of(tmp_path, inputs__users="parts/country=se", prompt__template="{history}")
    assert "country" not in rows_of(named)[0]


def test_a_column_that_is_not_read_costs_no_copy(tmp_path):
    tables = write_inputs(tmp_path)
    spread(with_countries(tables, ["se", "no"]), tmp_path / "parts", "country")
    config = config_of(tmp_path, inputs__users="parts", prompt__template="{history}")
    found = locate_input(load_config(config), "users").files
    assert all(path.startswith(str(tmp_path / "parts")) for path in found)
    assert not (tmp_path / "runs").exists()


def test_a_column_of_the_files_is_theirs(tmp_path):
    table = with_countries(write_inputs(tmp_path), ["se", "no"])
    for folder in ("SE", "NO"):
        (tmp_path / f"parts/country={folder}").mkdir(parents=True)
        mine = table.filter(pc.equal(table.column("country"), folder.lower()))
        pq.write_table(mine, tmp_path / f"parts/country={folder}/0.parquet")
    config = config_of(tmp_path, inputs__users="parts")
    assert {row["country"] for row in rows_of(config)} == {"se", "no"}
    pq.write_table(mine.drop_columns(["country"]), tmp_path / "parts/country=SE/1.parquet")
    with pytest.raises(TableError, match="stands in some files, and in the folders of all"):
        rows_of(config)


def test_a_file_that_is_written_again_is_another_copy(tmp_path):
    table = with_countries(write_inputs(tmp_path), ["se", "no"])
    spread(table, tmp_path / "parts", "country")
    config = load_config(config_of(tmp_path, inputs__users="parts"))
    first = plan_run(config)
    assert plan_run(config).run_id == first.run_id
    part = tmp_path / "parts/country=se/part-0"
    other = pq.read_table(part, partitioning=None)
    pq.write_table(other.slice(1), part)
    second = plan_run(config)
    assert second.run_id != first.run_id
    assert second.inputs["users"].rows == first.inputs["users"].rows - 1


def test_self_contained_tables_have_columns_of_folders_too(nightshelf, tmp_path):
    tables = write_inputs(tmp_path, num_users=12)
    table = with_countries(tables, ["se", "no"])
    changes = {"inputs__self_contained": True, "inputs__exclusions": None, "run__shard_users": 20}
    pq.write_table(table, tmp_path / "users.parquet")
    nightshelf("run", config_of(tmp_path, **changes))
    want = published(tmp_path)
    shutil.rmtree(tmp_path / "out")
    spread(table, tmp_path / "parts", "country")
    nightshelf("run", config_of(tmp_path, inputs__users="parts", **changes))
    assert published(tmp_path).equals(want)


@pytest.mark.parametrize("surface", ["a[b]*", "*", "[ab]", "a?"])
def test_a_surface_in_a_path_is_no_pattern(tmp_path, surface):
    tables = write_inputs(tmp_path)
    for name in ("ab", "a", "b", "ax"):
        (tmp_path / name).mkdir()
        pq.write_table(tables["users"].slice(0, 3), tmp_path / name / "users.parquet")
    changes = {"surface": surface, "prompt__template": "{history}"}
    for path in ("{surface}/users.parquet", "{surface}/*.parquet", "{surface}"):
        config = config_of(tmp_path, inputs__users=path, **changes)
        with pytest.raises(TableError, match="is at the path"):
            rows_of(config)
    (tmp_path / surface).mkdir()
    pq.write_table(tables["users"].slice(0, 1), tmp_path / surface / "users.parquet")
    for path in ("{surface}/users.parquet", "{surface}/*.parquet", "{surface}"):
        assert len(rows_of(config_of(tmp_path, inputs__users=path, **changes))) == 1
