"""Quality of ranked lists against what users turned to later: one number per user and metric.

A list is a row of items `[U, K]`, best first, -1 behind its end. `g(r)` is the weight of the item
at rank r in the truth, 0 when it is not there; `T` is the number of items of the truth.

    recall@k         hits in the first k / T
    recall_capped@k  hits in the first k / min(k, T): 1 is possible whatever T is
    ndcg@k           sum of g(r) / log2(r + 1) over the first k, divided by that of the best order
    mrr@k            1 / rank of the first hit within k, or 0
    hit_rate@k       1 when there is a hit within k, or 0
    map@k            sum over hits within k of (hits up to that rank / rank), divided by T
    novelty@k        mean self-information -log2 p(item) over the first k

Sources: NDCG with linear gain: Järvelin and Kekäläinen, Cumulated gain-based evaluation of IR
techniques, TOIS 20(4), 2002. MRR: Voorhees, The TREC-8 question answering track report, 1999. MAP
and the cut-off forms: as trec_eval computes `recall`, `ndcg_cut`, `map_cut` and `success`. Novelty:
Zhou et al., Solving the apparent diversity-accuracy dilemma of recommender systems, PNAS 107(10),
2010.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.requests import Ints, Ragged, place_within

Floats = NDArray[np.float64]

LIST_METRICS = ("recall", "recall_capped", "ndcg", "mrr", "hit_rate", "map", "novelty")


@dataclass(frozen=True, slots=True)
class UserTruth:
    """Relevant items of each user; every user has at least one."""

    items: Ragged  # [U] catalog positions, each once per user; -1: not in the catalog
    weights: Floats  # [items] above 0

    def gains(self, lists: Ints, num_items: int) -> Floats:
        """The weight of each place of the lists `[U, K]`, 0 where the item is not relevant."""
        known = self.items.values >= 0
        keys = (self.items.row_ids * num_items + self.items.values)[known]
        order = np.argsort(keys)
        keys, weights = keys[order], self.weights[known][order]
        wanted = np.arange(len(lists))[:, None] * num_items + lists
        if not len(keys):
            return np.zeros(lists.shape)
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        hit = (keys[at] == wanted) & (lists >= 0)
        return np.where(hit, weights[at], 0.0)

    def ideal(self, width: int) -> Floats:
        """The gains `[U, width]` of the best list there is."""
        user = self.items.row_ids
        order = np.lexsort((-self.weights, user))
        place = place_within(user)  # `user` ascends, so that sorted rows keep their places
        kept = place < width
        out = np.zeros((self.items.num_rows, width))
        out[user[kept], place[kept]] = self.weights[order][kept]
        return out


def metric_names(ks: tuple[int, ...]) -> list[str]:
    """Columns of `user_metrics`."""
    return [f"{name}@{k}" for name in LIST_METRICS for k in ks]


def user_metrics(
    lists: Ints, truth: UserTruth, ks: tuple[int, ...], information: Floats | None, num_items: int
) -> Floats:
    """Every metric of every user `[U, metrics]`, in the order of `metric_names`.

    Args:
        lists: items `[U, K]`, K at least the largest of `ks`; -1 behind a list's end.
        truth: of the same users.
        information: of each item `[N]`, see `self_information`; None: novelty is NaN.
        num_items: N.
    """
    gains = truth.gains(lists, num_items)
    width = lists.shape[1]
    rank = np.arange(1, width + 1)
    discount = 1 / np.log2(rank + 1)
    hit = gains > 0
    hits = hit.cumsum(axis=1)
    dcg, best = (gains * discount).cumsum(axis=1), (truth.ideal(width) * discount).cumsum(axis=1)
    precision = np.where(hit, hits / rank, 0.0).cumsum(axis=1)
    reciprocal = np.maximum.accumulate(np.where(hit, 1 / rank, 0.0), axis=1)
    novelty = _mean_information(lists, information)
    total = truth.items.lengths
    at = np.asarray(ks) - 1
    columns = (
        hits[:, at] / total[:, None],
        hits[:, at] / np.minimum(total[:, None], np.asarray(ks)),
        dcg[:, at] / best[:, at],
        reciprocal[:, at],
        (hits[:, at] > 0).astype(np.float64),
        precision[:, at] / total[:, None],
        novelty[:, at],
    )
    return np.concatenate(columns, axis=1)


def _mean_information(lists: Ints, information: Floats | None) -> Floats:
    """Mean over the first 1, 2, …, K items of each list `[U, K]`; NaN where there is none."""
    if information is None:
        return np.full(lists.shape, np.nan)
    there = lists >= 0
    known = np.where(there, information[lists], 0.0).cumsum(axis=1)
    count = there.cumsum(axis=1)
    return np.where(count > 0, known / np.maximum(count, 1), np.nan)


def self_information(popularity: Floats) -> Floats:
    """-log2 of each item's share of all interactions, in bits; one is added to every item's count,
    so that an item nobody has taken yet is rare and not impossible.
    """
    out: Floats = -np.log2((popularity + 1) / (popularity.sum() + len(popularity)))
    return out
