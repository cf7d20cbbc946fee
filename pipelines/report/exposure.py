"""How the lists of a run spread over the catalog.

Over all n items of the catalog, those in no list included, x_i the number of lists that item i is
in, in ascending order:

    coverage = items with x_i > 0, of n
    Gini     = Σ_i (2 i - n - 1) x_i / (n Σ_i x_i)    0: all alike; towards 1: one item has them all
    top 1 %  = share of all recommendations that the ⌈n / 100⌉ most recommended items have

Sources: Gini, Variabilità e mutabilità (1912); as a measure of recommendations: Fleder and
Hosanagar, Management Science 55(5), 2009.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pipelines.catalog.items import open_items, titles
from schemas.runs import RunPlan

_SHOWN = 10
_POINTS = 101  # of the curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """What share of the catalog is recommended, and how unevenly."""

    catalog_items: int
    recommended_items: int
    gini: float | None  # None: nothing is recommended
    top_share: float | None
    curve: tuple[tuple[float, float], ...]  # share of the items, share of the recommendations
    top: tuple[tuple[str, str | None, int], ...]  # item id, title, lists

    @property
    def coverage(self) -> float:
        """Share of the catalog that is in some list."""
        return self.recommended_items / max(self.catalog_items, 1)


def measure_exposure(plan: RunPlan, rows: pl.LazyFrame) -> Exposure:
    """Count the lists each item is in; memory is bounded by the catalog."""
    catalog = open_items(plan)
    assert catalog is not None, "recommendations need a catalog"
    lists = rows.group_by("item_id").len("lists").collect(engine="streaming")
    lists = lists.sort("lists", "item_id", descending=[True, False])
    num = len(catalog.table)
    counts = np.zeros(num, dtype=np.int64)
    counts[num - len(lists) :] = lists["lists"].to_numpy()[::-1]
    top = lists.head(_SHOWN)
    names = titles(plan.config, catalog, top["item_id"].to_arrow()).to_pylist()
    ids = top["item_id"].cast(pl.String).to_list()
    return Exposure(
        catalog_items=num,
        recommended_items=len(lists),
        gini=gini(counts),
        top_share=top_share(counts),
        curve=_curve(counts),
        top=tuple(zip(ids, names, top["lists"].to_list(), strict=True)),
    )


def gini(counts: NDArray[np.int64]) -> float | None:
    """Gini coefficient of counts in ascending order `[N]`; None when all are 0."""
    total, num = int(counts.sum()), len(counts)
    if total == 0:
        return None
    weights = 2.0 * np.arange(1, num + 1) - num - 1
    return float((weights * counts).sum() / (num * total))


def top_share(counts: NDArray[np.int64]) -> float | None:
    """What the most frequent 1 % (at least one) have of all, counts in ascending order."""
    total = int(counts.sum())
    most = len(counts) - math.ceil(len(counts) / 100)
    return float(counts[most:].sum() / total) if total else None


def _curve(counts: NDArray[np.int64]) -> tuple[tuple[float, float], ...]:
    """The most recommended x of the items have y of the recommendations."""
    total = int(counts.sum())
    if total == 0:
        return ()
    reached = np.concatenate([[0.0], counts[::-1].cumsum() / total])
    x = np.linspace(0.0, 1.0, _POINTS)
    y = np.interp(x * len(counts), np.arange(len(reached)), reached)
    return tuple(zip(x.tolist(), y.tolist(), strict=True))
