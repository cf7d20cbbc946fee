"""Trie-constrained beam search with a certificate of exactness.

The tree of beams only grows: a step appends W nodes per prompt, an ancestor table says who sees
whom, and no KV is copied. Candidates are the children in the catalog's trie, so no invalid semantic
ID can appear; they are masked before selection; and every step has a shape known before it starts,
so that nothing waits for the device inside the loop.

Certificate: every log-probability is <= 0, so no descendant of a dropped prefix can beat that
prefix. If the k-th result scores above the best prefix ever dropped, the top k is the model's exact
top k over the whole catalog.

Sources: beams as one shared context plus ancestor indices: NVIDIA recsys-examples
`sid-gr-inference` and xGR (arXiv 2512.11529); constraint by CSR trie: STATIC (arXiv 2602.22647).
The certificate is ours.

Legend: B prompts, W beams of a prompt at this level, M child slots of a prompt (an upper bound), K
results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.backend import Backend, Context, NodeBatch, Targets
from engine.device_trie import DeviceTrie
from engine.quotas import beams_per_group, place_in_group

_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Beams:
    """Finished SIDs `[B, K]`, best first; score -inf where there is none."""

    sid: Tensor  # [B, K]
    score: Tensor  # [B, K] float32
    pruned: Tensor  # [B] best score of any dropped prefix; -inf: nothing was dropped
    legal_mass: Tensor  # [B]; NaN unless the norm is full_vocab
    failed: Tensor  # [B] bool: a NaN appeared
    rows: int  # nodes forwarded per prompt


@dataclass(frozen=True, slots=True)
class SegmentMask:
    """Which trie nodes each segment of prompts may enter (engine/exclusions.py, `EligibleTrie`)."""

    alive: Tensor  # [segments, V] bool
    of_prompt: Tensor  # [prompts of the context] int64

    def __call__(self, prompt: Tensor, node: Tensor) -> Tensor:
        """Whether a prompt may enter a node; elementwise."""
        return self.alive[self.of_prompt[prompt], node]


@dataclass(frozen=True, slots=True)
class _Front:
    """Beams of one level."""

    node_BW: Tensor  # trie node
    row_BW: Tensor  # context row
    score_BW: Tensor  # float32
    live_BW: Tensor  # bool
    group_BW: Tensor  # trie node of the quota's level above or at each beam; the root further up


@dataclass(frozen=True, slots=True)
class _Children:
    """Candidates for the next level, one slot each."""

    node_BM: Tensor
    beam_BM: Tensor  # which beam it continues
    real_BM: Tensor  # False: padding slot
    group_BM: Tensor  # as in _Front
    score_BM: Tensor  # -inf for padding, dead and failed slots


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
        dead: sorted keys of the prefixes each prompt must not enter (engine/exclusions.py), where
            `user` is the prompt's row in the context.
        segments: the prefixes that whole segments of prompts may enter.
    """
    trie = index.trie
    num_prompts = len(prompts)
    front = _root(prompts)
    pool_score = torch.full((num_prompts, k), -torch.inf, device=index.device)
    pool_sid = torch.zeros((num_prompts, k), dtype=torch.int64, device=index.device)
    pruned = torch.full((num_prompts,), -torch.inf, device=index.device)
    failed = torch.zeros(num_prompts, dtype=torch.bool, device=index.device)
    legal_mass = torch.full((num_prompts,), torch.nan, device=index.device)
    rows = 0
    for depth in range(trie.depth):
        children, log_probs = _expand(backend, context, index, front, depth)
        if dead is not None or segments is not None:
            children = _without_dead(index, children, prompts, dead, segments)
        failed = failed | (log_probs.isnan() & children.real_BM).any(dim=1)
        if depth == 0 and index.norms[0].kind == "full_vocab":
            legal_mass = torch.where(children.real_BM, log_probs.exp(), 0.0).sum(dim=1)
        inner_nodes = int(trie.inner_nodes_at[depth + 1])
        if inner_nodes < _nodes_at(index, depth + 1):  # some semantic IDs end here
            pool_score, pool_sid = _collect(index, children, pool_score, pool_sid)
        if not inner_nodes:
            break
        width = min(widths[depth], inner_nodes, children.node_BM.shape[1])
        cap = None
        if index.quota is not None and depth + 1 > index.quota.level:
            cap = beams_per_group(widths[depth], k, index.quota.max_items)
        front, nodes, dropped = _select(index, context, front, children, prompts, depth, width, cap)
        pruned = torch.maximum(pruned, dropped)
        backend.extend(context, nodes)
        rows += width
    return Beams(pool_sid, pool_score, pruned, legal_mass, failed, rows)


def rows_per_prompt(index: DeviceTrie, widths: tuple[int, ...]) -> int:
    """Nodes that one prompt's search forwards, known before it starts."""
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
        parts[0].rows,
    )


def _nodes_at(index: DeviceTrie, depth: int) -> int:
    return int(index.trie.level_start[depth + 1] - index.trie.level_start[depth])


def _root(prompts: Tensor) -> _Front:
    zeros = torch.zeros_like(prompts)[:, None]
    live = torch.ones_like(zeros, dtype=torch.bool)
    return _Front(zeros, prompts[:, None], zeros.float(), live, zeros)


def _expand(
    backend: Backend,
    context: Context,
    index: DeviceTrie,
    front: _Front,
    depth: int,
) -> tuple[_Children, Tensor]:
    """All children of the front in M slots, scored; and their log-probabilities `[B, M]`."""
    num_prompts, width = front.node_BW.shape
    slots = index.trie.most_children(depth, width)
    count_BW = torch.where(front.live_BW, index.num_children[front.node_BW], 0)
    end_BW = count_BW.cumsum(dim=1)
    slot_BM = torch.arange(slots, device=index.device).expand(num_prompts, slots).contiguous()
    real_BM = slot_BM < end_BW[:, -1:]
    beam_BM = torch.searchsorted(end_BW, slot_BM, right=True).clamp(max=width - 1)
    nth_BM = slot_BM - (end_BW - count_BW).gather(1, beam_BM)
    first_BM = index.first_child[front.node_BW.gather(1, beam_BM)]
    node_BM = torch.where(real_BM, first_BM + nth_BM, 0)

    first_row = torch.arange(num_prompts, device=index.device)[:, None] * width
    targets = Targets(
        row=(first_row + beam_BM).reshape(-1),
        column=index.code[node_BM].reshape(-1),
        columns=index.columns[depth],
        real=real_BM.reshape(-1),
    )
    log_probs = backend.log_probs(
        context, front.row_BW.reshape(-1), targets, index.norms[depth]
    ).view(num_prompts, slots)

    score_BM = front.score_BW.gather(1, beam_BM) + log_probs
    score_BM = torch.where(real_BM & ~score_BM.isnan(), score_BM, -torch.inf)
    inherited = front.group_BW.gather(1, beam_BM)
    at_level = index.quota is not None and depth + 1 == index.quota.level
    group_BM = node_BM if at_level else inherited
    return _Children(node_BM, beam_BM, real_BM, group_BM, score_BM), log_probs


def _without_dead(
    index: DeviceTrie,
    children: _Children,
    prompts: Tensor,
    dead: Tensor | None,
    segments: SegmentMask | None,
) -> _Children:
    """The children that have an item left for their prompt keep their score."""
    prompt_BM = prompts[:, None].expand_as(children.node_BM)
    score_BM = children.score_BM
    if segments is not None:
        score_BM = torch.where(segments(prompt_BM, children.node_BM), score_BM, -torch.inf)
    if dead is not None and len(dead):
        gone = index.is_dead(prompt_BM, children.node_BM, dead)
        score_BM = torch.where(gone, -torch.inf, score_BM)
    return replace(children, score_BM=score_BM)


def _select(
    index: DeviceTrie,
    context: Context,
    front: _Front,
    children: _Children,
    prompts: Tensor,
    depth: int,
    width: int,
    cap: int | None,
) -> tuple[_Front, NodeBatch, Tensor]:
    """The next front, its nodes to append, and the best score that was dropped `[B]`.

    With a `cap`, no group of the quota holds more beams than that.
    """
    inner = index.sid[children.node_BM] < 0
    score_BM = torch.where(inner, children.score_BM, -torch.inf)
    dropped = score_BM.new_full((len(prompts),), -torch.inf)
    if cap is not None:
        key_BM = _sort_key(score_BM, children.node_BM)
        over = place_in_group(key_BM, children.group_BM) >= cap
        dropped = torch.where(over, score_BM, -torch.inf).amax(dim=1)
        score_BM = torch.where(over, -torch.inf, score_BM)
    key_BM = _sort_key(score_BM, children.node_BM)
    slots = key_BM.shape[1]
    best_BW = key_BM.topk(min(width + 1, slots), dim=1).indices
    ranked = score_BM.gather(1, best_BW)
    if slots > width:
        dropped = torch.maximum(dropped, ranked[:, width])

    best_BW = best_BW[:, :width]
    parent_BW = front.row_BW.gather(1, children.beam_BM.gather(1, best_BW))
    node_BW = children.node_BM.gather(1, best_BW)
    score_BW = ranked[:, :width]
    live_BW = score_BW > -torch.inf
    node_BW = torch.where(live_BW, node_BW, 0)
    row_BW = context.num_rows + torch.arange(len(prompts) * width, device=index.device).view(
        len(prompts), width
    )
    nodes = NodeBatch(
        prompt=prompts[:, None].expand_as(node_BW).reshape(-1),
        parent=parent_BW.reshape(-1),
        token=index.token[node_BW].reshape(-1),
        depth=torch.full((node_BW.numel(),), depth + 1, device=index.device),
        slot=torch.arange(width, device=index.device).repeat(len(prompts)),
        num_slots=width,
        max_depth=depth + 1,
    )
    group_BW = children.group_BM.gather(1, best_BW)
    return _Front(node_BW, row_BW, score_BW, live_BW, group_BW), nodes, dropped


def _collect(
    index: DeviceTrie, children: _Children, pool_score: Tensor, pool_sid: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge the semantic IDs that end at this level into the best k so far `[B, K]`."""
    sid_BM = index.sid[children.node_BM]
    score_BM = torch.where(sid_BM >= 0, children.score_BM, -torch.inf)
    score = torch.cat([pool_score, score_BM], dim=1)
    sid = torch.cat([pool_sid, sid_BM.clamp(min=0)], dim=1)
    if index.quota is not None:
        group = index.quota.group_of_sid[sid]
        over = place_in_group(_sort_key(score, sid), group) >= index.quota.max_items
        score = torch.where(over, -torch.inf, score)
    best = _sort_key(score, sid).topk(pool_score.shape[1], dim=1).indices
    return score.gather(1, best), sid.gather(1, best)


def _sort_key(score: Tensor, order: Tensor) -> Tensor:
    """One int64 per entry: larger is better score, then smaller `order`. Makes top-k deterministic.

    The bits of a float sort as integers once those of negative numbers are flipped; `order`, below
    2^32, fills the low half, so that equal scores fall back on it and no two keys of a row are
    equal.
    """
    bits = (score + 0.0).view(torch.int32)  # + 0.0: -0.0 becomes 0.0
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ascending.to(torch.int64) << 32) | (_LOW - order)
