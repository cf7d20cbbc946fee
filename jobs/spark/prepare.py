"""Prepare in executors: the shard files that the driver alone would write, by a Spark job.

    parts of the tables ──split──▶ chunks ──shuffle by shard──▶ join ──▶ shard files

Both ends are the functions of `pipelines`; Spark moves the chunks between them, sorted, so that a
task holds one shard at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

import pyarrow as pa

from jobs.running.shard_worker import panics_are_failures
from jobs.spark.carried import carried
from jobs.spark.session import spark_errors
from pipelines.inputs.prepare import (
    prepare_candidate_sets,
    prepare_items,
)
from pipelines.inputs.prepare_parts import Chunk, Part, Splitter, join_chunks
from pipelines.inputs.prepared import is_prepared, mark_prepared, shards_of
from pipelines.sources.frames import reading
from pipelines.storage.files import Written
from schemas.errors import NightshelfError, RunError
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
_WRITTEN = "shard int, size long, xxh3 string, error string"
_WRITTEN_SCHEMA = pa.schema(
    [("shard", pa.int32()), ("size", pa.int64()), ("xxh3", pa.string()), ("error", pa.string())]
)
_NO_SHARD, _ERROR = -1, "error"  # a chunk that is an error of ours, by its fields
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
        NightshelfError: what a task found wrong, as `prepare_run` has it.
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
        chunks = spark.range(0, num, 1, num).mapInArrow(carried(_split(splitter, parts)), _CHUNKS)
        by_shard = chunks.repartition(plan.num_shards, "shard").sortWithinPartitions("shard")
        written = by_shard.mapInArrow(carried(_join(plan)), _WRITTEN).collect()
        spark.sparkContext.setJobDescription("")
    if errors := sorted(row.error for row in written if row.error is not None):
        raise NightshelfError.of_record(json.loads(errors[0]))
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
    """Places in `parts` in, chunks out; an error that another try would meet again as one, too."""

    def split(batches: Batches) -> Batches:
        for batch in batches:
            for at in batch.column(0).to_pylist():
                yield from _chunks_or_error(splitter, parts[at])

    return split


def _chunks_or_error(splitter: Splitter, part: Part) -> Batches:
    file = splitter.plan.inputs[part.table].files[part.file]
    try:
        with panics_are_failures(f"preparing {file.path}"), reading(part.table, [file.path]):
            for chunk in splitter.chunks(part):
                yield _batch(chunk.shard, chunk.table, chunk.number, chunk.data)
    except NightshelfError as err:
        if err.retryable:
            raise  # Spark tries the task again
        yield _batch(_NO_SHARD, _ERROR, 0, json.dumps(err.as_record()).encode())


def _batch(shard: int, source: str, number: int, data: bytes) -> pa.RecordBatch:
    columns = {"shard": [shard], "source": [source], "number": [number], "data": [data]}
    return pa.RecordBatch.from_pydict(columns, schema=_CHUNK_SCHEMA)


def _join(plan: RunPlan) -> Callable[[Batches], Batches]:
    """Chunks sorted by shard in, numbers of the shards that are written out; errors pass by."""

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
            if shard == _NO_SHARD:
                for chunk in mine:
                    yield _outcome(error=chunk.data.decode())
                continue
            try:
                with panics_are_failures(f"preparing {files[shard].name}"):
                    one = join_chunks(plan, files[shard], mine)
            except NightshelfError as err:
                if err.retryable:
                    raise
                yield _outcome(error=json.dumps(err.as_record()))
            else:
                yield _outcome(shard, one)

    return join


def _outcome(
    shard: int = _NO_SHARD, one: Written | None = None, error: str | None = None
) -> pa.RecordBatch:
    size, xxh3 = (None, None) if one is None else (one.bytes, one.xxh3)
    columns = {"shard": [shard], "size": [size], "xxh3": [xxh3], "error": [error]}
    return pa.RecordBatch.from_pydict(columns, schema=_WRITTEN_SCHEMA)
