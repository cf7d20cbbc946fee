"""Distributions over more rows than fit in memory: counted by polars as it streams the files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from schemas.requests import Ints

Floats = NDArray[np.float64]

_FINE = 4000  # bins of the first count; what is shown is read from them
_FEWEST, _MOST = 8, 40  # bars
_TAIL = 0.002  # share of values that the leftmost bar may hold besides its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A histogram and a few quantiles. `counts[i]` values lie in `edges[i] .. edges[i + 1]`; the
    first bar also holds what lies below it.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    p5: float
    p50: float
    p95: float
    low: float
    high: float

    @property
    def total(self) -> int:
        """Values counted."""
        return sum(self.counts)

    @property
    def shares(self) -> Floats:
        """Share of the values in each bar."""
        return np.asarray(self.counts) / max(self.total, 1)


def of_numbers(frame: pl.LazyFrame, column: str) -> Distribution | None:
    """The distribution of a real column; None when it has no value.

    Quantiles are right to a 4000th of the range.

    Args:
        frame: scanned, never collected whole.
        column: its nulls are left out.
    """
    value = pl.col(column).cast(pl.Float64)
    ends = frame.select(value.min().alias("low"), value.max().alias("high"))
    low, high = ends.collect(engine="streaming").row(0)
    if low is None:
        return None
    width = (high - low) / _FINE
    if low + width == low:  # one value, or as good as one: a bar around it, on an axis of its size
        return _one_value(frame, column, low, high)
    fine = _bins(frame, column, low, width, _FINE)
    edges: Floats = low + width * np.arange(_FINE + 1, dtype=np.float64)
    return _shown(edges, fine, low, high)


def _one_value(frame: pl.LazyFrame, column: str, low: float, high: float) -> Distribution:
    half = max(abs(low), abs(high)) * 0.01 or 0.5
    count = int(frame.select(pl.col(column).count()).collect(engine="streaming").item())
    return Distribution(
        edges=(low - half, high + half),
        counts=(count,),
        p5=low,
        p50=low,
        p95=high,
        low=low,
        high=high,
    )


def of_integers(values: Ints, counts: Ints) -> Distribution | None:
    """The distribution of whole numbers, each given with how often it occurs."""
    if counts.sum() == 0:
        return None
    there = np.flatnonzero(counts)
    values = values.astype(np.int64)[there]
    low, high = int(values.min()), int(values.max())
    step = max(1, -(-(high - low + 1) // _bars(int(counts.sum()))))
    bars = np.bincount((values - low) // step, weights=counts[there])
    edges = low - 0.5 + step * np.arange(len(bars) + 1)
    order = np.argsort(values)
    p5, p50, p95 = _quantiles(values[order].astype(np.float64), counts[there][order])
    return Distribution(
        edges=tuple(edges.tolist()),
        counts=tuple(int(n) for n in bars),
        p5=p5,
        p50=p50,
        p95=p95,
        low=low,
        high=high,
    )


def of_shares(values: Floats, steps: int) -> Distribution | None:
    """The distribution of shares between 0 and 1, in bars around 0, 1/steps, 2/steps, … 1."""
    if not len(values):
        return None
    bars = np.bincount(np.rint(values * steps).astype(np.int64), minlength=steps + 1)
    p5, p50, p95 = np.quantile(values, [0.05, 0.5, 0.95], method="inverted_cdf").tolist()
    return Distribution(
        edges=tuple(((np.arange(steps + 2) - 0.5) / steps).tolist()),
        counts=tuple(bars.tolist()),
        p5=p5,
        p50=p50,
        p95=p95,
        low=float(values.min()),
        high=float(values.max()),
    )


def in_bars(frame: pl.LazyFrame, column: str, edges: Sequence[float]) -> tuple[int, ...]:
    """How many values lie in each bar of another distribution; outliers in the outermost."""
    num = len(edges) - 1
    return tuple(_bins(frame, column, edges[0], edges[1] - edges[0], num).tolist())


def _bins(frame: pl.LazyFrame, column: str, first: float, width: float, num: int) -> Ints:
    """Values in each of `num` bins of one width; those outside are in the outermost."""
    value = pl.col(column).cast(pl.Float64)
    bin_of = ((value - first) / width).floor().clip(0, num - 1).cast(pl.Int32).alias("bin")
    found = frame.select(bin_of).drop_nulls().group_by("bin").len().collect(engine="streaming")
    counts = np.zeros(num, dtype=np.int64)
    counts[found["bin"].to_numpy()] = found["len"].to_numpy()
    return counts


def _bars(total: int) -> int:
    """How many bars so many values fill: the Rice rule, 2 n^(1/3)."""
    return int(min(_MOST, max(_FEWEST, math.ceil(2 * math.cbrt(total)))))


def _quantiles(values: Floats, counts: Ints) -> tuple[float, ...]:
    """The 5th, 50th and 95th percentile of sorted values with their counts."""
    reached = counts.cumsum()
    at = np.searchsorted(reached, np.asarray([0.05, 0.5, 0.95]) * reached[-1])
    return tuple(values[at].tolist())


def _shown(edges: Floats, fine: Ints, low: float, high: float) -> Distribution:
    """Bars wide enough to see, from where the values begin in earnest."""
    p5, p50, p95 = _quantiles((edges[1:] + edges[:-1]) / 2, fine)
    begin = int(np.searchsorted(fine.cumsum(), _TAIL * fine.sum()))
    step = max(1, -(-(_FINE - begin) // _bars(int(fine.sum()))))
    begin = max(0, _FINE - step * -(-(_FINE - begin) // step))
    bars = np.add.reduceat(fine[begin:], np.arange(0, _FINE - begin, step))
    bars[0] += fine[:begin].sum()
    cuts = edges[np.minimum(begin + step * np.arange(len(bars) + 1), _FINE)]
    return Distribution(
        edges=tuple(cuts.tolist()),
        counts=tuple(bars.tolist()),
        p5=min(max(p5, low), high),
        p50=min(max(p50, low), high),
        p95=min(max(p95, low), high),
        low=low,
        high=high,
    )
