"""The columns of a shard: which ones a run reads of the users table, and the types they have.

Whoever brings rows into a shard (prepare here, or on Spark; a file that is its own shard) takes
them from here, so that a shard looks the same wherever it comes from.
"""

from __future__ import annotations

import polars as pl
import pyarrow as pa

from pipelines import input_files
from schemas.eligibility import user_columns
from schemas.runs import RunPlan
from schemas.tables import (
    DUPLICATE,
    ELIGIBILITY,
    FILE,
    K_COLUMN,
    LABELS_COLUMN,
    CandidateShape,
    shape_of,
    users_contract,
)

ROW = "__row"  # place in the input; not in a shard
_FILE_BITS = 40  # rows of a file; a table may have more than the 2**32 that a row index can count


def first_row(file: int) -> int:
    """The number of the first row of a table's n-th file. Numbers grow, with gaps between files."""
    return file << _FILE_BITS


def numbered(frame: pl.LazyFrame, first: int) -> pl.LazyFrame:
    """The rows with their numbers, which begin at `first`."""
    return frame.with_row_index(ROW).with_columns(pl.col(ROW).cast(pl.Int64) + first)


def shape_of_candidates(plan: RunPlan) -> CandidateShape | None:
    """The shape of the candidates table; None where there is none."""
    table = plan.inputs.get("candidates")
    return None if table is None else shape_of(table.columns)


def users_columns(plan: RunPlan) -> dict[str, str]:
    """Columns to keep of the users table, `user_id` besides, and what each holds."""
    template = plan.config.prompt.parsed
    kinds = {"user_id": "user", "embedding": "plain", "history": "item", "user_sid": "plain"}
    contract = users_contract(
        template,
        by_segment=shape_of_candidates(plan) == "segment",
        history=plan.config.reads_history,
    )
    names = [column.name for column in contract.columns]
    out = {name: kinds.get(name, "text") for name in names if name != "user_id"}
    if plan.config.task.k_column is not None:
        out[K_COLUMN] = "k"
    if plan.config.task.label is not None and plan.config.task.label.labels_column is not None:
        out[LABELS_COLUMN] = "as it is"
    rule = plan.config.task.eligible
    if rule is not None:  # beside a text copy the prompt may want: these keep their type
        out |= {ELIGIBILITY + name: "as it is" for name in user_columns(rule)}
    return out


def id_dtype(kind: str) -> pl.DataType:
    """The polars type of ids of this kind."""
    return pl.String() if kind == "string" else pl.Int64()


def scan(path: str) -> pl.LazyFrame:
    """One Parquet file, lazily, without columns from its path."""
    return pl.scan_parquet(path, glob=False, hive_partitioning=False)


def shard_columns(plan: RunPlan, frame: pl.LazyFrame, columns: dict[str, str]) -> pl.LazyFrame:
    """`user_id` and `columns` of an input file in the types that a shard has."""
    schema = frame.collect_schema()
    chosen = [pl.col("user_id").cast(id_dtype(plan.user_id_type))]
    for column, kind in columns.items():
        source = _source(plan, column)
        chosen.append(_column(column, source, kind, schema[source], plan.item_id_type))
    return frame.select(chosen)


def first_users(plan: RunPlan, paths: list[str], rows: int) -> pa.Table:
    """The first `rows` users of each of some files, as a shard without candidates holds them."""
    columns = users_columns(plan)
    sources = ["user_id", *dict.fromkeys(_source(plan, column) for column in columns)]
    frames = []
    for path in paths:
        head = pl.from_arrow(input_files.read_head(path, rows, sources))
        assert isinstance(head, pl.DataFrame), "a table is a frame"
        typed = shard_columns(plan, head.lazy(), columns).collect()
        frames.append(typed.with_columns(pl.lit(path).alias(FILE)))
    users = pl.concat(frames, how="vertical_relaxed")
    again = pl.col("user_id").is_first_distinct().not_() & pl.col("user_id").is_not_null()
    return to_arrow(users.with_columns(again.alias(DUPLICATE)))


def _source(plan: RunPlan, name: str) -> str:
    """The users column behind a shard column."""
    if name == K_COLUMN:
        assert plan.config.task.k_column is not None, "a shard has a k only if it is configured"
        return plan.config.task.k_column
    if name == LABELS_COLUMN:
        label = plan.config.task.label
        assert label is not None, "a shard has labels only if they are asked for"
        assert label.labels_column is not None, "a shard has labels only if it is configured"
        return label.labels_column
    return name.removeprefix(ELIGIBILITY)


def _column(name: str, source: str, kind: str, found: pl.DataType, item_id_type: str) -> pl.Expr:
    """One input column in the type its shard column has."""
    column = pl.col(source)
    if isinstance(found, pl.Array):
        column = column.arr.to_list()
    dtype = shard_dtype(name, kind, found, id_dtype(item_id_type))
    return column.cast(dtype).alias(name)


def mark_duplicates(users: pl.DataFrame) -> pl.DataFrame:
    """Sorted by user, then input order; all but the first row of a user are marked."""
    return users.sort("user_id", ROW, nulls_last=True).with_columns(
        (pl.int_range(pl.len()).over("user_id") > 0).alias(DUPLICATE)
        & pl.col("user_id").is_not_null()
    )


def shard_dtype(name: str, kind: str, found: pl.DataType, item: pl.DataType) -> pl.DataType:
    """The polars type of a shard column whose input column has the type `found`."""
    if kind == "item":
        return pl.List(item) if isinstance(found, (pl.List, pl.Array)) else item
    if kind == "text":
        return pl.String()
    if kind == "k":
        return pl.Int64()
    if kind == "as it is":
        if isinstance(found, (pl.Array, pl.List)):
            return pl.List(pl.String() if isinstance(found.inner, pl.Categorical) else found.inner)
        return pl.String() if isinstance(found, pl.Categorical) else found
    return pl.List(pl.Int64() if name == "user_sid" else pl.Float32())


def to_arrow(users: pl.DataFrame) -> pa.Table:
    """Arrow with the plain types a shard file has: no large_string, no large_list."""
    table = users.to_arrow()
    fields = []
    for field in table.schema:
        dtype = field.type
        if pa.types.is_large_list(dtype) or pa.types.is_list(dtype):
            inner = dtype.value_type
            inner = pa.string() if pa.types.is_large_string(inner) else inner
            inner = pa.string() if pa.types.is_string_view(inner) else inner
            dtype = pa.list_(inner)
        elif pa.types.is_large_string(dtype) or pa.types.is_string_view(dtype):
            dtype = pa.string()
        fields.append(pa.field(field.name, dtype))
    return table.cast(pa.schema(fields))
