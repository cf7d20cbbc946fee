"""Delta tables that deltalake cannot write: with deletion vectors, with mapped names."""

from __future__ import annotations

import json
import struct
from pathlib import Path

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
