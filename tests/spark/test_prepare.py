"""Prepare in executors writes the files of the local one; tables of Spark's catalog are inputs."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.spark import tables as spark_tables
from jobs.spark.prepare import prepare_on_executors
from pipelines.inputs.prepare import prepare_run, shard_of
from pipelines.planning.plan import plan_run
from schemas.config_file import load_config
from schemas.errors import RunError, StorageError
from tests.cases.helpers import published, write
from tests.factories import write_config, write_inputs
from tests.spark.helpers import clear, shard_bytes

ON_EXECUTORS = ("--launcher", "spark", "--set", "spark.prepare=executors")


def prepared(folder, config, spark=None, part_bytes=64 << 20) -> dict[str, bytes]:
    """The files that prepare writes, here or by Spark."""
    clear(folder)
    plan = plan_run(load_config(config))
    if spark is None:
        prepare_run(plan)
    else:
        prepare_on_executors(spark, plan, part_bytes)
    return shard_bytes(folder)


def test_sparks_hash_puts_users_where_ours_does(spark):
    ids = ["u1", "", "007", "été", "𐍈", "a" * 1000, "user with spaces", "-1", str(2**62)]
    frame = spark.createDataFrame([(one,) for one in ids], "id string")
    rows = frame.selectExpr("id", "pmod(xxhash64(id), 1009) as shard").collect()
    want = dict(zip(ids, shard_of(ids, 1009).tolist(), strict=True))
    assert {row.id: row.shard for row in rows} == want
    assert len(set(want.values())) == len(ids)


@pytest.mark.parametrize("int_ids", [False, True])
def test_the_shards_are_the_same_bytes(spark, tmp_path, int_ids):
    """Many small parts, whose chunks come together in any order."""
    tables = write_inputs(tmp_path, num_users=80, int_ids=int_ids)
    users = tables["users"]
    (tmp_path / "users.parquet").unlink()
    (tmp_path / "users.parquet").mkdir()
    twice = pa.concat_tables([users.slice(0, 50), users.slice(3, 2)])
    wider = users.slice(50)
    vectors = wider["embedding"].cast(pa.list_(pa.float64()))
    wider = wider.set_column(1, "embedding", vectors)
    pq.write_table(twice, tmp_path / "users.parquet/a.parquet")
    pq.write_table(wider, tmp_path / "users.parquet/b.parquet")
    config = write_config(tmp_path, run__shard_users=16)
    want = prepared(tmp_path, config)
    assert len(want) == 6
    before = spark.conf.get("spark.sql.adaptive.coalescePartitions.enabled")
    assert prepared(tmp_path, config, spark, part_bytes=1000) == want
    assert spark.conf.get("spark.sql.adaptive.coalescePartitions.enabled") == before


def test_candidates_of_every_shape_are_the_same_bytes(spark, tmp_path):
    tables = write_inputs(tmp_path, num_users=30)
    wide = pl.from_arrow(tables["candidates"])
    assert isinstance(wide, pl.DataFrame)
    long = wide.explode("item_ids").rename({"item_ids": "item_id"})
    stray = pl.DataFrame({"user_id": ["nobody"], "item_id": ["i001"]})
    shapes = {
        "long": pl.concat([long.sample(fraction=1.0, shuffle=True, seed=3), stray]),
        "segment": pl.DataFrame(
            {"segment": ["s0", "s1"], "item_ids": [["i001"], ["i002", "i003"]]}
        ),
        "shared": pl.DataFrame({"item_id": ["i004", "i005"]}),
    }
    for shape, frame in shapes.items():
        write(tmp_path, "candidates", frame.to_arrow())
        config = write_config(tmp_path)
        want = prepared(tmp_path, config)
        assert prepared(tmp_path, config, spark, part_bytes=500) == want, shape


def test_a_user_with_100k_candidates_only_makes_its_shard_larger(nightshelf, spark, tmp_path):
    """Skew: nothing is grouped by user in Spark, and nothing waits for one user."""
    write_inputs(tmp_path, num_users=12)
    rng = np.random.default_rng(0)
    many = {
        "user_id": ["u003"] * 100_000,
        "item_id": [f"i{i:03d}" for i in rng.integers(0, 60, 100_000)],
    }
    few = {"user_id": [f"u{u:03d}" for u in range(12)], "item_id": ["i007"] * 12}
    write(tmp_path, "candidates", pa.concat_tables([pa.table(many), pa.table(few)]))
    config = write_config(tmp_path, task={"k": 5, "score": {}}, run__shard_users=3)
    want = prepared(tmp_path, config)
    assert prepared(tmp_path, config, spark, part_bytes=10_000) == want
    clear(tmp_path)
    summary = nightshelf("run", config, *ON_EXECUTORS, "--output", "json").json
    assert summary["candidates_in"] == 100_012
    assert summary["users_recommended"] + summary["users_without_eligible"] == 12


def test_a_whole_run_on_executors_publishes_the_same_rows(nightshelf, spark, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    want = published(tmp_path)
    clear(tmp_path)
    nightshelf("run", config, *ON_EXECUTORS)
    assert published(tmp_path).equals(want)


@pytest.fixture
def catalog_tables(spark, tmp_path):
    """The inputs as tables of Spark's catalog; they go after the test."""
    tables = write_inputs(tmp_path)
    spark.sql("create database if not exists db")
    for name in tables:
        spark.sql(f"drop table if exists db.{name}")
        spark.read.parquet(f"file://{tmp_path}/{name}.parquet").write.saveAsTable(f"db.{name}")
    yield tables
    spark.sql("drop database db cascade")


def test_tables_of_sparks_catalog_are_inputs(nightshelf, spark, catalog_tables, tmp_path):
    local = write_config(tmp_path)
    nightshelf("run", local)
    want = published(tmp_path)
    clear(tmp_path)
    inputs = {name: {"table": f"db.{name}"} for name in catalog_tables}
    config = write_config(tmp_path, inputs=inputs)
    first = nightshelf("run", config, *ON_EXECUTORS, "--output", "json").json
    assert published(tmp_path).equals(want)
    again = nightshelf("run", config, "--launcher", "spark", "--output", "json")
    assert again.json["run_id"] == first["run_id"], "the same content is the same run"
    assert "4 of 4 shards are done already" in again.err
    extra = {"user_id": ["zz"], "embedding": [[0.0] * 4], "history": [["i001"]], "segment": ["s0"]}
    write(tmp_path, "more", extra)
    more = spark.read.parquet(f"file://{tmp_path}/more.parquet")
    more.selectExpr("user_id", "cast(embedding as array<float>) embedding", "history", "segment")\
        .write.insertInto("db.users")  # fmt: skip
    third = nightshelf("run", config, "--launcher", "spark", "--output", "json").json
    assert third["run_id"] != first["run_id"]
    assert third["users_in"] == 41
    copies = {p.name for p in (tmp_path / "runs/tables").iterdir()}
    assert len(copies) == 5, "users twice, the others once"
    for folder in (Path(first["run_dir"]), tmp_path / "runs/tables"):
        last_written_days_ago(folder, 10)
    left = ("--keep", "0", "--older-than-days", "5", "--output", "json")
    removed = {r["run_id"] for r in nightshelf("gc", config, *left).json["removed"]}
    (gone,) = copies - {p.name for p in (tmp_path / "runs/tables").iterdir()}
    assert gone.startswith("db.users-"), "the run that is not idle has shards of the others"
    assert removed == {first["run_id"], f"tables/{gone}"}
    left = ("--keep", "0", "--older-than-days", "0", "--output", "json")
    removed = {r["run_id"] for r in nightshelf("gc", config, *left).json["removed"]}
    assert removed == {third["run_id"], *(f"tables/{name}" for name in copies - {gone})}
    assert (Path(third["run_dir"]) / "staged").exists(), "it is published"
    want = published(tmp_path)
    nightshelf("run", config, "--launcher", "spark")
    assert published(tmp_path).equals(want), "copied anew"


def last_written_days_ago(folder, days):
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (time.time() - days * 86400,) * 2)


def users_table(tmp_path):
    return load_config(write_config(tmp_path, inputs__users={"table": "db.users"}))


def test_runs_that_copy_a_table_at_once_read_one_whole_copy(
    spark, catalog_tables, tmp_path, monkeypatch
):
    """None of them removes or names the files of another."""
    config = users_table(tmp_path)
    found = spark_tables._copy_of
    waiting = Barrier(2)

    def looked_at_once(folder):
        done = found(folder)
        if done is None:
            waiting.wait(60)
        return done

    monkeypatch.setattr(spark_tables, "_copy_of", looked_at_once)
    with ThreadPoolExecutor(2) as pool:
        copies = list(pool.map(lambda _: spark_tables.copy_tables(spark, config), range(2)))
    (folder,) = {copy.inputs.users for copy in copies}
    (outer,) = (tmp_path / "runs/tables").iterdir()
    done = json.loads((outer / "_done").read_text())
    assert Path(folder) == outer / done["folder"]
    assert done["rows"] == pq.read_table(folder).num_rows == 40
    assert {p.name for p in outer.rglob("*.parquet")} == set(done["parts"]), (
        "the loser removed its own"
    )


def test_of_a_copy_only_named_files_are_used(spark, catalog_tables, tmp_path):
    config = users_table(tmp_path)
    folder = Path(spark_tables.copy_tables(spark, config).inputs.users)
    outer = folder.parents[1]
    part = next(folder.glob("*.parquet"))
    (folder / "part-00000-99999.parquet").write_bytes(part.read_bytes())
    unfinished = outer / "another/part-00000-1.parquet"
    unfinished.parent.mkdir()
    unfinished.write_bytes(part.read_bytes())
    assert spark_tables.copy_tables(spark, config).inputs.users == str(folder)
    assert pq.read_table(folder).num_rows == 40
    assert unfinished.exists(), "another run may be writing it"
    part.unlink()
    with pytest.raises(StorageError, match="lacks files"):
        spark_tables.copy_tables(spark, config)


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda was: replace(was, rows=41), "expected 41 rows, got 40 rows"),
        (
            lambda was: replace(was, mixed=was.mixed ^ 1),
            "expected 40 rows, got 40 rows, with other",
        ),
        (
            lambda was: replace(was, total=was.total ^ 1),
            "expected 40 rows, got 40 rows, with other",
        ),
    ],
    ids=["a row less", "another row", "a row twice"],
)
def test_a_table_that_changes_while_it_is_copied_is_told(
    spark, catalog_tables, tmp_path, monkeypatch, change, words
):
    config = users_table(tmp_path)
    content = spark_tables.Content.of_frame
    with monkeypatch.context() as patch:
        patch.setattr(spark_tables.Content, "of_frame", lambda frame: change(content(frame)))
        with pytest.raises(RunError, match=words) as caught:
            spark_tables.copy_tables(spark, config)
    assert caught.value.exit_code == 4
    assert not list((tmp_path / "runs/tables").rglob("*.parquet"))
    folder = spark_tables.copy_tables(spark, config).inputs.users
    assert pq.read_table(folder).num_rows == 40


def test_a_table_needs_spark_and_must_be_there(nightshelf, spark, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, inputs__users={"table": "db.nowhere"})
    done = nightshelf("run", config, check=2)
    assert "inputs.users is a table of Spark's catalog" in done.err
    assert "--launcher spark" in done.err
    done = nightshelf("plan", config, "--launcher", "spark", check=3)
    assert "Spark cannot read table 'db.nowhere'" in done.err
    assert "TABLE_OR_VIEW_NOT_FOUND" in done.err
    config = write_config(tmp_path, inputs__users={"tabel": "db.users"})
    assert "{table: NAME}" in nightshelf("plan", config, check=2).err


def test_spark_reads_what_is_published(nightshelf, spark, tmp_path):
    write_inputs(tmp_path)
    spark.sql("create database if not exists shelves")
    try:
        config = write_config(
            tmp_path, surface="home/eu 'x'", spark__register_table="shelves.recommendations"
        )
        for ds in ("2026-11-27", "2026-11-28", "2026-11-28"):
            nightshelf("run", config, "--launcher", "spark", "--ds", ds)
        rows = spark.read.parquet(f"file://{tmp_path}/out")
        counts = {str(r.ds): r["count"] for r in rows.groupBy("ds").count().collect()}
        table = spark.table("shelves.recommendations")
        assert table.schema["ds"].dataType.simpleString() == "string"
        assert {r.surface for r in table.select("surface").distinct().collect()} == {"home/eu 'x'"}
        assert {r.ds: r["count"] for r in table.groupBy("ds").count().collect()} == counts
        assert set(counts) == {"2026-11-27", "2026-11-28"}
        first = table.where("user_id = 'u003' and ds = '2026-11-28'").orderBy("rank").collect()
        shown = nightshelf("show", config, "--user", "u003", "--output", "json").json
        assert [r.item_id for r in first] == [r["item_id"] for r in shown["items"]]
    finally:
        spark.sql("drop database shelves cascade")
