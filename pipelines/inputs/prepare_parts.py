"""Prepare by many processes: tables are cut into parts, parts into chunks, chunks joined by shard.

The rows of a shard, their order and their types are those of `prepare`, whose functions do the
work; only the way of the rows differs. A chunk is the rows that one part holds for one shard, as
one Arrow stream, so that whoever moves it (Spark's shuffle) moves bytes and no rows. A user with
very many candidates makes its shard larger and nothing else.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import polars as pl
import pyarrow as pa

from pipelines.inputs.prepare import SHARD, split_frame, tables_to_split, write_shard
from pipelines.inputs.shard_columns import first_row, table_schema
from pipelines.sources.input_columns import Piece
from pipelines.storage.files import Written
from schemas.runs import RunPlan, Shard

_PART_BYTES = 64 << 20  # of a file, as it lies there


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some consecutive rows of one file of one table."""

    table: str
    file: int  # among the table's files
    first: int  # row of the file
    rows: int
    number: int  # of the first row, see shard_columns.first_row


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows of one table for one shard, in order; `number` is that of the first row's part."""

    shard: int
    table: str
    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Splitter:
    """Cuts parts into chunks. Made where the plan is, used where the work is."""

    plan: RunPlan
    columns: dict[str, dict[str, str]]
    schemas: dict[str, pa.Schema]  # of the whole table: a part of it may hold nulls only

    @classmethod
    def of(cls, plan: RunPlan) -> Splitter:
        """A splitter for the tables of a run; reads the schema of every file."""
        columns = tables_to_split(plan)
        schemas = {name: table_schema(plan, name) for name in columns}
        return cls(plan, columns, schemas)

    def parts(self, part_bytes: int = _PART_BYTES) -> list[Part]:
        """All rows of all tables, in parts of about as many bytes."""
        return [part for name in self.columns for part in self._parts(name, part_bytes)]

    def _parts(self, name: str, part_bytes: int) -> Iterator[Part]:
        for place, file in enumerate(self.plan.inputs[name].files):
            step = max(1, file.rows * part_bytes // max(1, file.bytes))
            for first in range(0, file.rows, step):
                rows = min(step, file.rows - first)
                yield Part(
                    table=name, file=place, first=first, rows=rows, number=first_row(place) + first
                )

    def chunks(self, part: Part) -> Iterator[Chunk]:
        """The part's rows, by shard."""
        path = self.plan.inputs[part.table].files[part.file].path
        piece = Piece(path, part.number, part.first, part.rows)
        columns, schema = self.columns[part.table], self.schemas[part.table]
        rows = split_frame(self.plan, part.table, columns, schema, [piece]).collect()
        for (shard,), mine in rows.partition_by(SHARD, as_dict=True, include_key=False).items():
            buffer = io.BytesIO()
            mine.write_ipc_stream(buffer, compression="lz4")
            yield Chunk(
                shard=int(shard), table=part.table, number=part.number, data=buffer.getvalue()
            )


def join_chunks(plan: RunPlan, shard: Shard, chunks: Iterable[Chunk]) -> Written:
    """Write one shard from all of its chunks."""
    frames: dict[str, list[tuple[int, pl.DataFrame]]] = {}
    for chunk in chunks:
        frame = pl.read_ipc_stream(io.BytesIO(chunk.data))
        frames.setdefault(chunk.table, []).append((chunk.number, frame))

    def rows_of(table: str) -> pl.DataFrame | None:
        found = sorted(frames.pop(table, []), key=lambda numbered: numbered[0])
        return pl.concat([frame for _, frame in found]) if found else None

    return write_shard(plan, shard, rows_of)
