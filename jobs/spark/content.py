"""What a table of Spark holds, as two numbers: rows are hashed one by one, whatever their order.

Spark's hash functions pass over what is null and do not say where a list ends, so that `[a, null]`
and `[a]`, or a value in one column and in the next, are the same to them. Here each value comes
with all that is needed to take it apart again: whether there is one, how many there are, and which.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql import types as T

from pipelines.storage import files

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_LAYOUT = 4  # of the folder of a copy and of the hash; copies of another one are not used
_ZONE = "UTC"  # of instants in the copy, whatever the session's zone is
_SEEDS = (0x6E696768, 0x7473686C)
_ROW_HASHES = ("nightshelf row hash", "nightshelf other row hash")  # no input has such columns
_WRAP = 1 << 64


@dataclass(frozen=True, slots=True)
class Content:
    """What rows there are: their hashes, 64 bits of each of two seeds, combined by exclusive or and
    by sum. The second tells repeated rows apart, which the first forgets.
    """

    rows: int
    mixed: int
    total: int

    @classmethod
    def of_frame(cls, frame: DataFrame) -> Content:
        """Of a table as it is now."""
        sums: list[Column] = [F.count(F.lit(1)).alias("rows")]
        for at, row in enumerate(row_hashes(frame)):
            sums.append(F.bit_xor(row).alias(f"mixed_{at}"))
            sums.append(F.sum(row.cast("decimal(38,0)")).alias(f"total_{at}"))
        found = frame.agg(*sums).first()
        assert found is not None, "an aggregate has one row"
        mixed = [found[f"mixed_{at}"] or 0 for at in range(len(_SEEDS))]
        total = [int(found[f"total_{at}"] or 0) for at in range(len(_SEEDS))]
        return cls(found.rows, _joined(mixed), _joined(total))

    @classmethod
    def of_hashes(cls, hashes: Sequence[pa.Array]) -> Content:
        """Of some rows, from what `row_hashes` gives for them."""
        numbers = [column.to_numpy() for column in hashes]
        mixed = [int(np.bitwise_xor.reduce(column)) for column in numbers]
        total = [int(column.sum()) for column in numbers]  # modulo 2^64, as sums of arrays are
        return cls(len(numbers[0]), _joined(mixed), _joined(total))

    @classmethod
    def of_parts(cls, parts: Sequence[Content]) -> Content:
        """Of parts of a table together."""
        mixed = functools.reduce(operator.xor, (part.mixed for part in parts), 0)
        total = [sum(_halves(part.total)[at] for part in parts) for at in range(len(_SEEDS))]
        return cls(sum(part.rows for part in parts), mixed, _joined(total))

    def digest(self, schema: str) -> str:
        """A hash of these rows in these columns."""
        determines = [_LAYOUT, _ZONE, schema, self.rows, self.mixed, self.total]
        return files.hash_bytes(json.dumps(determines).encode())[:16]


def _joined(halves: Sequence[int]) -> int:
    return functools.reduce(lambda left, right: left * _WRAP + right % _WRAP, halves, 0)


def _halves(joined: int) -> tuple[int, int]:
    return joined >> 64, joined % _WRAP


def with_hashes(frame: DataFrame) -> DataFrame:
    """The table with the hashes of its rows as its last columns."""
    return frame.withColumns(dict(zip(_ROW_HASHES, row_hashes(frame), strict=True)))


NUM_HASHES = len(_ROW_HASHES)


def row_hashes(frame: DataFrame) -> list[Column]:
    """Two hashes of each row, int64."""
    parts = [
        one
        for column in frame.schema.fields
        for one in _parts(F.col(f"`{column.name.replace('`', '``')}`"), column.dataType)
    ]
    return [F.xxhash64(F.lit(seed), *parts) for seed in _SEEDS]


def _parts(value: Column, kind: T.DataType) -> list[Column]:
    """The parts of a value that a hash takes one after the other; they determine it."""
    if isinstance(kind, T.ArrayType) and not _nested(kind.elementType):
        marks = F.transform(value, _mark(kind.elementType))
        return [value.isNull(), F.size(value), marks, _plain(value, kind)]
    if isinstance(kind, T.StructType):
        inside = (_parts(value.getField(field.name), field.dataType) for field in kind.fields)
        return [value.isNull(), *(one for parts in inside for one in parts)]
    if _nested(kind):
        return [_written_out(value, kind)]
    return [value.isNull(), _plain(value, kind)]


def _nested(kind: T.DataType) -> bool:
    return isinstance(kind, T.ArrayType | T.MapType | T.StructType)


def _plain(value: Column, kind: T.DataType) -> Column:
    """A value as something of which Spark hashes all: text by its bytes, whatever its collation."""
    if isinstance(kind, T.ArrayType):
        text = isinstance(kind.elementType, T.StringType)
        return value.cast(T.ArrayType(T.BinaryType())) if text else value
    if isinstance(kind, T.StringType):
        return value.cast("binary")
    # Spark hashes 0.0 and -0.0 alike, and a prompt does not write them alike.
    return value.cast("string") if isinstance(kind, T.FractionalType) else value


def _mark(kind: T.DataType) -> Any:
    def mark(value: Column) -> Column:
        found = F.when(value.isNull(), F.lit(1))
        if isinstance(kind, T.FloatType | T.DoubleType):
            negative = (value == 0) & value.cast("string").startswith("-")
            found = found.when(negative, F.lit(2))
        return found.otherwise(F.lit(0))

    return mark


def _written_out(value: Column, kind: T.DataType) -> Column:
    """A value as text from which it can be read again: its length comes first, at every depth."""
    if isinstance(kind, T.ArrayType):
        inside = F.transform(value, lambda one: _written_out(one, kind.elementType))
        text = F.concat(F.size(value).cast("string"), F.lit("["), F.array_join(inside, ""))
    elif isinstance(kind, T.MapType):
        pairs = T.StructType(
            [T.StructField("key", kind.keyType), T.StructField("value", kind.valueType)]
        )
        text = _written_out(F.map_entries(value), T.ArrayType(pairs))
    elif isinstance(kind, T.StructType):
        text = F.concat(*(_written_out(value.getField(f.name), f.dataType) for f in kind.fields))
    else:
        plain = _as_text(value, kind)
        text = F.concat(F.length(plain).cast("string"), F.lit(":"), plain)
    return F.when(value.isNull(), F.lit("n")).otherwise(F.concat(F.lit("v"), text))


def _as_text(value: Column, kind: T.DataType) -> Column:
    if isinstance(kind, T.TimestampType):
        return F.unix_micros(value).cast("string")  # else it would be in the session's zone
    return F.hex(value) if isinstance(kind, T.BinaryType) else value.cast("string")


def in_utc(kind: pa.DataType) -> pa.DataType:
    """An Arrow type with its instants in UTC: Spark gives them the zone of the session."""
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, _ZONE)
    if pa.types.is_large_list(kind):
        return pa.large_list(_field_in_utc(kind.value_field))
    if pa.types.is_list(kind):
        return pa.list_(_field_in_utc(kind.value_field))
    if pa.types.is_struct(kind):
        return pa.struct([_field_in_utc(kind.field(at)) for at in range(kind.num_fields)])
    if pa.types.is_map(kind):
        return pa.map_(in_utc(kind.key_type), _field_in_utc(kind.item_field))
    return kind


def _field_in_utc(field: pa.Field[Any]) -> pa.Field[Any]:
    return field.with_type(in_utc(field.type))


def schema_in_utc(schema: pa.Schema) -> pa.Schema:
    """A schema with its instants in UTC."""
    return pa.schema([_field_in_utc(field) for field in schema])
