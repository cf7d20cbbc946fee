"""Tables of Spark's catalog: which content is the same, what is copied, and what is registered."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.spark import tables as spark_tables
from jobs.spark.content import Content
from schemas.config_file import load_config
from tests.factories import write_config, write_inputs

ON_SPARK = ("--launcher", "spark")

# Each: SQL of rows over one schema, all of them different tables.
DIFFERENT = {
    "a list moved to the next column": [
        "select array('a') x, array() y", "select array() x, array('a') y",
        "select array() x, array() y", "select null x, array('a') y",
    ],
    "null, empty and nulls in a list": [
        "select cast(null as array<string>) x", "select cast(array() as array<string>) x",
        "select array('a') x", "select array('a', cast(null as string)) x",
        "select array(cast(null as string), 'a') x", "select array(cast(null as string)) x",
        "select array('a', '') x", "select array('a', '', cast(null as string)) x",
    ],
    "a text moved between columns": [
        "select 'a' x, cast(null as string) y", "select cast(null as string) x, 'a' y",
        "select '' x, 'a' y", "select 'a' x, '' y", "select 'ab' x, '' y", "select 'a' x, 'b' y",
    ],
    "numbers": [
        "select cast(0.0 as double) x, array(cast(0.0 as float)) y",
        "select cast(-0.0D as double) x, array(cast(0.0 as float)) y",
        "select cast(0.0 as double) x, array(cast(-0.0D as float)) y",
        "select cast('nan' as double) x, array(cast(0.0 as float)) y",
        "select cast(null as double) x, array(cast(0.0 as float)) y",
    ],
    "lists of lists": [
        "select array(array('a'), array('b')) x", "select array(array('a', 'b')) x",
        "select array(array('a', 'b'), array()) x", "select array(array(), array('a', 'b')) x",
        "select array(array('ab')) x", "select array(array('a:b')) x",
        "select array(array('a', 'b'), null) x", "select cast(null as array<array<string>>) x",
    ],
    "structures and maps": [
        "select named_struct('a', 1, 'b', null) x, map('k', 1) y",
        "select named_struct('a', null, 'b', 1) x, map('k', 1) y",
        "select null x, map('k', 1) y", "select named_struct('a', 1, 'b', null) x, map() y",
        "select named_struct('a', 1, 'b', null) x, map('k', null) y",
        "select named_struct('a', 1, 'b', null) x, null y",
        "select named_struct('a', null, 'b', null) x, map('k', 1) y",
    ],
    "rows": [
        "select 'a' x", "select 'a' x union all select 'a' x",
        "select 'a' x union all select 'b' x", "select 'a' x where false",
        "select explode(array('a', 'a', 'b')) x", "select explode(array('a', 'b', 'b')) x",
    ],
    "text of another collation": [
        "select 'a' collate UTF8_LCASE x", "select 'A' collate UTF8_LCASE x",
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
def test_tables_that_differ_have_different_digests(spark, what):
    union = " union all ".join(f"({one})" for one in DIFFERENT[what])
    schema = spark.sql(union).schema
    contents = [_content(spark, one, schema) for one in DIFFERENT[what]]
    for one, other in itertools.combinations(range(len(contents)), 2):
        assert contents[one].digest("s") != contents[other].digest("s"), (
            DIFFERENT[what][one], DIFFERENT[what][other],
        )  # fmt: skip
        for seed in range(2):  # each of the two hashes alone tells them apart
            assert _of_seed(contents[one], seed) != _of_seed(contents[other], seed)


def _content(spark, query, schema):
    typed = spark.createDataFrame([], schema).union(spark.sql(query))
    return Content.of_frame(typed)


def _of_seed(content, seed):
    part = [value >> 64 if seed else value % (1 << 64) for value in (content.mixed, content.total)]
    return content.rows, *part


def test_the_digest_is_of_the_rows_in_any_order_and_zone(spark):
    rows = "select * from values (timestamp_micros(1), array('a')), (null, array()) as t(x, y)"
    one = Content.of_frame(spark.sql(rows))
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        assert Content.of_frame(spark.sql(rows).orderBy("x")) == one
        assert Content.of_frame(spark.sql(rows).repartition(7)) == one
    finally:
        spark.conf.unset("spark.sql.session.timeZone")


@pytest.fixture
def database(spark):
    spark.sql("create database if not exists db")
    yield "db"
    spark.sql("drop database db cascade")


def test_an_instant_is_copied_in_utc_whatever_the_session(spark, database, tmp_path):
    """One text for a prompt, and one copy for every session."""
    write_inputs(tmp_path)
    spark.sql(
        "create table db.users as select 'u' user_id, timestamp '2026-11-28 12:00:00+00:00' seen, "
        "array(1.0f, 2.0f, 3.0f, 4.0f) embedding, array('i001') history, "
        "array(timestamp '2026-11-28 12:00:00+00:00') extra"
    )
    path = write_config(
        tmp_path,
        inputs__users={"table": "db.users"},
        prompt__template="{text:seen}{history}{user_vector}",
    )
    config = load_config(path)
    found = {}
    for zone in ("Asia/Tokyo", "America/New_York", "UTC"):
        spark.conf.set("spark.sql.session.timeZone", zone)
        try:
            shutil.rmtree(tmp_path / "runs", ignore_errors=True)
            folder = spark_tables.copy_tables(spark, config).inputs.users
        finally:
            spark.conf.unset("spark.sql.session.timeZone")
        table = pq.read_table(folder)
        found[zone] = (Path(folder).name, str(table.schema.field("seen").type))
        assert table["seen"].to_pylist()[0].isoformat() == "2026-11-28T12:00:00+00:00"
    assert len(set(found.values())) == 1, found
    assert found["UTC"][1] == "timestamp[us, tz=UTC]"


def test_a_table_without_rows_is_said_to_have_none(nightshelf, spark, database, tmp_path):
    write_inputs(tmp_path)
    spark.read.parquet(f"file://{tmp_path}/users.parquet").limit(0).write.saveAsTable("db.users")
    spark_config = write_config(tmp_path, inputs__users={"table": "db.users"})
    done = nightshelf("run", spark_config, *ON_SPARK, check=None)
    empty = tmp_path / "users.parquet"
    pq.write_table(pq.read_table(empty).slice(0, 0), empty)
    local = nightshelf("run", write_config(tmp_path), check=None)
    assert "nothing is at the path" not in done.err
    assert done.code == local.code


def test_a_column_in_capitals_gets_a_hint(nightshelf, spark, database, tmp_path):
    write_inputs(tmp_path)
    users = spark.read.parquet(f"file://{tmp_path}/users.parquet")
    users.withColumnRenamed("user_id", "USER_ID").write.saveAsTable("db.users")
    config = write_config(tmp_path, inputs__users={"table": "db.users"})
    for command in ("validate", "run"):
        done = nightshelf(command, config, *ON_SPARK, "--output", "json", check=3)
        assert "column 'user_id' is missing" in done.out
        assert "did you mean 'USER_ID'?" in done.out


def published_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.parquet")}


TABLES = {
    "managed": "create table db.shelf (user_id string, ds string, surface string) "
    "using parquet partitioned by (ds, surface)",
    "elsewhere": "create table db.shelf (user_id string, ds string, surface string) "
    "using parquet partitioned by (ds, surface) location 'file://{folder}/other'",
    "not partitioned": "create table db.shelf (user_id string) using parquet "
    "location 'file://{folder}/out'",
    "other partitions": "create table db.shelf (user_id string, surface string, ds string) "
    "using parquet partitioned by (surface, ds) location 'file://{folder}/out'",
    "other format": "create table db.shelf (user_id string, ds string, surface string) "
    "using csv partitioned by (ds, surface) location 'file://{folder}/out'",
    "view": "create view db.shelf as select 'a' user_id, 'b' ds, 'c' surface",
}


@pytest.mark.parametrize("what", TABLES)
@pytest.mark.parametrize("command", ["validate", "plan", "run"])
def test_another_table_is_refused_before_anything_is_scored(
    nightshelf, spark, database, tmp_path, what, command
):
    write_inputs(tmp_path)
    spark.sql(TABLES[what].format(folder=tmp_path))
    config = write_config(tmp_path, spark__register_table="db.shelf")
    done = nightshelf(command, config, *ON_SPARK, "--output", "json", check=3)
    assert "'db.shelf' is another table" in done.out
    assert "an external Parquet table at" in done.out
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").rglob("*.parquet"))
    assert not list((tmp_path / "runs").rglob("receipts"))


def test_a_table_that_became_managed_meanwhile_loses_nothing(spark, database, nightshelf, tmp_path):
    """Also where the check before the run saw nothing: no statement of ours removes files."""
    from jobs.running.run_folder import load_plan
    from jobs.spark.register import register
    from schemas.errors import TableError

    write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    (folder,) = (p.parent for p in tmp_path.glob("runs/*/plan.json"))
    before = published_files(tmp_path / "out")
    spark.sql(TABLES["managed"])
    with pytest.raises(TableError, match="MANAGED"):
        register(spark, load_plan(str(folder)), "db.shelf")
    assert published_files(tmp_path / "out") == before


def test_a_table_that_came_after_the_plan_is_told_with_what_is_published(
    spark, database, nightshelf, tmp_path, monkeypatch
):
    """Nothing that a rerun would mend: the exit code is the table's, and the rows are there."""
    from jobs.spark import launch as launch_spark

    write_inputs(tmp_path)
    spark.sql(TABLES["managed"])
    config = write_config(tmp_path, spark__register_table="db.shelf")
    monkeypatch.setattr(launch_spark, "check_registration", lambda *_: None)
    done = nightshelf("run", config, *ON_SPARK, check=3)
    assert "the run is published, but its table in another catalog was not told" in done.err
    assert "MANAGED" in done.err
    assert published_files(tmp_path / "out")


def test_registering_a_date_again_changes_no_file(spark, database, nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, spark__register_table="db.shelf")
    nightshelf("run", config, *ON_SPARK)
    rows = spark.table("db.shelf").count()
    before = published_files(tmp_path / "out")
    # Somebody points the partition elsewhere: the next publish says where it is.
    spark.sql(
        "alter table db.shelf partition (ds = '2026-11-28', surface = 'home') "
        f"set location 'file://{tmp_path}/nowhere'"
    )
    assert spark.table("db.shelf").count() == 0
    nightshelf("run", config, *ON_SPARK)
    assert published_files(tmp_path / "out") == before
    assert spark.table("db.shelf").count() == rows > 0


def test_a_database_that_is_not_there_is_told_by_plan(nightshelf, spark, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, spark__register_table="nowhere.shelf")
    done = nightshelf("plan", config, *ON_SPARK, check=3)
    assert "there is no database 'nowhere'" in done.err


@pytest.mark.parametrize("command", ["validate", "plan", "run"])
def test_a_table_that_is_not_there_is_named(nightshelf, spark, database, tmp_path, command):
    write_inputs(tmp_path)
    config = write_config(tmp_path, inputs__users={"table": "db.nobody"})
    done = nightshelf(command, config, *ON_SPARK, "--output", "json", check=3)
    assert "cannot read table 'db.nobody'" in done.out
    done = nightshelf(command, config, "--output", "json", check=2)
    assert "is a table of Spark's catalog" in done.out
