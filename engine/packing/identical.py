"""Users whose work is the same: equal prompts, vectors, candidates, … are computed once.

Rows are grouped by a hash and then compared value by value, so that two users are never taken for
one another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.requests import Ints, Ragged

_SEED = 42  # of the weights of positions
_MIX = np.uint64(0x9E3779B97F4A7C15)


def first_of_its_kind(parts: Sequence[Ragged | NDArray[Any]], num_rows: int) -> Ints:
    """For each row, the first row that equals it in every part `[rows]`; itself when it is new.

    Args:
        parts: lists or arrays `[rows]`, `[rows, n]`. Floats are compared bit by bit.
    """
    lists = [_as_lists(part) for part in parts]
    key = np.zeros(num_rows, dtype=np.uint64)
    for part in lists:
        key = key * _MIX + _hash(part)
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    rep = first[group.reshape(-1)].astype(np.int64)
    same = np.ones(num_rows, dtype=bool)
    for part in lists:
        same &= _equal(part, rep)
    return np.where(same, rep, np.arange(num_rows))


def _as_lists(part: Ragged | NDArray[Any]) -> Ragged:
    if isinstance(part, Ragged):
        return part
    rows = part.reshape(len(part), math.prod(part.shape[1:]))
    if rows.dtype.kind == "f":
        rows = np.ascontiguousarray(rows, dtype=np.float32).view(np.int32)
    return Ragged.from_lengths(np.full(len(rows), rows.shape[1]), rows.reshape(-1))


def _hash(lists: Ragged) -> NDArray[np.uint64]:
    """A polynomial over random weights, modulo 2^64, of each list and its length."""
    longest = int(lists.lengths.max(initial=0))
    weights = np.random.default_rng(_SEED).integers(0, 1 << 63, longest + 1, dtype=np.int64)
    odd = weights.view(np.uint64) | np.uint64(1)
    place = np.arange(len(lists.values)) - np.repeat(lists.offsets[:-1], lists.lengths)
    terms = (lists.values.view(np.uint64) + _MIX) * odd[place]
    total = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(terms, dtype=np.uint64)])
    out: NDArray[np.uint64] = total[lists.offsets[1:]] - total[lists.offsets[:-1]]
    return out + odd[lists.lengths]


def _equal(lists: Ragged, rep: Ints) -> NDArray[np.bool_]:
    """Whether each list equals that of its representative."""
    same: NDArray[np.bool_] = lists.lengths == lists.lengths[rep]
    rows = np.flatnonzero(same & (rep != np.arange(len(rep))))
    mine, theirs = lists.take(rows), lists.take(rep[rows])
    differ = np.bincount(mine.row_ids[mine.values != theirs.values], minlength=len(rows)) > 0
    same[rows] &= ~differ
    return same
