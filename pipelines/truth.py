"""The truth that a run is judged by: items that users turned to later, long or wide."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow as pa

from pipelines import input_files
from pipelines.by_shard import ByShard, same_id_type
from pipelines.frames import reading
from pipelines.shard_columns import id_dtype, scan
from schemas.errors import TableError
from schemas.runs import RunPlan
from schemas.tables import TRUTH, TableContract, TruthShape, id_type

_WEIGHTS = ("weight", "relevance")


class Truth:
    """A truth table, cut by the shards of a run. `of_shard` gives each relevant pair once."""

    def __init__(self, plan: RunPlan, path: str, folder: Path) -> None:
        """Read and check the table.

        Raises:
            TableError: a column is missing, or of another type than the run's; a weight is
                negative or not a number.
        """
        paths = input_files.list_parquet(path, "truth")
        frame = pl.concat([_pairs(plan, one) for one in paths])
        self.path = path
        with reading("truth", paths):
            self.rows, self.rows_null, self.rows_weightless = _count(frame, path)
        kept = frame.drop_nulls(["user_id", "item_id"]).filter(pl.col("weight") > 0)
        self._parts = ByShard(kept, plan, folder, "truth", paths)
        self.pairs = 0  # of the shards read so far

    @property
    def rows_repeated(self) -> int:
        """Rows that name a pair again; complete when every shard was read."""
        return self.rows - self.rows_null - self.rows_weightless - self.pairs

    def of_shard(self, index: int) -> pl.DataFrame:
        """`user_id, item_id, weight`, sorted by user and item, with the largest weight of each."""
        frame = self._parts.shard(index).group_by("user_id", "item_id").agg(pl.max("weight"))
        self.pairs += len(frame)
        return frame.sort("user_id", "item_id")


def read_interactions(plan: RunPlan, path: str, table: str) -> pl.LazyFrame:
    """The item ids of an interactions table, long or wide: one row each."""
    frames = []
    for one in input_files.list_parquet(path, table):
        shape, schema = _shape(one, table)
        column = "item_ids" if shape == "wide" else "item_id"
        kind = id_type(schema.field(column).type)
        same_id_type(table, column, kind, plan.item_id_type, one)
        frame = scan(one).select(column)
        if shape == "wide":
            frame = frame.explode(column, empty_as_null=False, keep_nulls=False)
        frames.append(frame.select(pl.col(column).cast(id_dtype(kind)).alias("item_id")))
    return pl.concat(frames)


def _shape(path: str, table: str) -> tuple[TruthShape, pa.Schema]:
    _, schema = input_files.describe_file(path, table)
    for shape, contract in TRUTH.items():
        if {c.name for c in contract.columns if c.required} <= set(schema.names):
            TableContract(table, contract.columns).check(schema, path)
            return shape, schema
    raise TableError(
        f"{table}: the columns are none of the known shapes",
        expected="(user_id, item_id) or (user_id, item_ids)",
        got=f"columns {', '.join(schema.names)}",
        where=path,
    )


def _pairs(plan: RunPlan, path: str) -> pl.LazyFrame:
    """`user_id, item_id, weight` of one file."""
    shape, schema = _shape(path, "truth")
    item = "item_ids" if shape == "wide" else "item_id"
    for column, want in (("user_id", plan.user_id_type), (item, plan.item_id_type)):
        same_id_type("truth", column, id_type(schema.field(column).type), want, path)
    named = [name for name in _WEIGHTS if name in schema.names and shape == "long"]
    if len(named) > 1:
        raise TableError(
            "truth: two columns say how relevant an item is",
            expected="weight or relevance",
            got=" and ".join(named),
            where=path,
        )
    weight = pl.col(named[0]).cast(pl.Float64) if named else pl.lit(1.0)
    frame = scan(path)
    if shape == "wide":
        frame = frame.select("user_id", item).explode(item, empty_as_null=False, keep_nulls=True)
    return frame.select(
        pl.col("user_id").cast(id_dtype(plan.user_id_type)),
        pl.col(item).cast(id_dtype(plan.item_id_type)).alias("item_id"),
        weight.alias("weight"),
    )


def _count(frame: pl.LazyFrame, path: str) -> tuple[int, int, int]:
    """Rows, those without user or item, and those of weight 0; refuse weights that are none."""
    weight = pl.col("weight")
    nameless = pl.col("user_id").is_null() | pl.col("item_id").is_null()
    bad = weight.is_null() | weight.is_nan() | weight.is_infinite() | (weight < 0)
    found = frame.select(
        pl.len().alias("rows"),
        nameless.sum().alias("null"),
        (~nameless & (weight == 0)).fill_null(value=False).sum().alias("weightless"),
        bad.sum().alias("bad"),
    ).collect(engine="streaming")
    rows, null, weightless, wrong = found.row(0)
    if wrong:
        raise TableError(
            "truth: a weight is no weight",
            expected="numbers, 0 (not relevant) or more",
            got=f"{wrong} of {rows} rows with null, NaN, an infinite or a negative one",
            where=path,
        )
    if rows == null + weightless:
        raise TableError(
            "truth: nothing is relevant to anybody",
            got=f"{rows} rows, {null} of them null, {weightless} of weight 0",
            where=path,
        )
    return rows, null, weightless
