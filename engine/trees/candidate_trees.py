"""Token trees of candidate sets, own and shared, and what is known of them before they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.backend import ROUNDING
from engine.trees.sid_trie import SidTrie
from engine.trees.token_tree import TokenTree, build_token_tree, repeat_trees
from schemas.requests import CandidateSets, Ints, ItemScores, Ragged, UserBatch, place_within

if TYPE_CHECKING:
    from engine.trees.device_trie import DeviceTrie


class CandidateTrees:
    """Trees over one catalog.

    With `forward_leaves`, candidates' last tokens are forwarded too, and `more` tokens behind each.
    """

    def __init__(self, trie: SidTrie, *, forward_leaves: bool = False, more: int = 0) -> None:
        self._trie = trie
        self._forward_leaves = forward_leaves
        self._more = more
        self._shared: tuple[Ragged, TokenTree] | None = None

    def rows(self, candidates: CandidateSets) -> tuple[Ints, TokenTree | None]:
        """Nodes that each user's candidates forward `[U]`; and the tree of sets that are shared,
        built once for all shards that have them."""
        sets = candidates.sets
        if candidates.shared and self._shared is not None and _same(self._shared[0], sets):
            tree = self._shared[1]
        else:
            tree = build_token_tree(self._trie, sets, forward_leaves=self._forward_leaves)
            self._shared = (sets, tree) if candidates.shared else None
        rows = (tree.rows_per_user + sets.lengths * self._more)[candidates.of_user]
        return rows, tree if candidates.shared else None

    def of_pack(self, shared: TokenTree | None, candidates: CandidateSets) -> TokenTree:
        """The trees of some users: those of shared sets repeated, others built."""
        if shared is not None:
            return repeat_trees(shared, candidates.sets, candidates.of_user)
        return build_token_tree(self._trie, candidates.lists(), forward_leaves=self._forward_leaves)

    def tokens(self, candidates: CandidateSets) -> Ints:
        """Tokens of each user's candidates, and of what stands behind each `[U]`."""
        trie, sets = self._trie, candidates.sets
        depth = trie.depth_of_node[trie.node_of_sid[trie.sid_of_item[sets.values]]]
        total = np.bincount(sets.row_ids, weights=depth + self._more, minlength=sets.num_rows)
        return total.astype(np.int64)[candidates.of_user]


def _same(one: Ragged, other: Ragged) -> bool:
    return np.array_equal(one.offsets, other.offsets) and np.array_equal(one.values, other.values)


def without_forbidden(scored: ItemScores, users: UserBatch) -> ItemScores:
    """Without items of shared sets that are excluded or not eligible for their user."""
    assert users.candidates is not None, "scored without candidates"
    if not users.candidates.shared:
        return scored  # a set of one's own holds none
    allowed = allowed_items(scored.user, scored.item, users)
    if allowed.all():
        return scored
    labels = None if scored.labels is None else scored.labels[allowed]
    return ItemScores(
        user=scored.user[allowed],
        item=scored.item[allowed],
        score=scored.score[allowed],
        labels=labels,
    )


def allowed_items(user: Ints, item: Ints, users: UserBatch) -> NDArray[np.bool_]:
    """Whether each user may get each item: not excluded, and eligible; elementwise."""
    allowed = np.ones(len(user), dtype=bool)
    if users.excluded is not None and len(users.excluded.values):
        size = int(max(item.max(initial=0), users.excluded.values.max())) + 1
        gone = users.excluded.row_ids * size + users.excluded.values
        allowed &= ~np.isin(user * size + item, gone)
    if users.eligibility is not None:
        allowed &= users.eligibility.of(user, item)
    return allowed


def kth_of_candidates(index: DeviceTrie, scored: ItemScores, k: Ints) -> NDArray[np.float32]:
    """Score of the k-th semantic ID, k of each user `[U]`, among its scored candidates, counted as
    the quota counts them `[U]`; -inf where there are fewer."""
    trie = index.trie
    sid = trie.sid_of_item[scored.item].astype(np.int64)
    key, first = np.unique(scored.user * trie.num_sids + sid, return_index=True)
    user, sid, score = key // trie.num_sids, key % trie.num_sids, scored.score[first]
    order = np.lexsort((sid, -score.astype(np.float64), user))
    user, sid, score = user[order], sid[order], score[order]
    if index.quota is not None:
        group = trie.prefix_of_sid(index.quota.level)[sid]
        kept = place_within(user * trie.num_nodes + group) < index.quota.max_items
        user, score = user[kept], score[kept]
    kth = np.full(len(k), -np.inf, dtype=np.float32)
    last = place_within(user) == k[user] - 1
    kth[user[last]] = score[last]
    return kth


def unsound(scored: ItemScores, labels: Ints | None) -> NDArray[np.bool_]:
    """Entries `[M]` that the model gave no log-probability: NaN, -inf, or one above 0.

    Args:
        labels: how many each user has `[U]`, where labels are scored; what is behind them is NaN.
    """
    scores = scored.score[:, None] if scored.labels is None else scored.labels
    bad = ~np.isfinite(scores) | (scores > ROUNDING)
    if scored.labels is not None:
        assert labels is not None, "label scores come with the number of labels"
        bad &= np.arange(scores.shape[1]) < labels[scored.user][:, None]
    return np.asarray(bad.any(axis=1))
