"""What every table format does: one set of rows per date and surface, whatever was there."""

from __future__ import annotations

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from pipelines.publish import open_table, publish_run
from schemas.errors import ConfigError, StorageError
from tests.publish.runs import config_of, expected, publish, read, staged_run

AWKWARD = [
    "feed home/eu",
    "it's \"quoted\" -- ' OR 1=1",
    "100% ünï\\ñ日本 a=b&c?d#e*[f]",
    "a surface with a name of more than thirty-two characters, the first of them",
    "a surface with a name of more than thirty-two characters, the first of them, 2",
]


def test_a_run_published_twice_is_there_once(table_format, tmp_path):
    """C7 (a second overwrite appended) and C14 (an overwriting transaction appended)."""
    config = config_of(tmp_path, table_format)
    run = staged_run(config, "a")
    first = publish_run(*run)
    second = publish_run(*run)
    assert second == first, "the second time nothing is done"
    assert_frame_equal(read(config), expected(run))
    assert first.rows == 36
    assert first.run_id == run[0].run_id
    assert open_table(config).current() == first
    assert len(open_table(config).history()) == 1


def test_a_new_run_over_an_old_date_replaces_its_rows(table_format, tmp_path):
    """C11 (a rerun doubled rows of a partition), three times over two days."""
    config, other_day = (config_of(tmp_path, table_format, ds=f"2026-11-{d}") for d in (28, 29))
    kept = staged_run(other_day, "other")
    publish_run(*kept)
    for name in ("a", "b", "a"):
        run = staged_run(config, name, users=9 if name == "b" else 12)
        published = publish_run(*run)
        assert_frame_equal(read(config), expected(run))
        assert published.run_id == run[0].run_id
    assert_frame_equal(read(other_day), expected(kept))
    names = [p.run_id.rpartition("-")[2] for p in open_table(config).history()]
    assert names == ["a", "b", "a"]


@pytest.mark.parametrize("surface", AWKWARD)
def test_surfaces_are_apart_whatever_their_names(table_format, tmp_path, surface):
    """C15 (a partition value with a space and a slash)."""
    config, plain = (config_of(tmp_path, table_format, surface=s) for s in (surface, "home"))
    runs = {name: staged_run(plain, name) for name in ("a", "b")}
    publish_run(*runs["a"])
    for name in ("c", "d"):
        run = staged_run(config, name)
        publish_run(*run)
        assert_frame_equal(read(config), expected(run))
        assert_frame_equal(read(plain), expected(runs["a"]))
    publish_run(*runs["b"])
    assert_frame_equal(read(config), expected(run))
    if table_format != "parquet":
        rows = pl.from_arrow(open_table(config).read())
        assert rows["surface"].unique().to_list() == [surface]
        assert rows["ds"].unique().to_list() == ["2026-11-28"]


def test_an_empty_result_clears_the_partition(table_format, tmp_path):
    """C10 (a partition without new rows kept the old ones) and C12 (the first write into an empty
    partitioned table failed)."""
    config = config_of(tmp_path, table_format)
    empty = publish(config, "none", users=0)
    assert empty.rows == 0
    assert len(read(config)) == 0
    publish(config, "a")
    assert len(read(config)) == 36
    again = publish(config, "none", users=0)
    assert (again.rows, again.run_id) == (0, empty.run_id)
    assert len(read(config)) == 0
    assert read(config).schema["user_id"] == pl.String
    assert publish(config, "none", users=0) == again, "and is known as published"


@pytest.mark.parametrize("int_ids", [True, False], ids=["int64", "string"])
def test_ids_keep_their_type(table_format, tmp_path, int_ids):
    """C17 ("007" became 7) and C31 (large numbers that went through a float)."""
    config = config_of(tmp_path, table_format)
    run = staged_run(config, "a", int_ids=int_ids)
    publish_run(*run)
    rows = read(config)
    assert rows.schema["user_id"] == rows.schema["item_id"] == (pl.Int64 if int_ids else pl.String)
    assert rows["user_id"][21] == (7 if int_ids else "007")
    one = open_table(config).read(user_id=7 if int_ids else "007", shard=1)
    assert one.num_rows == 3


def test_the_wide_layout_and_labels(table_format, tmp_path):
    task = {"k": 5, "label": {"labels": ["yes", "no"]}}
    config = config_of(tmp_path, table_format, task=task, output={"layout": "wide"})
    run = staged_run(config, "a")
    published = publish_run(*run)
    assert published.rows == 12
    rows = read(config)
    assert rows["user_id"].to_list() == [f"{u:03d}" for u in range(12)]
    long = rows.explode("items").unnest("items").sort("user_id", "score", descending=[False, True])
    columns = ["user_id", "item_id", "score", "labels"]
    assert_frame_equal(long.select(columns), expected(run).select(columns))
    assert publish_run(*run) == published
    assert publish(config, "none", users=0).rows == 0


def test_embeddings(table_format, tmp_path):
    config = config_of(tmp_path, table_format, task={"embed": {}})
    for name in ("a", "b"):
        run = staged_run(config, name)
        publish_run(*run)
        rows = read(config)
        assert rows["embedding"].to_list() == expected(run)["embedding"].to_list()
        assert rows["run_id"].unique().to_list() == [run[0].run_id]


def test_tasks_with_and_without_labels_share_a_table(table_format, tmp_path):
    plain = config_of(tmp_path, table_format)
    labels = config_of(
        tmp_path, table_format, surface="mail", task={"label": {"labels": ["yes", "no"]}}
    )
    for first, second in ((plain, labels), (labels, plain)):
        publish(first, "a")
        publish(second, "b")
    assert len(read(plain)) == len(read(labels)) == 36
    assert read(labels)["labels"][0].to_list()[0]["label"] == "yes"


@pytest.mark.parametrize("table_format", ["iceberg", "delta"])  # Parquet files have no table
@pytest.mark.parametrize("other", ["ids", "layout"])
def test_a_table_of_other_columns_is_refused_and_left_alone(table_format, tmp_path, other):
    """C19 (schema drift)."""
    config = config_of(tmp_path, table_format)
    run = staged_run(config, "a")
    publish_run(*run)
    if other == "ids":
        with pytest.raises(ConfigError, match="'user_id' in another type: expected string, got"):
            publish(config, "b", int_ids=True)
    else:
        wide = config_of(tmp_path, table_format, output={"layout": "wide"})
        with pytest.raises(ConfigError, match="the table has other columns"):
            publish(wide, "b")
    assert_frame_equal(read(config), expected(run))


def test_what_was_never_published_cannot_be_read(table_format, tmp_path):
    config = config_of(tmp_path, table_format)
    assert open_table(config).current() is None
    assert open_table(config).history() == []
    with pytest.raises(StorageError, match="nothing is published"):
        open_table(config).read()
    publish(config_of(tmp_path, table_format, surface="other"), "a")
    assert open_table(config).current() is None
    with pytest.raises(StorageError, match="nothing is published"):
        open_table(config).read()
