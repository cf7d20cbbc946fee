"""Features of Delta tables that deltalake does not write: each is read right or refused by name."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.sources.delta import read_delta
from schemas.errors import TableError
from tests.factories import write_config, write_inputs
from tests.right_or_refused.lakes import adds, commit, protocol

deltalake = pytest.importorskip("deltalake")


def metadata_of(root):
    first = (root / "_delta_log" / f"{0:020d}.json").read_text().splitlines()
    return next(json.loads(line)["metaData"] for line in first if "metaData" in line)


def rows_of(root, wanted=None):
    parts = read_delta(str(root), "users", wanted).parts
    rows = [row for part in parts for batch in part.rows() for row in batch.to_pylist()]
    return sorted(rows, key=lambda row: row["user_id"])


def users(first, count):
    return pa.table({"user_id": [f"u{at}" for at in range(first, first + count)]})


# --- types that were widened ----------------------------------------------------------------------

DAY, TIME = dt.date(2026, 1, 1), dt.datetime(2026, 1, 1, 5, 6)
WIDENED = {
    "byte integer": (pa.int8(), 1, pa.int32(), 1 << 20),
    "integer long": (pa.int32(), 1, pa.int64(), 1 << 40),
    "integer double": (pa.int32(), 1, pa.float64(), 0.1),
    "float double": (pa.float32(), 0.5, pa.float64(), 1e300),
    "integer decimal(12,2)": (pa.int32(), 7, pa.decimal128(12, 2), Decimal("1.25")),
    "decimal(5,2) decimal(10,2)": (
        pa.decimal128(5, 2), Decimal("1.25"), pa.decimal128(10, 2), Decimal("12345678.25"),
    ),
    "date timestamp_ntz": (pa.date32(), DAY, pa.timestamp("us"), TIME),
}  # fmt: skip


def widened(root, change, partitioned):
    """A table whose first file or partition has the narrow type, and its second the wide one."""
    narrow, old, wide, new = WIDENED[change]
    before, after = change.split()
    table = pa.table({"user_id": ["u1"], "x": pa.array([old], narrow)})
    deltalake.write_deltalake(str(root), table, partition_by=["x"] if partitioned else None)
    metadata = metadata_of(root)
    schema = json.loads(metadata["schemaString"])
    field = next(field for field in schema["fields"] if field["name"] == "x")
    field["type"] = after
    field["metadata"] = {"delta.typeChanges": [{"fromType": before, "toType": after}]}
    metadata["schemaString"] = json.dumps(schema)
    metadata["configuration"] = {"delta.enableTypeWidening": "true"}
    columns = {"user_id": ["u2"]} | ({} if partitioned else {"x": pa.array([new], wide)})
    pq.write_table(pa.table(columns), root / "wide.parquet")
    commit(
        root,
        protocol("typeWidening", *(["timestampNtz"] if "ntz" in after else [])),
        {"metaData": metadata},
        {
            "add": {
                "path": "wide.parquet",
                "partitionValues": {"x": str(new)} if partitioned else {},
                "size": (root / "wide.parquet").stat().st_size,
                "dataChange": True,
                "modificationTime": 1,
            }
        },
    )
    as_wide = pa.scalar(old, narrow).cast(wide).as_py()
    return [{"user_id": "u1", "x": as_wide}, {"user_id": "u2", "x": new}]


@pytest.mark.parametrize("change", WIDENED)
def test_types_that_were_widened_are_read(tmp_path, change):
    want = widened(tmp_path / "lake", change, partitioned=False)
    assert rows_of(tmp_path / "lake", {"user_id", "x"}) == want


@pytest.mark.parametrize("change", WIDENED)
def test_partitions_that_were_widened_are_read_or_refused(tmp_path, change):
    want = widened(tmp_path / "lake", change, partitioned=True)
    # deltalake cannot parse the old text as the new type, and says so.
    if change in ("integer decimal(12,2)", "date timestamp_ntz"):
        with pytest.raises(TableError, match="cannot be opened.*Failed to parse value"):
            rows_of(tmp_path / "lake", {"user_id", "x"})
    else:
        assert rows_of(tmp_path / "lake", {"user_id", "x"}) == want


# --- columns under other names --------------------------------------------------------------------


def named(root, names):
    """Give columns of a table, and fields inside them, other names; files keep the old ones."""
    metadata = metadata_of(root)
    schema = json.loads(metadata["schemaString"])
    inner = [f for field in schema["fields"] if isinstance(field["type"], dict)
             for f in field["type"].get("fields", ())]  # fmt: skip
    for number, field in enumerate([*schema["fields"], *inner], 1):
        field["metadata"] = {
            "delta.columnMapping.id": number,
            "delta.columnMapping.physicalName": field["name"],
        }
        field["name"] = names.get(field["name"], field["name"])
    metadata["schemaString"] = json.dumps(schema)
    metadata["configuration"] = {
        "delta.columnMapping.mode": "name",
        "delta.columnMapping.maxColumnId": str(len(schema["fields"]) + len(inner)),
    }
    commit(root, protocol("columnMapping"), {"metaData": metadata})


def test_names_that_were_swapped_are_read(tmp_path):
    table = pa.table({"user_id": ["u1"], "a": ["in a"], "b": ["in b"]})
    deltalake.write_deltalake(str(tmp_path), table)
    named(tmp_path, {"a": "b", "b": "a"})
    assert rows_of(tmp_path) == [{"user_id": "u1", "b": "in a", "a": "in b"}]


@pytest.mark.parametrize("names", [{"x": "y", "y": "x"}, {"x": "new"}], ids=["swapped", "new"])
def test_names_inside_a_column_are_refused(tmp_path, names):
    """Read by name they would be each other's values, or null."""
    table = pa.table({"user_id": ["u1"], "both": [{"x": 1, "y": 2}]})
    deltalake.write_deltalake(str(tmp_path), table)
    named(tmp_path, names)
    with pytest.raises(TableError, match="column mapping inside a column"):
        rows_of(tmp_path)
    assert rows_of(tmp_path, {"user_id"}) == [{"user_id": "u1"}]


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sidecar", [False, True], ids=["inline", "sidecar"])
@pytest.mark.parametrize("commits", [True, False], ids=["beside commits", "alone"])
@pytest.mark.parametrize("hint", [True, False], ids=["hint", "no hint"])
def test_checkpoints_of_version_2_are_read(tmp_path, sidecar, commits, hint):
    for first in (0, 3):
        deltalake.write_deltalake(str(tmp_path), users(first, 3), mode="append")
    log, (gone, left) = tmp_path / "_delta_log", adds(tmp_path)
    feature = protocol("v2Checkpoint")
    removed = {"path": gone["path"], "deletionTimestamp": 1, "dataChange": True}
    commit(tmp_path, feature, {"remove": removed})
    actions = [{"checkpointMetadata": {"version": 2}}, feature, {"metaData": metadata_of(tmp_path)}]
    actions.append(_in_sidecar(log, left) if sidecar else {"add": left})
    path = log / f"{2:020d}.checkpoint.80a083e8-7026-4e79-81be-64bd76c43a11.json"
    written = sorted(log.glob("*.json"))
    path.write_text("\n".join(json.dumps(action) for action in actions))
    if hint:
        said = {"version": 2, "size": len(actions), "v2Checkpoint": {"path": path.name}}
        (log / "_last_checkpoint").write_text(json.dumps(said))
    for one in () if commits else written:
        one.unlink()
    assert [row["user_id"] for row in rows_of(tmp_path)] == ["u3", "u4", "u5"]


def _in_sidecar(log, add):
    """The action that names a file with the `add` in it."""
    kept = {name: add[name] for name in ("path", "size", "modificationTime", "dataChange")}
    fields = pa.struct(
        [("path", pa.string()), ("partitionValues", pa.map_(pa.string(), pa.string())),
         ("size", pa.int64()), ("modificationTime", pa.int64()), ("dataChange", pa.bool_())]
    )  # fmt: skip
    removed = pa.struct([("path", pa.string()), ("dataChange", pa.bool_())])
    columns = [pa.array([{**kept, "partitionValues": []}], fields), pa.array([None], removed)]
    path = log / "_sidecars" / "one.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table(columns, ["add", "remove"]), path)
    return {
        "sidecar": {"path": path.name, "sizeInBytes": path.stat().st_size, "modificationTime": 1}
    }


# --- what nobody knows ----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["validate", "plan", "run"])
@pytest.mark.parametrize("feature", ["variantType", "aFeatureOfNextYear"])
def test_other_features_are_refused_by_name(nightshelf, tmp_path, feature, command):
    table = write_inputs(tmp_path)["users"]
    deltalake.write_deltalake(str(tmp_path / "lake"), table)
    commit(tmp_path / "lake", protocol(feature))
    config = write_config(tmp_path, inputs__users="lake")
    done = nightshelf(command, config, "--output", "json", check=3)
    assert feature.lower() in done.out.lower()
    assert not list((tmp_path / "out").rglob("*.parquet"))
