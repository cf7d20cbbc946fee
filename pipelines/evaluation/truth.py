"""The truth that a run is judged by: items that users turned to later, long or wide."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow as pa

from pipelines.inputs.by_shard import ByShard, same_id_type
from pipelines.sources import input_files
from pipelines.sources.frames import reading
from pipelines.sources.input_columns import Piece, Wanted, scan_columns
from pipelines.sources.one_type import OneType
from schemas.column_types import is_empty
from schemas.errors import TableError
from schemas.runs import RunPlan
from schemas.tables import ID_TYPES, TRUTH, IdType, TableContract, TruthShape, id_type

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
        frame = _pairs(plan, paths)
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
    paths = input_files.list_parquet(path, table)
    shape, schema = _shape(paths, table)
    column = "item_ids" if shape == "wide" else "item_id"
    _same_ids(table, schema, [(column, plan.item_id_type)], paths)
    item = ID_TYPES[plan.item_id_type]
    wanted = [Wanted("item_id", column, pa.list_(item) if shape == "wide" else item)]
    frame = scan_columns(table, [Piece(one, 0) for one in paths], wanted)
    if shape == "wide":
        frame = frame.explode("item_id", empty_as_null=False, keep_nulls=False)
    return frame


def _shape(paths: list[str], table: str) -> tuple[TruthShape, pa.Schema]:
    """The shape of all files, and the columns that they have."""
    first: TruthShape | None = None
    types = OneType(table)
    for path in paths:
        _, schema = input_files.describe_file(path, table)
        shape = _shape_of(schema, path, table)
        if first not in (None, shape):
            raise TableError(
                f"{table}: files have different shapes",
                expected=f"columns as in {paths[0]}",
                got=f"columns {', '.join(schema.names)}",
                where=path,
            )
        first = shape
        contract = TableContract(table, TRUTH[shape].columns)
        contract.check(schema, path)
        for problem in types.problems(contract, schema, path):
            raise problem
    assert first is not None, "a table has files"
    return first, types.schema()


def _shape_of(schema: pa.Schema, path: str, table: str) -> TruthShape:
    for shape, contract in TRUTH.items():
        if {c.name for c in contract.columns if c.required} <= set(schema.names):
            return shape
    raise TableError(
        f"{table}: the columns are none of the known shapes",
        expected="(user_id, item_id) or (user_id, item_ids)",
        got=f"columns {', '.join(schema.names)}",
        where=path,
    )


def _same_ids(
    table: str,
    schema: pa.Schema,
    columns: list[tuple[str, IdType]],
    paths: list[str],
) -> None:
    for column, want in columns:
        found = schema.field(column).type
        if not is_empty(found):
            same_id_type(table, column, id_type(found), want, paths[0])


def _pairs(plan: RunPlan, paths: list[str]) -> pl.LazyFrame:
    """`user_id, item_id, weight` of all files."""
    shape, schema = _shape(paths, "truth")
    item = "item_ids" if shape == "wide" else "item_id"
    ids = [("user_id", plan.user_id_type), (item, plan.item_id_type)]
    _same_ids("truth", schema, ids, paths)
    named = [name for name in _WEIGHTS if name in schema.names and shape == "long"]
    if len(named) > 1:
        raise TableError(
            "truth: two columns say how relevant an item is",
            expected="weight or relevance",
            got=" and ".join(named),
            where=paths[0],
        )
    one = ID_TYPES[plan.item_id_type]
    wanted = [
        Wanted("user_id", "user_id", ID_TYPES[plan.user_id_type]),
        Wanted("item_id", item, pa.list_(one) if shape == "wide" else one),
        *(Wanted("weight", name, pa.float64()) for name in named),
    ]
    frame = scan_columns("truth", [Piece(path, 0) for path in paths], wanted)
    if shape == "wide":
        frame = frame.explode("item_id", empty_as_null=False, keep_nulls=True)
    return frame if named else frame.with_columns(pl.lit(1.0).alias("weight"))


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
