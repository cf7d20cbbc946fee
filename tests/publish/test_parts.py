"""Reading a partition part by part, and the export that does so."""

from __future__ import annotations

import json

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from pipelines.publish import open_table
from pipelines.publish.export import export_partition
from pipelines.storage import files
from schemas.errors import ConflictError, StorageError
from tests.publish.runs import config_of, publish, read


def test_the_parts_are_the_whole(table_format, tmp_path):
    config = config_of(tmp_path, table_format)
    publish(config, "one", users=40, shards=4)
    parts = pl.concat(pl.from_arrow(part) for part in open_table(config).parts())
    parts = parts.drop("ds", "surface", strict=False)
    whole = read(config).drop("ds", "surface", strict=False)
    assert len(parts) == len(whole) > 0
    assert_frame_equal(parts.select(whole.columns), whole, check_row_order=False)


def test_nothing_published_has_no_parts(table_format, tmp_path):
    with pytest.raises(StorageError, match="nothing is published"):
        list(open_table(config_of(tmp_path, table_format)).parts())


def test_an_export_is_the_same_of_every_format(table_format, tmp_path):
    config = config_of(tmp_path, table_format)
    publish(config, "one", users=40, shards=4)
    counts = export_partition(config, str(tmp_path / "to"), num_files=3, form="jsonl")
    lines = "".join((tmp_path / "to" / name).read_text() for name in counts).splitlines()
    rows = [json.loads(line) for line in lines]
    want = read(config).sort("user_id", "rank").group_by("user_id", maintain_order=True)
    lists = dict(want.agg(pl.col("item_id")).iter_rows())
    assert {r["user_id"]: [i["item_id"] for i in r["items"]] for r in rows} == lists
    assert sum(counts.values()) == len(lists)


def test_an_empty_partition_exports_empty_files(table_format, tmp_path):
    config = config_of(tmp_path, table_format)
    publish(config, "none", users=0)
    counts = export_partition(config, str(tmp_path / "to"), num_files=2, form="arrow")
    assert counts == {"part-00000.arrow": 0, "part-00001.arrow": 0}
    assert (tmp_path / "to" / "_SUCCESS").exists()


def test_an_export_starts_again_when_the_partition_is_replaced(tmp_path, monkeypatch):
    config = config_of(tmp_path, "parquet")
    publish(config, "old", users=40, shards=4)
    parts = open_table(config).parts()
    next(parts)
    publish(config, "new", users=30, shards=4)
    with pytest.raises(ConflictError, match="replaced while it was read"):
        list(parts)

    plain, opened = files.read_bytes, []

    def overtaken(path):
        if "/out/ds=" in path:
            opened.append(path)
        if len(opened) == 2:  # the export has read one file of the old set
            opened.append("once")
            publish(config, "newer", users=20, shards=4)
        return plain(path)

    monkeypatch.setattr("pipelines.storage.files.read_bytes", overtaken)
    counts = export_partition(config, str(tmp_path / "to"), num_files=3, form="jsonl")
    assert sum(counts.values()) == 20
