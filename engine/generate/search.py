"""Trie-constrained beam search with a certificate of exactness.

The tree of beams only grows: a step appends W nodes per prompt, an ancestor table says who sees
whom, and no KV is copied. Nothing waits for the device while levels are searched.

Certificate: every log-probability is <= 0, so no descendant of a dropped prefix can beat that
prefix. If the k-th result scores above the best prefix ever dropped, the top k is the model's exact
top k over the whole catalog.

By the same bound the last level is not read whole. Its prefixes are forwarded best first, in parts,
until no other can reach the k-th result found; the results are those of all W. A wide beam, which
the levels before it need for the certificate, costs its width only there.

A child that the model gives probability 0 names no item. A full list stands: nothing it lacks is
better. One that is short because of it is not exact, and an empty one has failed: "nothing
eligible" is said of the catalog and the user, never of the model.

Sources: beams as one shared context plus ancestor indices: NVIDIA recsys-examples
`sid-gr-inference` and xGR (arXiv 2512.11529); constraint by CSR trie: STATIC (arXiv 2602.22647).
The certificate and the bounded last level are ours; the bound is A*'s.

Legend: B prompts, W beams of a prompt at this level, K results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.backend import Backend, Context
from engine.generate.beam_step import Front, Mask, Pool, SegmentMask, expand, forward, root, select
from engine.row_tiles import TILE, padded
from engine.trees.device_trie import DeviceTrie
from engine.trees.quotas import beams_per_group
from schemas.requests import UNSCORED

_LEAST_ROWS = {"cpu": 512}  # of a part of the last level; fewer are slow matmuls
_LEAST_ON_A_GPU = 4096


@dataclass(frozen=True, slots=True)
class Beams:
    """Finished SIDs `[B, K]`, best first; score -inf where there is none."""

    sid: Tensor  # [B, K]
    score: Tensor  # [B, K] float32
    pruned: Tensor  # [B] best score of any dropped prefix; -inf: nothing was dropped; see SidBeams
    legal_mass: Tensor  # [B]; NaN unless the norm is full_vocab
    failed: Tensor  # [B] bool: no score where it could have changed the results, or nothing else
    rows: Tensor  # [B] nodes forwarded

    def without(self, refused: Tensor) -> Beams:
        """Where the model gave probability 0 to something legal, `refused` `[B]` bool."""
        none = self.score[:, 0] == -torch.inf
        floor = torch.where(refused, float(UNSCORED), -torch.inf)
        return replace(
            self, pruned=torch.maximum(self.pruned, floor), failed=self.failed | (refused & none)
        )


def beam_search(
    backend: Backend,
    context: Context,
    index: DeviceTrie,
    *,
    prompts: Tensor,
    widths: tuple[int, ...],
    k: int,
    dead: Tensor | None = None,
    segments: SegmentMask | None = None,
) -> Beams:
    """The best k SIDs of each of `prompts` `[B]` (rows of the context).

    Args:
        widths: beams kept after each level but the last; at the last level the best k are kept.
        dead: sorted keys of the prefixes each prompt must not enter (`dead_nodes`), where
            `user` is the prompt's row in the context.
        segments: the prefixes that whole segments of prompts may enter.
    """
    trie, num_prompts = index.trie, len(prompts)
    mask = Mask(prompts, dead, segments)
    pool = Pool(
        torch.zeros((num_prompts, k), dtype=torch.int64, device=index.device),
        torch.full((num_prompts, k), -torch.inf, device=index.device),
    )
    pruned = torch.full((num_prompts,), -torch.inf, device=index.device)
    failed = torch.zeros(num_prompts, dtype=torch.bool, device=index.device)
    refused = torch.zeros_like(failed)
    legal_mass = torch.full((num_prompts,), torch.nan, device=index.device)
    front, row_BW = root(prompts), prompts[:, None]
    rows = torch.zeros(num_prompts, dtype=torch.int64, device=index.device)
    for depth in range(trie.depth):
        children = expand(backend, context, index, front, row_BW, depth)
        failed = failed | children.failed_BM.any(dim=1)
        if depth == 0 and index.norms[0].kind == "full_vocab":
            mass_BM = torch.where(children.real_BM, children.log_prob_BM.exp(), 0.0)
            legal_mass = mass_BM.sum(dim=1)
        children = mask(index, children)
        refused = refused | children.refused_BM.any(dim=1)
        inner_nodes = int(trie.inner_nodes_at[depth + 1])
        if inner_nodes < _nodes_at(index, depth + 1):  # some semantic IDs end here
            pool = pool.collect(index, children)
        if not inner_nodes:
            break
        width = min(widths[depth], inner_nodes, children.node_BM.shape[1])
        cap = None
        if index.quota is not None and depth + 1 > index.quota.level:
            cap = beams_per_group(widths[depth], k, index.quota.max_items)
        front, dropped = select(index, children, row_BW, width, cap)
        pruned = torch.maximum(pruned, dropped)
        if not trie.inner_nodes_at[depth + 2]:
            last = _finish(backend, context, index, front, mask, pool, depth + 1)
            pool, failed, rows = last.pool, failed | last.failed, rows + last.rows
            refused = refused | last.refused
            break
        row_BW = forward(backend, context, index, front, prompts, depth + 1)
        rows += width
    found = Beams(pool.sid, pool.score, pruned, legal_mass, failed, rows)
    return found.without(refused)


@dataclass(frozen=True, slots=True)
class _Last:
    """What the last level came to."""

    pool: Pool
    failed: Tensor  # [B] bool
    refused: Tensor  # [B] bool
    rows: Tensor  # [B] nodes forwarded


def _finish(
    backend: Backend,
    context: Context,
    index: DeviceTrie,
    front: Front,
    mask: Mask,
    pool: Pool,
    depth: int,
) -> _Last:
    """The pool with the best of the last level, and whose NaN failed.

    A NaN counts where its prefix could have reached the results, in whatever parts they were found.
    Between parts the host waits once, to see who needs another.
    """
    num_prompts, score_BW = len(front.score_BW), front.score_BW
    nan_score = torch.full_like(score_BW[:, 0], -torch.inf)  # of the best prefix with a NaN
    rows = torch.zeros(num_prompts, dtype=torch.int64, device=index.device)
    refused = torch.zeros(num_prompts, dtype=torch.bool, device=index.device)
    who = torch.arange(num_prompts, device=index.device)
    begin = 0
    while begin < front.width and len(who):
        at = slice(begin, begin + _part(backend, len(who), front.width, pool))
        some, own = front.of(who, at), pool.of(who)
        some = replace(some, live_BW=some.live_BW & (some.score_BW >= own.score[:, -1:]))
        row_BW = forward(backend, context, index, some, mask.prompts[who], depth)
        children = expand(backend, context, index, some, row_BW, depth)
        from_BM = some.score_BW.gather(1, children.beam_BM)
        failed = torch.where(children.failed_BM, from_BM, -torch.inf).amax(dim=1)
        nan_score[who] = torch.maximum(nan_score[who], failed)
        children = mask.of(who)(index, children)
        refused[who] |= children.refused_BM.any(dim=1)
        own = own.collect(index, children)
        pool.sid[who], pool.score[who] = own.sid, own.score
        rows[who] += some.width
        begin = at.stop
        if begin < front.width:
            best = front.score_BW[:, begin]
            who = _those(front.live_BW[:, begin] & (best >= pool.score[:, -1]))
    nan = (nan_score > -torch.inf) & (nan_score >= pool.score[:, -1])
    return _Last(pool, nan, refused, rows)


def _those(chosen: Tensor) -> Tensor:
    """Which of `[B]` are chosen; the host waits for the device here."""
    return chosen.nonzero()[:, 0]


def _part(backend: Backend, num_prompts: int, width: int, pool: Pool) -> int:
    """Beams of a prompt that are forwarded before the next look; about as many as results."""
    if backend.facts.resends:  # and pays for the prompts with each part
        return width
    least = _LEAST_ROWS.get(pool.score.device.type, _LEAST_ON_A_GPU)
    return max(padded(pool.score.shape[1], TILE), math.ceil(least / num_prompts))


def rows_per_prompt(index: DeviceTrie, widths: tuple[int, ...]) -> int:
    """Nodes that one prompt's search forwards at most, known before it starts."""
    total, width = 0, 1
    for depth in range(index.trie.depth):
        inner_nodes = int(index.trie.inner_nodes_at[depth + 1])
        if not inner_nodes:
            break
        width = min(widths[depth], inner_nodes, index.trie.most_children(depth, width))
        total += width
    return total


def most_slots(index: DeviceTrie, widths: tuple[int, ...]) -> int:
    """M of the widest step, known before it starts: what one prompt's search takes in memory."""
    most, width = 1, 1
    for depth in range(index.trie.depth):
        slots = index.trie.most_children(depth, width)
        most = max(most, slots)
        if not index.trie.inner_nodes_at[depth + 1]:
            break
        width = min(widths[depth], int(index.trie.inner_nodes_at[depth + 1]), slots)
    return most


def join_beams(parts: list[Beams]) -> Beams:
    """The answers of searches over parts of the prompts, as one."""
    if len(parts) == 1:
        return parts[0]

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    return Beams(
        joined("sid"),
        joined("score"),
        joined("pruned"),
        joined("legal_mass"),
        joined("failed"),
        joined("rows"),
    )


def _nodes_at(index: DeviceTrie, depth: int) -> int:
    return int(index.trie.level_start[depth + 1] - index.trie.level_start[depth])
