"""Means over users and their bootstrap intervals, shard by shard.

The bootstrap draws users with replacement, many times, and takes the mean of each draw. How often a
user is drawn is close to a Poisson number of mean 1, independent of all other users, so that shards
can be added one after another and none is kept: the online bootstrap of Oza and Russell (2001), as
Chamandy et al., Estimating uncertainty for massive data streams (2012), use it for means. Intervals
are percentiles of the draws: Efron, Bootstrap methods, Annals of Statistics 7(1), 1979.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schemas.evaluations import Estimate

Floats = NDArray[np.float64]

_CELLS = 1 << 22  # draws x users held at a time
_TAILS = (2.5, 97.5)  # percentiles of a 95 % interval


def draw(num_users: int, resamples: int, seed: list[int]) -> Floats:
    """How often each draw holds each user `[1 + resamples, num_users]`; the first: once each."""
    rng = np.random.default_rng(seed)
    out = np.ones((1 + resamples, num_users))
    out[1:] = rng.poisson(1.0, (resamples, num_users))
    return out


def chunks(num_users: int, resamples: int) -> list[slice]:
    """Parts of a shard's users that are drawn at a time."""
    size = max(1, _CELLS // (1 + resamples))
    return [slice(at, min(at + size, num_users)) for at in range(0, num_users, size)]


class Means:
    """Means of metrics over users, in the plain sample and in each draw."""

    def __init__(self, num_metrics: int, resamples: int) -> None:
        self.users = 0
        self._sums = np.zeros((1 + resamples, num_metrics))
        self._counts = np.zeros((1 + resamples, num_metrics))

    @property
    def cells(self) -> int:
        """Means that are kept: samples times metrics."""
        return self._sums.size

    def add(self, values: Floats, drawn: Floats) -> None:
        """Add users: `values` `[U, metrics]`, NaN where one has none; `drawn` from `draw`."""
        there = ~np.isnan(values)
        self.users += len(values)
        self._sums += drawn @ np.where(there, values, 0.0)
        self._counts += drawn @ there.astype(np.float64)

    def _means(self) -> Floats:
        out = np.full(self._sums.shape, np.nan)
        np.divide(self._sums, self._counts, out=out, where=self._counts > 0)
        return out

    def estimates(self) -> list[Estimate]:
        """Each metric's mean and interval."""
        return _estimates(self._means())

    def differences(self, these: slice, from_these: slice) -> list[Estimate]:
        """Some metrics' means minus others'. A draw holds the same users for both."""
        means = self._means()
        return _estimates(means[:, these] - means[:, from_these])


def _estimates(draws: Floats) -> list[Estimate]:
    values, rest = draws[0], draws[1:]
    if not len(rest):
        return [Estimate(value=_number(value)) for value in values]
    # A draw may hold nobody who has the metric; where most do not, there is no interval to give.
    usable = np.isfinite(rest).mean(axis=0) > 0.5
    filled = np.where(usable, rest, 0.0)
    low, high = np.nanpercentile(filled, _TAILS, axis=0)
    return [
        Estimate(
            value=_number(value),
            low=_number(lo) if ok else None,
            high=_number(hi) if ok else None,
        )
        for value, lo, hi, ok in zip(values, low, high, usable, strict=True)
    ]


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
