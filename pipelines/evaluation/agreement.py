"""How alike two lists of one user are.

All of it comes from the items that both lists hold: at which rank each list has them, and with
which score. `m` is the larger of an item's two ranks, so that the first d items of both lists share
as many as there are items with `m <= d`.

    overlap@k  items that the first k of both lists share / the longer of the two, cut to k
    rbo        rank-biased overlap, extrapolated from the ends of the lists
    tau        Kendall's tau-b of the common items, by score: equal scores are tied

Rank-biased overlap is the share of common items at depth d, averaged over d = 1, 2, … with weights
`(1 - p) p^(d-1)`. Beyond the ends of the lists the agreement found there is taken to go on. With s
and l the shorter and the longer length and X_d the common items at depth d:

    rbo = (1-p)/p * (sum_{d=1..l} X_d/d p^d + sum_{d=s+1..l} X_s (d-s)/(s d) p^d)
          + ((X_l - X_s)/l + X_s/s) p^l

Sources: Webber, Moffat and Zobel, A similarity measure for indefinite rankings, TOIS 28(4), 2010,
equation 32. Kendall, The treatment of ties in ranking problems, Biometrika 33(3), 1945.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.requests import Ints, place_within

Floats = NDArray[np.float64]

_CELLS = 1 << 22  # pairs of items compared at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonItems:
    """Lists of U users in two runs, and the items both hold, in the order of users."""

    length_a: Ints  # [U] at least 1
    length_b: Ints  # [U] at least 1
    user: Ints  # [M] ascending
    rank_a: Ints  # [M] 1-based
    rank_b: Ints  # [M]
    score_a: Floats  # [M]
    score_b: Floats  # [M]

    @property
    def depth(self) -> Ints:
        """`m` of each item `[M]`."""
        return np.maximum(self.rank_a, self.rank_b)

    def overlap(self, k: int) -> Floats:
        """overlap@k of each user `[U]`."""
        shared = np.bincount(self.user[self.depth <= k], minlength=len(self.length_a))
        longer = np.minimum(np.maximum(self.length_a, self.length_b), k)
        out: Floats = shared / longer
        return out

    def same_list(self) -> NDArray[np.bool_]:
        """Users whose lists hold the same items at the same ranks `[U]`."""
        stays = np.bincount(self.user[self.rank_a == self.rank_b], minlength=len(self.length_a))
        same: NDArray[np.bool_] = (self.length_a == self.length_b) & (stays == self.length_a)
        return same

    def rbo(self, p: float) -> Floats:
        """Rank-biased overlap of each user `[U]`, 0 < p < 1."""
        users = len(self.length_a)
        short, long = (
            np.minimum(self.length_a, self.length_b),
            np.maximum(self.length_a, self.length_b),
        )
        at = np.arange(1, (int(long.max()) if users else 0) + 1)
        powers = np.concatenate([[0.0], np.cumsum(p**at)])  # sum of p^d for d = 1..n
        shares = np.concatenate([[0.0], np.cumsum(p**at / at)])  # sum of p^d / d
        weight = shares[long[self.user]] - shares[self.depth - 1]
        inside = np.bincount(self.user, weight, minlength=users)
        x_long = np.bincount(self.user, minlength=users)
        x_short = np.bincount(self.user[self.depth <= short[self.user]], minlength=users)
        tail = powers[long] - powers[short] - short * (shares[long] - shares[short])
        beyond = x_short / short * tail
        ends = ((x_long - x_short) / long + x_short / short) * p**long
        out: Floats = (1 - p) / p * (inside + beyond) + ends
        return out

    def tau(self) -> Floats:
        """Kendall's tau-b of each user `[U]`; NaN without two common items that are not tied."""
        users = len(self.length_a)
        count = np.bincount(self.user, minlength=users)
        out = np.full(users, np.nan)
        starts = np.cumsum(count) - count
        place = place_within(self.user)
        order = np.argsort(count, kind="stable")  # users of about one length go together
        order = order[count[order] > 1]
        while len(order):
            # Longest first: the width of a part is that of its first user.
            width = int(count[order[-1]])
            part, order = np.split(order[::-1], [max(1, _CELLS // width**2)])
            order = order[::-1]
            out[part] = self._tau_of(part, width, starts, count, place)
        return out

    def _tau_of(self, part: Ints, width: int, starts: Ints, count: Ints, place: Ints) -> Floats:
        """Of some users, each with at most `width` common items."""
        at = starts[part][:, None] + np.arange(width)
        there = np.arange(width) < count[part][:, None]
        at = np.where(there, at, 0)
        pairs = np.triu(there[:, :, None] & there[:, None, :], 1)

        def signs(score: Floats) -> NDArray[np.int8]:
            mine = score[at]
            return np.where(pairs, np.sign(mine[:, :, None] - mine[:, None, :]), 0).astype(np.int8)

        a, b = signs(self.score_a), signs(self.score_b)
        agree = (a * b).sum(axis=(1, 2), dtype=np.int64)
        untied = [np.abs(one).sum(axis=(1, 2), dtype=np.int64) for one in (a, b)]
        scale = np.sqrt((untied[0] * untied[1]).astype(np.float64))  # exact where both are one
        out = np.full(len(part), np.nan)
        np.divide(agree, scale, out=out, where=scale > 0)
        return out
