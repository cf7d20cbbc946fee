"""Trie-constrained beam search, from prompt ends to lists, with a certificate of exactness.

The tree of beams only grows: a step appends W nodes per prompt, an ancestor table says who sees
whom, and no KV is copied. Nothing waits for the device while levels are searched.

Certificate: every log-probability is <= 0, so no descendant of a dropped prefix can beat that
prefix. If the k-th result scores above the best prefix ever dropped, the top k is the model's exact
top k over the whole catalog. With `exact`, prompts without a certificate are searched again, wider.

By the same bound the last level is not read whole. Its prefixes are forwarded best first, in parts,
until no other can reach the k-th result found; the results are those of all W. A wide beam, which
the levels before it need for the certificate, costs its width only there.

A child that the model gives probability 0 names no item. A full list stands: nothing it lacks is
better. One that is short because of it is not exact, and an empty one has failed: "nothing
eligible" is said of the catalog and the user, never of the model.

`plain.py` is the same search in a few obvious lines, and the specification of this file.

Sources: beams as one shared context plus ancestor indices: NVIDIA recsys-examples
`sid-gr-inference` and xGR (arXiv 2512.11529); constraint by CSR trie: STATIC (arXiv 2602.22647).
The certificate and the bounded last level are ours; the bound is A*'s.

Legend: B prompts, W beams of a prompt at this level, M child slots of a prompt, K results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.decoding import Decoding
from engine.generate.bounds import most_slots
from engine.generate.frontier import Front, expand, forward, root, select
from engine.row_tiles import TILE, padded
from engine.search.masks import Mask, SegmentMask
from engine.search.pool import Pool
from engine.trees.device_trie import DeviceTrie
from engine.trees.quotas import beams_per_group
from schemas.requests import UNSCORED, SidBeams
from schemas.search_work import SearchWork
from schemas.settings import GenerateSettings

_MAX_SLOTS = 1 << 24  # child slots of the beams that step together; bounds a step's memory
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
    nodes: Tensor  # [B] nodes forwarded
    width: Tensor  # [B] of the widest level
    rounds: Tensor  # [B] passes of the model

    def uncertified(self) -> Tensor:
        """Prompts whose worst result does not beat what was dropped, or who lack results for it."""
        worst: Tensor = self.score[:, -1]  # -inf when there are fewer than k
        certified = worst.gt(self.pruned) | self.pruned.le(
            float(UNSCORED)
        )  # which no width changes
        return _indices(~certified & ~self.failed)

    def replace(self, prompts: Tensor, wider: Beams) -> None:
        """Take the answers of a wider search for some of the prompts."""
        self.sid[prompts], self.score[prompts] = wider.sid, wider.score
        self.pruned[prompts], self.width[prompts] = wider.pruned, wider.width
        self.failed[prompts] |= wider.failed
        self.nodes[prompts] += wider.nodes
        self.rounds[prompts] += wider.rounds

    def lists(self) -> SidBeams:
        """Flat results on the host, prompts in order, best first."""
        score = self.score.cpu().numpy()
        user, place = np.nonzero(score > -np.inf)
        return SidBeams(
            user=user.astype(np.int64),
            sid=self.sid.cpu().numpy()[user, place],
            score=score[user, place],
            pruned=self.pruned.cpu().numpy(),
            legal_mass=self.legal_mass.cpu().numpy(),
            width=self.width.cpu().numpy(),
        )


def search_by_beams(
    decoding: Decoding,
    settings: GenerateSettings,
    *,
    widths: tuple[int, ...],
    k: int,
    dead: Tensor | None = None,
    segments: SegmentMask | None = None,
) -> tuple[SidBeams, NDArray[np.bool_], SearchWork]:
    """The best k SIDs of every prompt of the context, whose search failed, and what it took.

    With `settings.exact`, who is not certified is searched again with twice the width, over the
    same prefill, until everyone is or `settings.max_width` is reached.
    """

    def beams_of(prompts: Tensor, widths: tuple[int, ...]) -> Beams:
        at_once = max(1, _MAX_SLOTS // most_slots(decoding.index.trie, widths))
        parts = (prompts[at : at + at_once] for at in range(0, len(prompts), at_once))
        return _join(
            [
                beam_search(
                    decoding, prompts=part, widths=widths, k=k, dead=dead, segments=segments
                )
                for part in parts
            ]
        )

    beams = beams_of(torch.arange(decoding.num_prompts, device=decoding.index.device), widths)
    if settings.exact:
        uncertified = beams.uncertified()
        while len(uncertified) and min(widths) < settings.max_width:
            widths = tuple(min(2 * max(width, 1), settings.max_width) for width in widths)
            beams.replace(uncertified, beams_of(uncertified, widths))
            uncertified = beams.uncertified()
    nodes, rounds = beams.nodes.cpu().numpy(), beams.rounds.cpu().numpy()
    work = SearchWork(nodes=nodes, rounds=rounds, stopped=np.zeros(len(nodes), dtype=bool))
    return beams.lists(), beams.failed.cpu().numpy(), work


def beam_search(
    decoding: Decoding,
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
        dead: sorted keys of the prefixes each prompt may not enter (`dead_nodes`), where `user` is
            the prompt's row in the context.
        segments: the prefixes that whole segments of prompts may enter.
    """
    index, trie = decoding.index, decoding.index.trie
    mask = Mask(prompts, dead, segments)
    beams = _empty(prompts, k, max(widths))
    pool, front, row_BW = Pool(beams.sid, beams.score), root(prompts), prompts[:, None]
    pruned, failed, nodes, rounds = beams.pruned, beams.failed, beams.nodes, beams.rounds
    refused, legal_mass = torch.zeros_like(failed), beams.legal_mass
    for depth in range(trie.depth):
        children = expand(decoding, front, row_BW, depth)
        failed = failed | children.failed_BM.any(dim=1)
        if depth == 0 and index.norms[0].kind == "full_vocab":
            legal_mass = torch.where(children.real_BM, children.log_prob_BM.exp(), 0.0).sum(dim=1)
        children = children.allowed(index, mask)
        refused = refused | children.refused_BM.any(dim=1)
        inner_nodes = int(trie.inner_nodes_at[depth + 1])
        if inner_nodes < int(trie.level_start[depth + 2] - trie.level_start[depth + 1]):
            pool = pool.collect(
                index, index.sid[children.node_BM], children.score_BM
            )  # some semantic IDs end here
        if not inner_nodes:
            break
        width = min(widths[depth], inner_nodes, children.node_BM.shape[1])
        cap = beams_of_group(index, widths[depth], k, depth + 1)
        front, dropped = select(index, children, row_BW, width, cap)
        pruned = torch.maximum(pruned, dropped)
        if not trie.inner_nodes_at[depth + 2]:
            last = _read_last_level(decoding, front, mask, pool, depth + 1)
            pool, failed, nodes = last.pool, failed | last.failed, nodes + last.nodes
            rounds = rounds + last.rounds
            refused = refused | last.refused
            break
        row_BW = forward(decoding, front, prompts, depth + 1)
        nodes, rounds = nodes + width, rounds + 1
    # Probability 0 for something legal: a short list is not exact, and an empty one has failed.
    pruned = torch.maximum(pruned, torch.where(refused, float(UNSCORED), -torch.inf))
    failed = failed | (refused & (pool.score[:, 0] == -torch.inf))
    return Beams(pool.sid, pool.score, pruned, legal_mass, failed, nodes, beams.width, rounds)


@dataclass(frozen=True, slots=True)
class _LastLevel:
    """What the last level came to."""

    pool: Pool
    failed: Tensor  # [B] bool
    refused: Tensor  # [B] bool
    nodes: Tensor  # [B] nodes forwarded
    rounds: Tensor  # [B]


def _read_last_level(
    decoding: Decoding, front: Front, mask: Mask, pool: Pool, depth: int
) -> _LastLevel:
    """The pool with the best of the last level, and whose NaN failed.

    A NaN counts where its prefix could have reached the results, in whatever parts they were found.
    Between parts the host waits once, to see who needs another.
    """
    index, score_BW = decoding.index, front.score_BW
    nan_score = torch.full_like(score_BW[:, 0], -torch.inf)  # of the best prefix with a NaN
    nodes, rounds = torch.zeros_like(mask.prompts), torch.zeros_like(mask.prompts)
    refused = torch.zeros_like(nodes, dtype=torch.bool)
    who = torch.arange(len(nodes), device=index.device)
    begin = 0
    while begin < front.width and len(who):
        columns = slice(begin, begin + _part_width(decoding, len(who), front.width, pool))
        part, own = front.of(who, columns), pool.of(who)
        part = replace(part, live_BW=part.live_BW & (part.score_BW >= own.score[:, -1:]))
        row_BW = forward(decoding, part, mask.prompts[who], depth)
        children = expand(decoding, part, row_BW, depth)
        from_BM = part.score_BW.gather(1, children.beam_BM)
        failed = torch.where(children.failed_BM, from_BM, -torch.inf).amax(dim=1)
        nan_score[who] = torch.maximum(nan_score[who], failed)
        children = children.allowed(index, mask.of(who))
        refused[who] |= children.refused_BM.any(dim=1)
        own = own.collect(index, index.sid[children.node_BM], children.score_BM)
        pool.sid[who], pool.score[who] = own.sid, own.score
        nodes[who] += part.width
        rounds[who] += 1
        begin = columns.stop
        if begin < front.width:
            best = front.score_BW[:, begin]
            who = _indices(front.live_BW[:, begin] & (best >= pool.score[:, -1]))
    nan = (nan_score > -torch.inf) & (nan_score >= pool.score[:, -1])
    return _LastLevel(pool, nan, refused, nodes, rounds)


def _indices(chosen: Tensor) -> Tensor:
    """Where `[B]` is true; the host waits for the device here."""
    return chosen.nonzero()[:, 0]


def _part_width(decoding: Decoding, num_prompts: int, width: int, pool: Pool) -> int:
    """Beams of a prompt that are forwarded before the next look; about as many as results."""
    if decoding.backend.facts.stateless:  # and pays for the prompts with each part
        return width
    least = _LEAST_ROWS.get(pool.score.device.type, _LEAST_ON_A_GPU)
    return max(padded(pool.score.shape[1], TILE), math.ceil(least / num_prompts))


def beams_of_group(index: DeviceTrie, width: int, k: int, depth: int) -> int | None:
    """Beams of `depth` tokens that a group of the quota may hold; None where it sets no limit."""
    if index.quota is None or depth <= index.quota.level:
        return None
    return beams_per_group(width, k, index.quota.max_items)


def _empty(prompts: Tensor, k: int, width: int) -> Beams:
    shape, device = (len(prompts), k), prompts.device
    return Beams(
        sid=torch.zeros(shape, dtype=torch.int64, device=device),
        score=torch.full(shape, -torch.inf, device=device),
        pruned=torch.full(shape[:1], -torch.inf, device=device),
        legal_mass=torch.full(shape[:1], torch.nan, device=device),
        failed=torch.zeros(shape[:1], dtype=torch.bool, device=device),
        nodes=torch.zeros(shape[:1], dtype=torch.int64, device=device),
        width=torch.full(shape[:1], width, dtype=torch.int64, device=device),
        rounds=torch.zeros(shape[:1], dtype=torch.int64, device=device),
    )


def _join(parts: list[Beams]) -> Beams:
    """The answers of searches over parts of the prompts, as one."""
    if len(parts) == 1:
        return parts[0]
    return Beams(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Beams)))
