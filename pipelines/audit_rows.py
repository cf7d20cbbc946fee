"""Gates on the rows of recommendations, shard by shard: a user is in one shard, so that each is
checked on its own. None of them may fail.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow.compute as pc

from pipelines.catalog import Catalog
from pipelines.eligibility import eligible_items
from pipelines.items import open_items
from pipelines.prepare import shards_of
from pipelines.read import eligibility_columns
from pipelines.shard_table import read_shard_table
from schemas.runs import RunPlan, Shard, ShardReceipt
from schemas.tables import EXCLUDED_LIST

_DETAILS = {
    "duplicates": "a user has an item more than once",
    "ranks": "ranks are not 1, 2, 3, … per user",
    "scores": "a score is NaN, infinite, above 0, or above the one before it",
    "catalog_validity": "an item is not in the catalog",
    "excluded_items": "a user got an item that is excluded for it",
    "ineligible_items": "a user got an item that task.eligibility does not allow it",
    "rows": "rows differ from the receipts",
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

    @property
    def counts(self) -> dict[str, tuple[int, str]]:
        """Bad rows of each kind so far, and what they are."""
        return {name: (self._bad[name], detail) for name, detail in _DETAILS.items()}

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
        users = pl.from_arrow(read_shard_table(self._plan, shard, ["user_id", EXCLUDED_LIST]))
        assert isinstance(users, pl.DataFrame), "a table is a frame"
        excluded = (
            users.explode(EXCLUDED_LIST).drop_nulls().rename({EXCLUDED_LIST: "item_id"}).unique()
        )
        bad["excluded_items"] += rows.join(excluded, on=["user_id", "item_id"], how="semi").height
        bad["ineligible_items"] += _ineligible(self._plan, shard, rows, self._catalog)


def _ineligible(plan: RunPlan, shard: Shard, rows: pl.DataFrame, catalog: Catalog) -> int:
    """Rows whose item the user's segment may not get."""
    rule = plan.config.task.eligible
    if rule is None or rows.is_empty():
        return 0
    users = read_shard_table(plan, shard)
    at = pc.index_in(rows["user_id"].to_arrow().cast(users["user_id"].type), users["user_id"])
    item = catalog.positions(rows["item_id"].to_arrow().cast(catalog.item_ids.type))
    allowed = eligible_items(rule, eligibility_columns(rule, users.take(at)), catalog.table)
    known = np.flatnonzero(item >= 0)
    return int((~allowed.of(known, item[known])).sum())
