"""A table with a log is read by its snapshot, or refused: never by the files that lie there."""

from __future__ import annotations

import datetime as dt
import shutil
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.planning.plan import plan_run
from pipelines.sources.locate import list_parquet, locate_input
from schemas.config_file import load_config
from schemas.errors import TableError
from schemas.runs import RunPlan
from tests.factories import write_config, write_inputs
from tests.right_or_refused.lakes import adds, delete_by_vector, map_names

deltalake = pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")


def users(first, count, **columns):
    ids = [f"u{at:03d}" for at in range(first, first + count)]
    return pa.table({"user_id": ids, "history": [[f"i{at:03d}"] for at in range(count)], **columns})


def config_of(folder, **changes):
    base = {"inputs__candidates": None, "task__score": None, "prompt__template": "{history}"}
    return write_config(folder, **{**base, **changes})


def users_of(folder, **changes):
    """What a run would read of the users table, as rows, in order of their ids."""
    config = load_config(config_of(folder, **changes))
    found = locate_input(config, "users").files
    return sorted(
        pa.concat_tables([pq.ParquetFile(one).read() for one in found], promote_options="default")
        .to_pylist(),
        key=lambda row: row["user_id"],
    )  # fmt: skip


def published(folder):
    frame = pl.read_parquet(folder / "out/**/*.parquet", hive_partitioning=False)
    return frame.drop("run_id").sort("user_id", "rank")


# --- Delta ----------------------------------------------------------------------------------------


def write(path, table, **how):
    deltalake.write_deltalake(str(path), table, **how)


@pytest.mark.parametrize("form", ["path", "delta", "slash", "spaced"])
@pytest.mark.parametrize(
    "change", ["overwrite", "delete", "append", "update", "restore", "optimize"]
)
def test_the_live_rows_of_a_delta_table_are_read(nightshelf, tmp_path, form, change):
    write_inputs(tmp_path)
    table = tmp_path / ("my lake" if form == "spaced" else "lake")
    write(table, users(0, 6))
    delta = deltalake.DeltaTable(str(table))
    if change == "overwrite":
        write(table, users(3, 4), mode="overwrite")
    elif change == "delete":
        delta.delete("user_id < 'u004'")
    elif change == "update":
        delta.update({"user_id": "'x'"}, predicate="user_id = 'u001'")
    else:
        write(table, users(10, 2), mode="append")
        if change == "restore":
            deltalake.DeltaTable(str(table)).restore(0)
        elif change == "optimize":
            deltalake.DeltaTable(str(table)).optimize.compact()
    named = {"delta": {"delta": "lake"}, "slash": "lake/"}.get(form, table.name)
    live = deltalake.DeltaTable(str(table)).to_pyarrow_table().to_pylist()
    assert users_of(tmp_path, inputs__users=named) == sorted(live, key=lambda r: r["user_id"])
    config = config_of(tmp_path, inputs__users=named)
    if form != "path":
        return
    nightshelf("run", config)
    assert set(published(tmp_path)["user_id"]) == {row["user_id"] for row in live}
    assert nightshelf("validate", config).err == ""


def test_the_version_is_part_of_the_run(tmp_path):
    write_inputs(tmp_path)
    write(tmp_path / "lake", users(0, 6))
    write(tmp_path / "lake", users(6, 2), mode="append")

    def plan(**source):
        return plan_run(load_config(config_of(tmp_path, inputs__users=source)))

    first = plan(delta="lake", version=0)
    latest = plan(delta="lake")
    assert first.inputs["users"].rows == 6
    assert latest.inputs["users"].rows == 8
    assert first.inputs["users"].snapshot == "Delta version 0"
    assert latest.inputs["users"].snapshot == "Delta version 1"
    assert first.run_id != latest.run_id
    assert RunPlan.model_validate(first.model_dump(mode="json")) == first
    assert plan(delta="lake").run_id == latest.run_id
    write(tmp_path / "lake", users(8, 2), mode="append")
    assert plan(delta="lake").run_id != latest.run_id
    assert plan(delta="lake", version=0).run_id == first.run_id
    with pytest.raises(TableError, match="version 99"):
        plan(delta="lake", version=99)


@pytest.mark.parametrize("kind", ["text", "int64", "date", "bool"])
def test_partition_columns_of_a_delta_table_are_columns(nightshelf, tmp_path, kind):
    tables = write_inputs(tmp_path)
    values = {
        "text": ["s e", "n/o", None, "100%", "a=b", "ø"],
        "int64": [1, 2, None, -4, 5, 1],
        "date": [dt.date(2026, 1, 1), None, *[dt.date(2026, 1, 2)] * 4],
        "bool": [True, False, None, True, True, False],
    }[kind]
    table = users(0, 6, country=values)
    write(tmp_path / "lake", table, partition_by=["country"])
    template = {"prompt__template": "{country} {history}", "prompt__null_text": "none"}
    assert users_of(tmp_path, inputs__users="lake", **template) == table.to_pylist()
    config = config_of(tmp_path, inputs__users="lake", **template)
    nightshelf("run", config)
    got = published(tmp_path)
    pq.write_table(table, tmp_path / "users.parquet")
    shutil.rmtree(tmp_path / "out")
    nightshelf("run", config_of(tmp_path, **template))
    assert published(tmp_path).equals(got)
    assert tables


def test_a_folder_of_a_delta_table_is_its_partition(tmp_path):
    write_inputs(tmp_path)
    write(tmp_path / "lake", users(0, 4, day=["1", "1", "2", "2"]), partition_by=["day"])
    deltalake.DeltaTable(str(tmp_path / "lake")).delete("user_id = 'u001'")
    read = users_of(tmp_path, inputs__users="lake/day=1")
    assert [row["user_id"] for row in read] == ["u000"]
    deltalake.DeltaTable(str(tmp_path / "lake")).delete("day = '2'")
    with pytest.raises(TableError, match="no rows in this partition"):
        users_of(tmp_path, inputs__users="lake/day=2")
    file = next((tmp_path / "lake/day=2").glob("*.parquet")).relative_to(tmp_path)
    for path in (str(file), "lake/day=*", "lake/*/*.parquet", "lak*", "lak*/day=1"):
        with pytest.raises(TableError, match="Delta table"):
            users_of(tmp_path, inputs__users=path)


@pytest.mark.parametrize("rows", [[0], [1, 4], [0, 1, 2, 3, 4, 5]])
def test_rows_deleted_by_vectors_are_not_read(nightshelf, tmp_path, rows):
    write_inputs(tmp_path)
    root = tmp_path / "a lake"
    write(root, users(0, 6))
    write(root, users(6, 2), mode="append")
    delete_by_vector(root, adds(root)[0], rows)
    want = [f"u{at:03d}" for at in range(8) if at not in rows]
    assert [row["user_id"] for row in users_of(tmp_path, inputs__users="a lake")] == want
    nightshelf("run", config_of(tmp_path, inputs__users={"delta": "a lake"}))
    assert sorted(set(published(tmp_path)["user_id"])) == want
    with pytest.raises(TableError, match="files of the Delta table are not its rows"):
        list_parquet(str(root), "truth")


def test_columns_that_were_added_later_are_null_before(tmp_path):
    write_inputs(tmp_path)
    write(tmp_path / "lake", users(0, 1))
    write(tmp_path / "lake", users(1, 1, city=["x"]), mode="append", schema_mode="merge")
    read = users_of(tmp_path, inputs__users="lake", prompt__template="{city}{history}")
    assert [row["city"] for row in read] == [None, "x"]


def test_names_that_are_mapped_are_read_or_refused(tmp_path):
    write_inputs(tmp_path)
    for mode in ("name", "id"):
        root = tmp_path / mode
        write(root, pa.table({"a": ["u1"], "b": [["i001"]]}))
        map_names(root, mode)
    read = users_of(tmp_path, inputs__users="name")
    assert read == [{"user_id": "u1", "history": ["i001"]}]
    with pytest.raises(TableError, match="feature.*column mapping by id"):
        users_of(tmp_path, inputs__users="id")


def test_a_table_that_was_emptied_is_empty(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    write(tmp_path / "lake", tables["exclusions"])
    nightshelf("run", config_of(tmp_path, inputs__exclusions=None))
    want = published(tmp_path)
    deltalake.DeltaTable(str(tmp_path / "lake")).delete()
    shutil.rmtree(tmp_path / "out")
    nightshelf("run", config_of(tmp_path, inputs__exclusions={"delta": "lake"}))
    assert published(tmp_path).equals(want)
    deltalake.write_deltalake(str(tmp_path / "no users"), users(0, 2))
    deltalake.DeltaTable(str(tmp_path / "no users")).delete()
    err = nightshelf("run", config_of(tmp_path, inputs__users="no users"), check=3).err
    assert "users: the table is empty" in err


@pytest.mark.parametrize("name", ["catalog", "candidates", "exclusions"])
def test_every_table_may_be_a_delta_table(nightshelf, tmp_path, name):
    tables = write_inputs(tmp_path)
    nightshelf("run", write_config(tmp_path))
    want = published(tmp_path)
    half = len(tables[name]) // 2
    write(tmp_path / "lake", tables[name].slice(0, half))
    write(tmp_path / "lake", tables[name].slice(half), mode="append")
    extra = tables[name].slice(0, 1)
    write(tmp_path / "lake", extra, mode="append")
    delete_by_vector(tmp_path / "lake", adds(tmp_path / "lake")[-1], [0])
    shutil.rmtree(tmp_path / "out")
    nightshelf("run", write_config(tmp_path, **{f"inputs__{name}": {"delta": "lake"}}))
    assert published(tmp_path).equals(want)


def test_a_copy_is_made_once_and_again_when_it_is_damaged(tmp_path):
    write_inputs(tmp_path)
    write(tmp_path / "lake", users(0, 6, country=["a", "b"] * 3), partition_by=["country"])
    changes = {"inputs__users": "lake", "prompt__template": "{country}"}
    config = load_config(config_of(tmp_path, **changes))
    first = plan_run(config)
    paths = [Path(file.path) for file in first.inputs["users"].files]
    stamps = [path.stat().st_mtime_ns for path in paths]
    assert plan_run(config) == first
    assert [path.stat().st_mtime_ns for path in paths] == stamps
    good = paths[0].read_bytes()
    paths[0].write_bytes(good[:-9] + b"x" + good[-8:])
    assert plan_run(config).run_id == first.run_id
    assert paths[0].read_bytes() == good
    shutil.rmtree(tmp_path / "runs")
    assert plan_run(config).run_id == first.run_id


def test_what_is_no_delta_table_is_named(nightshelf, tmp_path):
    write_inputs(tmp_path)
    (tmp_path / "plain").mkdir()
    for source in ({"delta": "plain"}, {"delta": "nowhere"}):
        err = nightshelf("run", config_of(tmp_path, inputs__users=source), check=3).err
        assert "the Delta table cannot be opened" in err
    (tmp_path / "broken/_delta_log").mkdir(parents=True)
    (tmp_path / "broken/_delta_log" / f"{0:020d}.json").write_text("{")
    err = nightshelf("run", config_of(tmp_path, inputs__users="broken"), check=3).err
    assert "Delta" in err
    (tmp_path / "hudi/.hoodie").mkdir(parents=True)
    err = nightshelf("run", config_of(tmp_path, inputs__users="hudi"), check=3).err
    assert "Hudi table, which is not read" in err


@pytest.mark.parametrize(
    ("source", "words"),
    [({"delta": "x", "version": -1}, "version must be"), ({"delta": "x", "verson": 1}, "no key"),
     ({"delta": 3}, "delta must be"), ({}, "must be a path"), ({"iceberg": ""}, "iceberg must"),
     ({"delta": "x", "version": True}, "version must be"), ({"path": "x", "hive": 3}, "hive must"),
     ({"path": "x", "hive": {"a": "money"}}, "hive must"), ({"delta": "s3:/x"}, "no place"),
     ({"iceberg": "x", "snapshot": "12"}, "snapshot must be"),
     ({"iceberg": "x", "catalog": [1]}, "catalog must be")],
)  # fmt: skip
def test_settings_of_an_input_are_checked(nightshelf, tmp_path, source, words):
    err = nightshelf("plan", config_of(tmp_path, inputs__users=source), check=2).err
    assert "inputs.users" in err
    assert words in err


# --- Iceberg --------------------------------------------------------------------------------------


@pytest.fixture
def lake(tmp_path):
    from pyiceberg.catalog import load_catalog

    properties = {
        "name": "lake",
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"file://{tmp_path}/warehouse",
    }
    catalog = load_catalog(**properties)
    catalog.create_namespace("db")
    return catalog, properties


@pytest.mark.parametrize("change", ["overwrite", "delete", "append", "rename", "add", "promote"])
@pytest.mark.parametrize("form", ["path", "iceberg", "name", "metadata"])
def test_the_live_rows_of_an_iceberg_table_are_read(nightshelf, tmp_path, lake, change, form):
    catalog, properties = lake
    write_inputs(tmp_path)
    first = users(0, 6, age=pa.array(range(6), pa.int32()))
    table = catalog.create_table("db.users", schema=first.schema)
    table.append(first)
    more = users(10, 2, age=pa.array([1, 2], pa.int32()))
    if change == "overwrite":
        table.overwrite(more)
    elif change == "delete":
        table.delete("user_id = 'u001'")
    elif change == "append":
        table.append(more)
    else:
        with table.update_schema() as update:
            if change == "rename":
                update.rename_column("age", "years")
            elif change == "add":
                from pyiceberg.types import StringType

                update.add_column("city", StringType())
            else:
                from pyiceberg.types import LongType

                update.update_column("age", field_type=LongType())
        table.append(table.scan(limit=0).to_arrow().schema.empty_table())
    table = catalog.load_table("db.users")
    root = table.metadata.location.removeprefix("file://")
    source = {
        "path": root,
        "iceberg": {"iceberg": root},
        "name": {"iceberg": "db.users", "catalog": properties},
        "metadata": {"iceberg": table.metadata_location},
    }[form]
    live = sorted(table.scan().to_arrow().to_pylist(), key=lambda row: row["user_id"])
    columns = [f.name for f in table.schema().fields if f.name not in ("user_id", "history")]
    template = " ".join(f"{{{name}}}" for name in columns) + "{history}"
    changes = {"inputs__users": source, "prompt__template": template, "prompt__null_text": "-"}
    read = users_of(tmp_path, **changes)
    assert [{n: row[n] for n in live[0]} for row in read] == live
    if form != "path":
        return
    nightshelf("run", config_of(tmp_path, **changes))
    assert set(published(tmp_path)["user_id"]) == {row["user_id"] for row in live}


def test_the_snapshot_is_part_of_the_run(tmp_path, lake):
    catalog, properties = lake
    write_inputs(tmp_path)
    table = catalog.create_table("db.users", schema=users(0, 1).schema)
    table.append(users(0, 6))
    first = catalog.load_table("db.users").current_snapshot().snapshot_id
    table.append(users(6, 2))
    source = {"iceberg": "db.users", "catalog": properties}

    def plan(**more):
        return plan_run(load_config(config_of(tmp_path, inputs__users={**source, **more})))

    assert plan(snapshot=first).inputs["users"].rows == 6
    assert plan().inputs["users"].rows == 8
    assert plan().inputs["users"].snapshot != plan(snapshot=first).inputs["users"].snapshot
    before = plan().run_id
    assert plan().run_id == before
    table.append(users(8, 2))
    assert plan().run_id != before
    with pytest.raises(TableError, match="no such snapshot"):
        plan(snapshot=1)


def test_a_partitioned_iceberg_table_is_read_whole_and_not_by_folder(tmp_path, lake):
    from pyiceberg.transforms import IdentityTransform

    catalog, _ = lake
    write_inputs(tmp_path)
    data = users(0, 4, country=["se", "se", "no", None])
    table = catalog.create_table("db.users", schema=data.schema)
    with table.update_spec() as spec:
        spec.add_field("country", IdentityTransform())
    table.append(data)
    root = table.metadata.location.removeprefix("file://")
    read = users_of(tmp_path, inputs__users=root, prompt__template="{country}")
    assert [row["country"] for row in read] == ["se", "se", "no", None]
    for path in ("data", "data/country=se", "data/*", "dat*/country=se/*.parquet"):
        with pytest.raises(TableError, match="Iceberg table"):
            users_of(tmp_path, inputs__users=f"{root}/{path}")


def test_a_copied_iceberg_table_is_refused(tmp_path, lake):
    catalog, _ = lake
    write_inputs(tmp_path)
    table = catalog.create_table("db.users", schema=users(0, 1).schema)
    table.append(users(0, 6))
    shutil.copytree(table.metadata.location.removeprefix("file://"), tmp_path / "copied")
    with pytest.raises(TableError, match="copied or moved"):
        users_of(tmp_path, inputs__users="copied")
    for name in ("nowhere", "db.nothing"):
        with pytest.raises(TableError, match="cannot be read|no Iceberg table"):
            users_of(tmp_path, inputs__users={"iceberg": name, "catalog": lake[1]})


def test_init_names_a_table_with_a_log_by_its_kind(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    write(tmp_path / "lake", tables["users"])
    write(tmp_path / "lake", tables["users"].slice(0, 9), mode="overwrite")
    target = tmp_path / "my.yaml"
    nightshelf("init", "--users", tmp_path / "lake", "--catalog", tmp_path / "catalog.parquet",
               "--config", target)  # fmt: skip
    assert 'users: {"delta": "lake"}' in target.read_text()
    assert "9 users" in target.read_text()
