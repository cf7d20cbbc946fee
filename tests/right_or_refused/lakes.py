"""Tables that the libraries read and cannot write: Delta with deletion vectors and mapped names,
Iceberg with files of deletes.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def commit(root: Path, *actions: dict[str, object]) -> None:
    """Write the next commit of a Delta table's log."""
    log = root / "_delta_log"
    number = len(list(log.glob("*.json")))
    text = "\n".join(json.dumps(action) for action in actions)
    (log / f"{number:020d}.json").write_text(text)


def adds(root: Path) -> list[dict[str, object]]:
    """The `add` actions of all commits."""
    found = []
    for path in sorted((root / "_delta_log").glob("*.json")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found += [line["add"] for line in lines if "add" in line]
    return found


def protocol(*features: str) -> dict[str, object]:
    """A protocol that needs features of its readers."""
    return {
        "protocol": {
            "minReaderVersion": 3,
            "minWriterVersion": 7,
            "readerFeatures": list(features),
            "writerFeatures": list(features),
        }
    }


def delete_by_vector(root: Path, add: dict[str, object], rows: list[int]) -> None:
    """Delete rows of a file as Spark does: a deletion vector in the log, the file as it was."""
    data = _vector(rows)
    vector = {
        "storageType": "i",
        "pathOrInlineDv": _z85(data + b"\0" * (-len(data) % 4)),
        "sizeInBytes": len(data),
        "cardinality": len(rows),
    }
    commit(
        root,
        protocol("deletionVectors"),
        {"remove": {"path": add["path"], "deletionTimestamp": 1, "dataChange": True}},
        {"add": {**add, "deletionVector": vector}},
        {"commitInfo": {"operation": "DELETE"}},
    )


def map_names(root: Path, mode: str) -> None:
    """Rename every column `x` of a Delta table to `new x`; files keep the old names."""
    first = (root / "_delta_log" / f"{0:020d}.json").read_text().splitlines()
    metadata = next(json.loads(line)["metaData"] for line in first if "metaData" in line)
    schema = json.loads(metadata["schemaString"])
    for number, field in enumerate(schema["fields"], 1):
        field["metadata"] = {
            "delta.columnMapping.id": number,
            "delta.columnMapping.physicalName": field["name"],
        }
        field["name"] = {"a": "user_id", "b": "history"}.get(field["name"], field["name"])
    metadata["schemaString"] = json.dumps(schema)
    metadata["configuration"] = {
        "delta.columnMapping.mode": mode,
        "delta.columnMapping.maxColumnId": str(len(schema["fields"])),
    }
    commit(root, protocol("columnMapping"), {"metaData": metadata})


def _vector(rows: list[int]) -> bytes:
    """A 64-bit roaring bitmap with one container of few values."""
    array = b"".join(struct.pack("<H", row) for row in sorted(rows))
    inner = struct.pack("<II", 12346, 1) + struct.pack("<HH", 0, len(rows) - 1)
    inner += struct.pack("<I", 16) + array
    return struct.pack("<I", 1681511377) + struct.pack("<QI", 1, 0) + inner


def _z85(data: bytes) -> str:
    text = ""
    for at in range(0, len(data), 4):
        (number,) = struct.unpack(">I", data[at : at + 4])
        part = ""
        for _ in range(5):
            part = _Z85[number % 85] + part
            number //= 85
        text += part
    return text


def delete_by_position(table: Any, rows: dict[str, list[int]]) -> None:
    """Delete rows of an Iceberg table's files as Spark does on read: a file of positions."""
    columns = [
        pa.field("file_path", pa.string(), metadata={"PARQUET:field_id": "2147483546"}),
        pa.field("pos", pa.int64(), metadata={"PARQUET:field_id": "2147483545"}),
    ]
    pairs = [(path, at) for path, places in rows.items() for at in places]
    arrays = [pa.array([p for p, _ in pairs]), pa.array([n for _, n in pairs], pa.int64())]
    _add_deletes(table, pa.table(arrays, pa.schema(columns)), "POSITION_DELETES", None)


def delete_by_value(table: Any, name: str, values: list[Any]) -> None:
    """Delete rows of an Iceberg table as Flink does: a file of values that rows must not have."""
    field = table.schema().find_field(name)
    column = pa.field(
        name, pa.array(values).type, metadata={"PARQUET:field_id": str(field.field_id)}
    )
    deletes = pa.table([pa.array(values)], pa.schema([column]))
    _add_deletes(table, deletes, "EQUALITY_DELETES", [field.field_id])


def _add_deletes(table: Any, deletes: pa.Table, content: str, equality: list[int] | None) -> None:
    """Commit a snapshot with a file of deletes, which pyiceberg reads and does not write."""
    from pyiceberg import manifest as m
    from pyiceberg.table.snapshots import Operation, Snapshot, Summary
    from pyiceberg.table.update import AddSnapshotUpdate, SetSnapshotRefUpdate
    from pyiceberg.typedef import Record

    metadata, io = table.metadata, table.io
    snapshot_id, base = metadata.new_snapshot_id(), f"{metadata.location}/metadata"
    path = f"{metadata.location}/data/deletes-{snapshot_id}.parquet"
    with io.new_output(path).create() as out:
        pq.write_table(deletes, out)
    size = len(io.new_input(path))
    entry = m.DataFile.from_args(
        content=m.DataFileContent[content], file_path=path, file_format=m.FileFormat.PARQUET,
        partition=Record(), record_count=len(deletes), file_size_in_bytes=size,
        equality_ids=equality, spec_id=metadata.default_spec_id,
    )  # fmt: skip

    class DeleteManifest(m.ManifestWriterV2):
        def content(self) -> m.ManifestContent:
            return m.ManifestContent.DELETES

        @property
        def _meta(self) -> dict[str, str]:
            return {**super()._meta, "content": "deletes"}

    where = io.new_output(f"{base}/deletes-{snapshot_id}-m0.avro")
    with DeleteManifest(table.spec(), table.schema(), where, snapshot_id, "deflate") as writer:
        writer.add_entry(
            m.ManifestEntry.from_args(
                status=m.ManifestEntryStatus.ADDED, snapshot_id=snapshot_id, data_file=entry
            )
        )
    before = table.current_snapshot()
    number = metadata.last_sequence_number + 1
    listed = f"{base}/snap-{snapshot_id}.avro"
    with m.write_manifest_list(
        2, io.new_output(listed), snapshot_id, before.snapshot_id, number, "deflate"
    ) as manifests:
        manifests.add_manifests([*before.manifests(io), writer.to_manifest_file()])
    snapshot = Snapshot(
        snapshot_id=snapshot_id, parent_snapshot_id=before.snapshot_id, sequence_number=number,
        timestamp_ms=before.timestamp_ms + 1, manifest_list=listed,
        summary=Summary(Operation.DELETE), schema_id=table.schema().schema_id,
    )  # fmt: skip
    ref = SetSnapshotRefUpdate(
        ref_name="main", type="branch", snapshot_id=snapshot_id, max_ref_age_ms=None,
        max_snapshot_age_ms=None, min_snapshots_to_keep=None,
    )  # fmt: skip
    table.catalog.commit_table(table, (), (AddSnapshotUpdate(snapshot=snapshot), ref))
