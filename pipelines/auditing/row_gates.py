"""Gates on the rows of recommendations, shard by shard: a user is in one shard, so that each is
checked on its own. None of them may fail.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow.compute as pc

from pipelines.catalog.build import Catalog
from pipelines.catalog.items import open_items
from pipelines.inputs.eligibility import eligible_items
from pipelines.inputs.prepared import shards_of
from pipelines.inputs.read_batches import eligibility_columns
from pipelines.inputs.shard_table import read_shard_table
from schemas.eligibility import with_date
from schemas.runs import RunPlan, Shard, ShardReceipt
from schemas.tables import DUPLICATE, EXCLUDED_LIST

_DETAILS = {  # what is counted, so that it reads right beside 0 as well
    "duplicates": "rows whose item stands in the user's list before",
    "ranks": "rows whose rank is not the one after the row before, from 1",
    "scores": "scores that are NaN, infinite, above 0, or above the one before",
    "catalog_validity": "rows whose item is not in the catalog",
    "excluded_items": "rows whose item is excluded for the user",
    "ineligible_items": "rows whose item task.eligibility does not allow the user",
    "rows": "rows more or fewer than the receipts say",
}


class RowGates:
    """Counts rows that should not be."""

    def __init__(self, plan: RunPlan) -> None:
        catalog = open_items(plan)
        assert catalog is not None, "recommendations need a catalog"
        self._plan, self._catalog = plan, catalog
        self._items = pl.Series("item_id", pl.from_arrow(catalog.item_ids))
        self._shards = shards_of(plan)
        self._bad = dict.fromkeys(_DETAILS, 0)
        self._in_history = 0

    @property
    def counts(self) -> dict[str, tuple[int, str]]:
        """Bad rows of each kind so far, and what they are."""
        return {name: (self._bad[name], detail) for name, detail in _DETAILS.items()}

    @property
    def in_history(self) -> int | None:
        """Rows whose item is in the user's own history; None where no history is read."""
        return self._in_history if self._plan.config.reads_history else None

    def add(self, receipt: ShardReceipt, rows: pl.DataFrame) -> None:
        """Check the rows of one shard."""
        bad, shard = self._bad, self._shards[receipt.shard]
        bad["rows"] += abs(len(rows) - receipt.counts.rows_staged)
        bad["duplicates"] += len(rows) - rows.select("user_id", "item_id").n_unique()
        bad["ranks"] += rows.filter(
            pl.col("rank") != pl.int_range(1, pl.len() + 1).over("user_id")
        ).height
        above = pl.col("score").shift(1).over("user_id")
        bad["scores"] += rows.filter(
            pl.col("score").is_nan()
            | pl.col("score").is_infinite()
            | (pl.col("score") > 0)
            | (pl.col("score") > above).fill_null(value=False)
        ).height
        known = pl.col("item_id").is_in(self._items.implode())
        bad["catalog_validity"] += rows.filter(~known).height
        bad["excluded_items"] += self._rows_in(rows, shard, EXCLUDED_LIST)
        if self._plan.config.reads_history:
            found = self._rows_in(rows, shard, "history")
            self._in_history += found
            if self._plan.config.task.exclude_history:
                bad["excluded_items"] += found
        bad["ineligible_items"] += _ineligible(self._plan, shard, rows, self._catalog)

    def _rows_in(self, rows: pl.DataFrame, shard: Shard, column: str) -> int:
        """Rows whose item is in the user's list of that column of the shard."""
        users = pl.from_arrow(read_shard_table(self._plan, shard, ["user_id", column, DUPLICATE]))
        assert isinstance(users, pl.DataFrame), "a table is a frame"
        first = users.filter(~pl.col(DUPLICATE)).select("user_id", item_id=column)
        pairs = first.explode("item_id").drop_nulls().unique()
        return rows.join(pairs, on=["user_id", "item_id"], how="semi").height


def _ineligible(plan: RunPlan, shard: Shard, rows: pl.DataFrame, catalog: Catalog) -> int:
    """Rows whose item the user's segment may not get."""
    rule = plan.config.task.eligible
    if rule is None or rows.is_empty():
        return 0
    users = read_shard_table(plan, shard)
    at = pc.index_in(rows["user_id"].to_arrow().cast(users["user_id"].type), users["user_id"])
    item = catalog.positions(rows["item_id"].to_arrow().cast(catalog.item_ids.type))
    rule = with_date(rule, plan.ds)
    allowed = eligible_items(rule, eligibility_columns(rule, users.take(at)), catalog.table)
    known = np.flatnonzero(item >= 0)
    return int((~allowed.of(known, item[known])).sum())
