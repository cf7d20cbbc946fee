"""Label scoring: the probability of labels behind each candidate (the Score API).

An item's tokens follow the prompt, then a suffix that is the same for all, and p(label) is read at
the last of them. Items hang from one prompt as branches of a token tree, so that none sees another
and their order changes nothing; a prefix that items share is forwarded once.

Source: the Score API of SGLang (`/v1/score`: query, items, label_token_ids, apply_softmax).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.backend import NodeBatch, Norm, Targets, TokenColumns
from engine.decoding import Decoding
from engine.prompts.labels import LabelTokens
from engine.scoring.items import forward_tree, tree_parts
from engine.trees.token_tree import TokenTree, build_token_tree
from schemas.requests import Ints, Ragged, place_within


def label_items(
    decoding: Decoding,
    candidates: Ragged,
    labels: LabelTokens,
    *,
    suffix: Ints,
    softmax: bool,
    max_rows: int,
    tree: TokenTree | None = None,
) -> tuple[Tensor, Ints]:
    """log p of each user's labels behind each of its candidates.

    Args:
        candidates: items of each user `[U]`.
        labels: of each user `[U]`, none empty.
        suffix: tokens between an item and its label.
        softmax: over the user's labels; else over the whole vocabulary.
        max_rows: nodes kept at a time; larger sets go in parts over the one prefill.
        tree: of these candidates with their leaves forwarded, where the caller has it already.

    Returns:
        `[M, most labels]` float32 nats, NaN behind a user's own labels; and the nodes forwarded per
        user `[U]`.
    """
    index = decoding.index
    most = int(labels.of_user.lengths.max(initial=1))
    scores = torch.full((len(candidates.values), most), torch.nan, device=index.device)
    rows = np.zeros(candidates.num_rows, dtype=np.int64)
    if tree is None:
        tree = build_token_tree(index.trie, candidates, forward_leaves=True)
    user = candidates.row_ids
    parts = [(np.arange(len(user), dtype=np.int64), tree)]
    if tree.num_rows + len(user) * len(suffix) > max_rows:
        more = 1 + len(suffix)
        parts = list(tree_parts(index, candidates, max_rows, forward_leaves=True, more=more))
    for part, one in parts:
        with decoding.temporary():
            starts = forward_tree(decoding, one, max_rows)
            leaves = _leaves(one, starts, user[part])
            at = _append_suffix(decoding, leaves, suffix)
            asked = labels.of_user.take(leaves.user)
            values = _read(decoding, at, asked, labels.columns, softmax)
            scores[index.put(part), : values.shape[1]] = values[index.put(leaves.of_candidate)]
        rows += one.rows_per_user
        rows += np.bincount(leaves.user, minlength=len(rows)) * len(suffix)
    return scores, rows


@dataclass(frozen=True, slots=True)
class _Leaves:
    """The distinct leaves of a tree; candidates of one user with the same tokens share one."""

    row: Ints  # context row, ascending
    user: Ints
    depth: Ints
    of_candidate: Ints  # [M]


def _leaves(tree: TokenTree, starts: Ints, user: Ints) -> _Leaves:
    row = np.empty(len(user), dtype=np.int64)
    for depth, level in enumerate(tree.levels):
        here = tree.leaf_level == depth
        row[here] = starts[depth] + level.forward_index[tree.leaf_position[here]]
    rows, first, of = np.unique(row, return_index=True, return_inverse=True)
    return _Leaves(rows, user[first], tree.leaf_level[first] + 1, of.astype(np.int64))


def _append_suffix(decoding: Decoding, leaves: _Leaves, suffix: Ints) -> Ints:
    """Forward the suffix behind each leaf in one pass; the rows of its last token `[leaves]`."""
    num, steps = len(leaves.row), len(suffix)
    if not num or not steps:
        return leaves.row
    index, begin = decoding.index, decoding.context.num_rows
    step, leaf = np.divmod(np.arange(steps * num), num)
    slot = place_within(leaves.user[leaf])
    decoding.extend(
        NodeBatch(
            prompt=index.put(leaves.user[leaf]),
            parent=index.put(
                np.where(step == 0, leaves.row[leaf], begin + (step - 1) * num + leaf)
            ),
            token=index.put(suffix[step]),
            depth=index.put(leaves.depth[leaf] + 1 + step),
            slot=index.put(slot),
            num_slots=int(slot.max()) + 1,
            max_depth=int(leaves.depth.max()) + steps,
        ),
    )
    return begin + (steps - 1) * num + np.arange(num)


def _read(
    decoding: Decoding,
    at: Ints,
    labels: Ragged,
    columns: TokenColumns,
    softmax: bool,
) -> Tensor:
    """log p of each row's labels `[rows, most labels]`, NaN behind them."""
    index = decoding.index
    row, place = labels.row_ids, np.arange(len(labels.values)) - labels.offsets[labels.row_ids]
    out = torch.full((len(at), int(labels.lengths.max(initial=1))), torch.nan, device=index.device)
    if not len(at):
        return out
    targets = Targets(row=index.put(row), column=index.put(labels.values), columns=columns)
    # Under `trie` the softmax is over a row's own targets: here, its labels.
    norm = Norm("trie" if softmax else "full_vocab")
    out[targets.row, index.put(place)] = decoding.log_probs(index.put(at), targets, norm)
    return out
