"""The best k candidates of every user, by best-first search of their token trees.

A candidate that cannot reach the k-th is not scored: of 500 candidates about one prefix in seven
goes through the model. Lists are those of scoring all, to the bit where the backend's rows are
independent of their batch (float32 on a CPU).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.decoding import Decoding
from engine.search.best_first import Bounds, Limits, TooManyNodes, best_first
from engine.search.cost import first_round
from engine.search.masks import Mask
from engine.trees.search_tree import candidate_forest
from engine.trees.token_tree import TokenTree
from schemas.requests import Ints, ItemScores, Ragged
from schemas.search_work import SearchWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The best candidates, and what became of each user `[U]`."""

    scored: ItemScores
    failed: NDArray[np.bool_]  # no log-probability where it could have changed the list
    work: SearchWork


def rank_candidates(
    decoding: Decoding,
    candidates: Ragged,
    tree: TokenTree,
    *,
    k: int,
    max_nodes: int,
    k_of: Ints | None = None,
) -> Ranking | None:
    """The best `k` semantic IDs among each user's candidates `[U]`, all items of each; None where
    the search would hang more than `max_nodes` nodes from the prompts.

    A user has failed where the model gave NaN to what could have reached its list, or probability
    0 to what its list lacks.

    Args:
        tree: of these candidates.
        k_of: of each user `[U]`, where some want fewer than `k`.
    """
    index = decoding.index
    bounds = Bounds(None if k_of is None else index.put(k_of).clamp(max=k))
    prompts = torch.arange(candidates.num_rows, device=index.device)
    first = first_round(decoding.backend.facts, candidates.num_rows)
    limits = Limits(k=k, first=first, max_nodes=max_nodes)
    before = decoding.context.num_rows
    try:
        forest = candidate_forest(index, tree)
        found = best_first(decoding, forest, Mask(prompts), limits, bounds)
    except TooManyNodes:
        decoding.context.rewind(before)
        return None
    score, sid = found.pool.score.cpu().numpy(), found.pool.sid.cpu().numpy()
    user, place = np.nonzero(score > -np.inf)
    entry, at = _items_of(candidates, index.trie.sid_of_item, user, sid[user, place])
    scored = ItemScores(
        user=user[entry], item=candidates.values[at], score=score[user, place][entry]
    )
    failed = found.failed | (found.refused & found.short)
    return Ranking(
        scored=scored,
        failed=failed.cpu().numpy(),
        work=SearchWork(
            nodes=found.nodes.cpu().numpy(),
            rounds=found.rounds.cpu().numpy(),
            stopped=found.stopped.cpu().numpy(),
        ),
    )


def _items_of(
    candidates: Ragged, sid_of_item: NDArray[np.int32], user: Ints, sid: Ints
) -> tuple[Ints, Ints]:
    """A user's candidates that have a SID: which (user, SID) each is of, and where it stands."""
    size = int(sid_of_item.max()) + 1
    keys = candidates.row_ids * size + sid_of_item[candidates.values]
    order = np.argsort(keys, kind="stable")
    wanted = user * size + sid
    begin = np.searchsorted(keys[order], wanted, side="left")
    count = np.searchsorted(keys[order], wanted, side="right") - begin
    entry = np.repeat(np.arange(len(wanted)), count)
    place = np.arange(len(entry)) - np.repeat(np.cumsum(count) - count, count)
    return entry, order[begin[entry] + place]
