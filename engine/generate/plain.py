"""The beam search of `search.py` for one prompt, in plain Python: slow, obvious, and what it means.

Tests hold the fast search to this one: the same lists, scores and certificates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Codes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlainList:
    """The list of one prompt."""

    sids: list[int]  # best first
    scores: list[float]
    pruned: float  # best score of any dropped prefix; -inf: nothing was dropped
    exact: bool  # it is the model's top k of all items that are allowed


def plain_search(
    log_prob: Callable[[Codes, int], float],
    catalog: Sequence[Codes],
    *,
    widths: tuple[int, ...],
    k: int,
    allowed: Sequence[bool] | None = None,
    quota: tuple[int, int] | None = None,
) -> PlainList:
    """The best k of a catalog for one prompt.

    Args:
        log_prob: log p of a code behind a prefix of codes, finite.
        catalog: the codes of each SID, in ascending order; none is a prefix of another.
        widths: prefixes kept after each level.
        allowed: SIDs that the prompt may get.
        quota: `(level, most)`: at most so many results share their first `level` codes.
    """
    sids = [sid for sid in range(len(catalog)) if allowed is None or allowed[sid]]
    alive = {catalog[sid][:depth] for sid in sids for depth in range(len(catalog[sid]) + 1)}
    number = {catalog[sid]: sid for sid in sids}
    results: list[tuple[float, int]] = []
    pruned, beams = -math.inf, {(): np.float32(0.0)}
    for depth in range(max(map(len, catalog))):
        children = {
            (*prefix, code): np.float32(score + np.float32(log_prob(prefix, code)))
            for prefix, score in beams.items()
            for code in sorted({codes[depth] for codes in catalog if codes[:depth] == prefix
                                and len(codes) > depth})
            if (*prefix, code) in alive
        }  # fmt: skip
        results += [(float(s), number[child]) for child, s in children.items() if child in number]
        results = _best(results, k, quota, lambda sid: catalog[sid])
        inner = [(float(s), child) for child, s in children.items() if child not in number]
        if not inner:
            break
        limit = None
        if quota is not None and depth + 1 > quota[0]:
            limit = (quota[0], max(1, widths[depth] // math.ceil(k / quota[1])))
        kept = _best(inner, widths[depth], limit, lambda codes: codes)
        pruned = max([pruned, *(s for s, child in inner if (s, child) not in kept)])
        beams = {child: np.float32(score) for score, child in kept}
    scores = [score for score, _ in results]
    exact = pruned == -math.inf or (len(scores) == k and scores[-1] > pruned)
    return PlainList([sid for _, sid in results], scores, pruned, exact)


def _best(
    entries: list[tuple[float, Any]],
    most: int,
    quota: tuple[int, int] | None,
    codes_of: Callable[[Any], Codes],
) -> list[tuple[float, Any]]:
    """The best entries: larger score first, then smaller key; so many of each quota group."""
    chosen: list[tuple[float, Any]] = []
    in_group: dict[Codes, int] = {}
    for score, key in sorted(entries, key=lambda entry: (-entry[0], entry[1])):
        if quota is not None:
            group = codes_of(key)[: quota[0]]
            if in_group.get(group, 0) >= quota[1]:
                continue
            in_group[group] = in_group.get(group, 0) + 1
        if len(chosen) < most:
            chosen.append((score, key))
    return chosen
