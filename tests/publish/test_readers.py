"""What other programs read: polars, pyarrow, DuckDB, pyiceberg, deltalake; and what files say."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from polars.testing import assert_frame_equal

from pipelines.publish import open_table, publish_run
from tests.publish.runs import DS, config_of, expected, publish, staged_run

SURFACES = ("home", "feed home/eu")


@pytest.fixture
def hive(tmp_path):
    """A Parquet table of two surfaces, and the rows it should hold."""
    wanted = []
    for surface in SURFACES:
        config = config_of(tmp_path, "parquet", surface=surface)
        publish(config, "older")
        run = staged_run(config, "a" if surface == "home" else "b")
        publish_run(*run)
        columns = [pl.lit(DS).alias("ds"), pl.lit(surface).alias("surface")]
        wanted.append(expected(run).with_columns(columns))
    return tmp_path / "out", pl.concat(wanted).sort("surface", "user_id", "rank")


def same(got: pl.DataFrame, want: pl.DataFrame) -> None:
    got = got.with_columns(pl.col("ds").cast(pl.String), pl.col("surface").cast(pl.String))
    assert_frame_equal(got.select(want.columns).sort("surface", "user_id", "rank"), want)


def test_polars_reads_a_parquet_table(hive):
    root, want = hive
    same(pl.read_parquet(root, hive_partitioning=True), want)
    one = pl.read_parquet(root / f"ds={DS}" / "surface=home")
    assert len(one) == 36
    assert "007" in one["user_id"]


@pytest.mark.parametrize("text", [pa.string(), pa.large_string()], ids=str)
def test_pyarrow_reads_a_parquet_table(hive, text):
    """C18 (a partition column that clashed between string and large_string)."""
    root, want = hive
    same(pl.from_arrow(pq.read_table(root)), want)
    partitioning = ds.partitioning(pa.schema({"ds": text, "surface": text}), flavor="hive")
    same(pl.from_arrow(ds.dataset(root, partitioning=partitioning).to_table()), want)


def test_duckdb_reads_a_parquet_table(hive):
    duckdb = pytest.importorskip("duckdb")
    root, want = hive
    query = f"""
        SELECT * FROM read_parquet('{root}/**/*.parquet',
          hive_partitioning = true, hive_types = {{'ds': VARCHAR, 'surface': VARCHAR}})
    """
    same(pl.from_arrow(duckdb.sql(query).to_arrow_table()), want)


def test_an_empty_parquet_partition_has_its_columns(tmp_path):
    """C10. A folder without a file is an error for polars, and a table without columns for
    pyarrow."""
    config = config_of(tmp_path, "parquet")
    partition = publish(config, "none", users=0).partition
    assert pl.read_parquet(partition).columns == pq.read_table(partition).column_names[:7]
    assert pl.read_parquet(partition).schema["user_id"] == pl.String


def test_pyiceberg_reads_an_iceberg_table(tmp_path):
    from pyiceberg.catalog import load_catalog

    for surface in SURFACES:
        run = staged_run(config_of(tmp_path, "iceberg", surface=surface), "a")
        publish_run(*run)
    root = tmp_path / "out"
    catalog = load_catalog(
        "nightshelf", type="sql", uri=f"sqlite:///{root}/catalog.db", warehouse=f"file://{root}"
    )
    table = catalog.load_table("nightshelf.recommendations")
    rows = pl.from_arrow(table.scan("surface = 'feed home/eu'").to_arrow())
    assert_frame_equal(rows.drop("ds", "surface").sort("user_id", "rank"), expected(run))
    assert table.scan("surface = 'home' and user_id = '007'").to_arrow().num_rows == 3
    assert table.scan("ds is null or surface is null").to_arrow().num_rows == 0, "C31"
    assert [f.name for f in table.spec().fields] == ["ds", "surface"]
    assert table.current_snapshot().summary["nightshelf.run_id"] == run[0].run_id
    catalog.close()


def test_deltalake_reads_a_delta_table(tmp_path):
    from deltalake import DeltaTable

    for surface in SURFACES:
        run = staged_run(config_of(tmp_path, "delta", surface=surface), "a")
        publish_run(*run)
    table = DeltaTable(tmp_path / "out")
    rows = pl.from_arrow(table.to_pyarrow_table(filters=[("surface", "=", "feed home/eu")]))
    assert_frame_equal(rows.drop("ds", "surface").sort("user_id", "rank"), expected(run))
    assert table.metadata().partition_columns == ["ds", "surface"]
    assert table.history(1)[0]["nightshelf.run_id"] == run[0].run_id
    assert len(pl.read_delta(str(tmp_path / "out"))) == 72


def data_files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*.parquet") if "_delta_log" not in p.parts]


def test_files_serve_point_lookups(table_format, tmp_path):
    """Sorted by user, with statistics; row groups of a size for readers."""
    config = config_of(tmp_path, table_format)
    publish(config, "a", users=600, k=4, shards=1)
    (path,) = data_files(tmp_path / "out")
    found = pq.ParquetFile(path)
    users = found.read(columns=["user_id"])["user_id"].to_pylist()
    assert users == sorted(users)
    group = found.metadata.row_group(0)
    at = found.schema_arrow.names.index("user_id")
    assert (group.column(at).statistics.min, group.column(at).statistics.max) == ("000", "599")
    assert group.column(at).compression == "ZSTD"
    if table_format != "delta":  # delta-rs has no setting for it
        assert group.sorting_columns[0].column_index == at


def test_row_groups_of_vectors_are_small():
    from pipelines.publish.rows import rows_per_group
    from schemas.tables import embeddings_schema, recommendations_schema

    assert rows_per_group(embeddings_schema("string", 1024)) * 4096 <= 64 << 20
    assert rows_per_group(recommendations_schema("string", "string")) < 1_000_000


def test_an_unfinished_publish_is_no_part_of_a_table(table_format, tmp_path):
    """C31 (a zero-byte file that polars skips in silence; files that nobody committed)."""
    config = config_of(tmp_path, table_format)
    run = staged_run(config, "a")
    published = publish_run(*run)
    (tmp_path / "out" / "stray.parquet").write_bytes(b"")
    if table_format == "parquet":
        stray = Path(published.partition) / "part-00000001-2026-11-28-dead-00000.parquet"
        stray.write_bytes(b"")
        notes = tmp_path / "out.current" / f"ds={DS}" / "surface=home"
        note = notes / "00000001-dead.writing.json"  # which a publish leaves before its first file
        note.write_text(json.dumps({"stem": "part-00000001-2026-11-28-dead"}))
        publish_run(*run)
        assert not stray.exists(), "and is removed by the next publish"
    rows = pl.from_arrow(open_table(config).read())
    assert len(rows) == 36
