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

from engine.backend import Backend, Context, NodeBatch, Norm, Targets, TokenColumns
from engine.scoring.items import forward_tree, put, tree_parts
from engine.trees.device_trie import DeviceTrie
from engine.trees.token_tree import TokenTree, build_token_tree
from schemas.requests import Ints, Ragged, place_within


def label_items(
    backend: Backend,
    context: Context,
    index: DeviceTrie,
    candidates: Ragged,
    labels: Ragged,
    columns: TokenColumns,
    *,
    suffix: Ints,
    softmax: bool,
    max_rows: int,
    tree: TokenTree | None = None,
) -> tuple[Tensor, Ints]:
    """log p of each user's labels behind each of its candidates.

    Args:
        candidates: items of each user `[U]`.
        labels: of each user `[U]`, as positions in `columns`, none empty.
        columns: the tokens that are labels.
        suffix: tokens between an item and its label.
        softmax: over the user's labels; else over the whole vocabulary.
        max_rows: nodes kept at a time; larger sets go in parts over the one prefill.
        tree: of these candidates with their leaves forwarded, where the caller has it already.

    Returns:
        `[M, most labels]` float32 nats, NaN behind a user's own labels; and the nodes forwarded per
        user `[U]`.
    """
    most = int(labels.lengths.max(initial=1))
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
        before = context.num_rows
        starts = forward_tree(backend, context, index, one, max_rows)
        leaves = _leaves(one, starts, user[part])
        at = _append_suffix(backend, context, index, leaves, suffix)
        values = _read(backend, context, index, at, labels.take(leaves.user), columns, softmax)
        scores[put(part, index), : values.shape[1]] = values[put(leaves.of_candidate, index)]
        context.rewind(before)
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


def _append_suffix(
    backend: Backend, context: Context, index: DeviceTrie, leaves: _Leaves, suffix: Ints
) -> Ints:
    """Forward the suffix behind each leaf in one pass; the rows of its last token `[leaves]`."""
    num, steps = len(leaves.row), len(suffix)
    if not num or not steps:
        return leaves.row
    begin = context.num_rows
    step, leaf = np.divmod(np.arange(steps * num), num)
    slot = place_within(leaves.user[leaf])
    backend.extend(
        context,
        NodeBatch(
            prompt=put(leaves.user[leaf], index),
            parent=put(
                np.where(step == 0, leaves.row[leaf], begin + (step - 1) * num + leaf), index
            ),
            token=put(suffix[step], index),
            depth=put(leaves.depth[leaf] + 1 + step, index),
            slot=put(slot, index),
            num_slots=int(slot.max()) + 1,
            max_depth=int(leaves.depth.max()) + steps,
        ),
    )
    return begin + (steps - 1) * num + np.arange(num)


def _read(
    backend: Backend,
    context: Context,
    index: DeviceTrie,
    at: Ints,
    labels: Ragged,
    columns: TokenColumns,
    softmax: bool,
) -> Tensor:
    """log p of each row's labels `[rows, most labels]`, NaN behind them."""
    row, place = labels.row_ids, np.arange(len(labels.values)) - labels.offsets[labels.row_ids]
    out = torch.full((len(at), int(labels.lengths.max(initial=1))), torch.nan, device=index.device)
    if not len(at):
        return out
    targets = Targets(row=put(row, index), column=put(labels.values, index), columns=columns)
    # Under `trie` the softmax is over a row's own targets: here, its labels.
    norm = Norm("trie" if softmax else "full_vocab")
    out[targets.row, put(place, index)] = backend.log_probs(context, put(at, index), targets, norm)
    return out
