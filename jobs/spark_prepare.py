"""Prepare in executors: the shard files that the driver alone would write, by a Spark job.

    parts of the tables ──split──▶ chunks ──shuffle by shard──▶ join ──▶ shard files

Both ends are the functions of `pipelines`; Spark moves the chunks between them, sorted, so that a
task holds one shard at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

import pyarrow as pa

from jobs.spark_session import spark_errors
from pipelines.files import Written
from pipelines.prepare import (
    prepare_candidate_sets,
    prepare_items,
)
from pipelines.prepare_parts import Chunk, Part, Splitter, join_chunks
from pipelines.prepared import is_prepared, mark_prepared, shards_of
from schemas.errors import RunError
from schemas.runs import RunPlan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Batches = Iterator[pa.RecordBatch]

_CHUNKS = "shard int, source string, number long, data binary"
_CHUNK_SCHEMA = pa.schema(
    [
        ("shard", pa.int32()),
        ("source", pa.string()),
        ("number", pa.int64()),
        ("data", pa.binary()),
    ]
)
_WRITTEN_SCHEMA = pa.schema([("shard", pa.int32()), ("size", pa.int64()), ("xxh3", pa.string())])
_WRITTEN = "shard int, size long, xxh3 string"
_SETTINGS = {
    # A chunk is as large as thousands of rows: few of them are a batch.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "16",
    # Partitions are as many as are asked for, however small they look.
    "spark.sql.adaptive.coalescePartitions.enabled": "false",
}


def prepare_on_executors(spark: SparkSession, plan: RunPlan, part_bytes: int = 64 << 20) -> None:
    """What `prepare_run` does, with the tables split and joined by executors.

    Raises:
        RunError: Spark gave up. What is written stays and is written again the next time.
    """
    prepare_items(plan)
    if is_prepared(plan):
        return
    sealed = prepare_candidate_sets(plan)
    splitter = Splitter.of(plan)
    parts = splitter.parts(part_bytes)
    num = len(parts)
    with _settings(spark), spark_errors(RunError, "Spark could not prepare the shards"):
        spark.sparkContext.setJobDescription(f"nightshelf prepare {plan.run_id}")
        chunks = spark.range(0, num, 1, num).mapInArrow(_split(splitter, parts), _CHUNKS)
        by_shard = chunks.repartition(plan.num_shards, "shard").sortWithinPartitions("shard")
        written = by_shard.mapInArrow(_join(plan), _WRITTEN).collect()
        spark.sparkContext.setJobDescription("")
    shards = shards_of(plan)
    sealed |= {shards[row.shard].path: Written(row.size, row.xxh3) for row in written}
    for index in set(range(plan.num_shards)) - {row.shard for row in written}:
        sealed[shards[index].path] = join_chunks(plan, shards[index], [])  # no user fell into it
    mark_prepared(plan, sealed)


@contextmanager
def _settings(spark: SparkSession) -> Iterator[None]:
    """Spark settings for one query, and what they were before."""
    before = {name: spark.conf.get(name, None) for name in _SETTINGS}
    for name, value in _SETTINGS.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)


def _split(splitter: Splitter, parts: list[Part]) -> Callable[[Batches], Batches]:
    """Places in `parts` in, chunks out."""

    def split(batches: Batches) -> Batches:
        for batch in batches:
            for at in batch.column(0).to_pylist():
                for chunk in splitter.chunks(parts[at]):
                    yield pa.RecordBatch.from_pydict(
                        {
                            "shard": [chunk.shard],
                            "source": [chunk.table],
                            "number": [chunk.number],
                            "data": [chunk.data],
                        },
                        schema=_CHUNK_SCHEMA,
                    )

    return split


def _join(plan: RunPlan) -> Callable[[Batches], Batches]:
    """Chunks sorted by shard in, numbers of the shards that are written out."""

    def chunks(batches: Batches) -> Iterator[Chunk]:
        for batch in batches:
            shards, tables, numbers, data = batch.columns
            for at in range(len(batch)):
                yield Chunk(
                    shard=shards[at].as_py(),
                    table=tables[at].as_py(),
                    number=numbers[at].as_py(),
                    data=data[at].as_py(),
                )

    def join(batches: Batches) -> Batches:
        files = shards_of(plan)
        for shard, mine in groupby(chunks(batches), key=lambda chunk: chunk.shard):
            one = join_chunks(plan, files[shard], mine)
            yield pa.RecordBatch.from_pydict(
                {"shard": [shard], "size": [one.bytes], "xxh3": [one.xxh3]}, schema=_WRITTEN_SCHEMA
            )

    return join
