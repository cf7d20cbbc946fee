"""The rows that a run set aside, as a table of the same format."""

from __future__ import annotations

import json

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.publish import open_table
from schemas.config_file import load_config
from tests.factories import write_config, write_inputs


def rows(path):
    table = open_table(load_config(str(path)), quarantine=True).read()
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def test_rows_set_aside_are_published_and_replaced(nightshelf, tmp_path, table_format):
    users = write_inputs(tmp_path)["users"]
    pq.write_table(pa.concat_tables([users, users.slice(0, 3)]), tmp_path / "users.parquet")
    name = "nightshelf.aside" if table_format == "iceberg" else "aside"
    config = write_config(tmp_path, output__format=table_format, output__quarantine=name)
    first = nightshelf("run", config, "--output", "json").json
    found = rows(config)
    assert set(found["rule"]) == {"duplicate_user"}
    assert sorted(found["key"]) == ["u000", "u001", "u002"]
    assert set(found["run_id"]) == {first["run_id"]}
    assert all(json.loads(payload) == {} for payload in found["payload"])
    assert first["rows_quarantined"] == len(found) == 3
    nightshelf("run", config)
    assert len(rows(config)) == 3
    pq.write_table(users, tmp_path / "users.parquet")
    second = nightshelf("run", config, "--output", "json").json
    assert second["rows_quarantined"] == len(rows(config)) == 0
    published = open_table(load_config(str(config))).read()
    assert len(published) == second["rows_published"]
