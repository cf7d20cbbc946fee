"""Batched best-first search: each prompt's best k leaves of a token tree, exact by construction.

A log-probability is never above 0, so nothing below a prefix scores above the prefix, and float32
keeps that: a sum is rounded to no more than its larger term. A prefix that scores below the k-th
result found so far can therefore never matter. The search forwards the best open prefixes of every
prompt, reads all their children, keeps complete ones as results and the others as open, and ends
for a prompt when no open prefix scores at or above its k-th result (at, because of two equal scores
the smaller SID counts). The results are those of scoring everything.

A round forwards several prefixes of each prompt, 16 at first and more later: a pass of the model
costs about the same for one as for many, and rounds, not prefixes, take the time. How many depends
on the round alone, so that what a prompt gets does not depend on who shares its pass. Between
rounds the host waits for the device once.

Where a prompt has used up its budget, or is seen to be flat, its search ends as a beam: from the
shallowest open prefixes downwards, the best of each level, the rest dropped. The best score that
was dropped is its certificate, as of any beam.

Sources: best-first and branch-and-bound search (Hart, Nilsson and Raphael 1968, A*; Land and Doig
1960), with 0 as the bound of what is left of a path; docs/search.md has the proof.

Legend: B prompts, F open prefixes of a prompt, M prefixes forwarded or children read, K results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.backend import NodeBatch
from engine.decoding import Decoding
from engine.search.children import Children, Prefixes, read_children
from engine.search.masks import Mask
from engine.search.open_prefixes import Beam, Open
from engine.search.pool import Pool
from engine.trees.search_tree import SearchTree

_MOST_OPEN = 4096  # prefixes kept for a prompt; more are dropped, and its certificate knows
_MOST_IN_A_ROUND = 64  # prefixes of a prompt; more hardly fill a pass better
_SAME = 3  # rounds before twice as many are forwarded


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far a search goes."""

    k: int
    first: int = 16  # prefixes of a prompt that the first rounds forward
    budget: int | None = None  # most prefixes of a prompt; None: until its list is exact
    max_nodes: int | None = None  # of all prompts together
    detect_flat: bool = False  # end as a beam where no result is in sight after a few rounds
    widths: tuple[int, ...] = ()  # of the beam that a search may end as, per level
    per_group: tuple[int | None, ...] = ()  # beams of a group of the quota, per level

    def reserve(self, levels: int) -> int:
        """Prefixes of the budget that are left to the beam that a search ends as."""
        assert self.budget is not None
        return min((levels - 1) * self.first, self.budget // 2)

    def beam(self, levels: int, device: torch.device) -> Beam:
        """The beam that searches of trees of so many levels end as."""
        every = (0, *self.widths[: levels - 1], *(1,) * max(0, levels - 1 - len(self.widths)), 0)
        per_group = None
        if any(cap is not None for cap in self.per_group):
            caps = [_MOST_OPEN if cap is None else cap for cap in self.per_group[: levels - 1]]
            per_group = torch.tensor([_MOST_OPEN, *caps, _MOST_OPEN], device=device)
        return Beam(torch.tensor(every, device=device), self.first, per_group)

    def in_round(self, number: int) -> int:
        """Prefixes of a prompt that a round forwards; rounds are numbered from 0."""
        return min(self.first << (number // _SAME), max(self.first, _MOST_IN_A_ROUND))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What narrows the lists of single prompts, by row of the context."""

    k_of: Tensor | None = None  # results of each, at most `Limits.k`; None: as many
    floor: Tensor | None = None  # score that results must reach; -inf: none

    def of(self, prompts: Tensor) -> Bounds:
        """For the prompts of a search."""
        return Bounds(
            None if self.k_of is None else self.k_of[prompts],
            None if self.floor is None else self.floor[prompts],
        )


class TooManyNodes(Exception):
    """The search would go beyond `Limits.max_nodes`."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to; all but the pool `[B]`."""

    pool: Pool
    dropped: Tensor  # best score of what was dropped for want of room or budget; -inf: nothing
    failed: Tensor  # bool: no log-probability where it could have changed the results
    refused: Tensor  # bool: the model gave probability 0 to something legal
    nodes: Tensor  # prefixes forwarded
    rounds: Tensor
    stopped: Tensor  # bool: it ended as a beam
    legal_mass: Tensor  # probability of all children of the root
    short: Tensor  # bool: fewer results than were asked for

    @property
    def failed_for_good(self) -> Tensor:
        """No list: what failed, and what is empty for want of probabilities."""
        return self.failed | (self.refused & (self.pool.score[:, 0] == -torch.inf))


def best_first(
    decoding: Decoding, tree: SearchTree, mask: Mask, limits: Limits, bounds: Bounds | None = None
) -> Found:
    """The best `limits.k` leaves below the root of each prompt of the mask.

    Raises:
        TooManyNodes: it would go beyond `limits.max_nodes`; what it appended is still there.
    """
    return _Search(decoding, tree, mask, limits, (bounds or Bounds()).of(mask.prompts)).run()


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What a round expands."""

    prefixes: Prefixes
    of_user: Tensor  # [B] how many of them
    children_of_user: Tensor  # [B]
    num_children: int
    most_children: int  # of a prompt
    slots: int  # most prefixes of a prompt


class _Search:
    """The state of a search; `run` is the whole of it."""

    def __init__(
        self,
        decoding: Decoding,
        tree: SearchTree,
        mask: Mask,
        limits: Limits,
        bounds: Bounds,
    ) -> None:
        prompts = mask.prompts
        num, self._device = len(prompts), prompts.device
        self._decoding, self._tree, self._mask, self._limits = decoding, tree, mask, limits
        self._pool = Pool.empty(prompts, limits.k)
        self._open = Open.none(prompts)
        self._beam = limits.beam(tree.levels, self._device)
        self._bounds = bounds
        self._dropped = torch.full((num,), -torch.inf, device=self._device)
        self._nan_score = self._dropped.clone()  # of the best prefix with a child that failed
        self._legal_mass = torch.full_like(self._dropped, torch.nan)
        self._refused = torch.zeros(num, dtype=torch.bool, device=self._device)
        self._ending = self._refused.clone()
        self._nodes = torch.zeros(num, dtype=torch.int64, device=self._device)
        self._rounds = self._nodes.clone()
        # How many prefixes of each length were forwarded: what a beam that follows need not.
        self._at_depth = self._nodes.new_zeros((num, tree.levels + 1))
        self._round = 0
        self._total = 0

    def run(self) -> Found:
        """From the roots until no prompt has an open prefix that could matter."""
        chosen: _Chosen | None = self._roots()
        while chosen is not None:
            children = read_children(
                self._decoding, self._tree, chosen.prefixes, chosen.num_children
            )
            self._collect(chosen, children)
            chosen = self._choose()
            if chosen is not None:
                chosen = self._forward(chosen)
        failed = (self._nan_score > -torch.inf) & (self._nan_score >= self._least)
        if self._bounds.floor is not None:
            self._refused &= self._bounds.floor == -torch.inf  # or others fill the list
        return Found(
            pool=self._pool,
            dropped=self._dropped,
            failed=failed,
            refused=self._refused,
            nodes=self._nodes,
            rounds=self._rounds,
            stopped=self._ending,
            legal_mass=self._legal_mass,
            short=self._kth == -torch.inf,
        )

    @property
    def _least(self) -> Tensor:
        """The score that still matters `[B]`."""
        kth, floor = self._kth, self._bounds.floor
        return kth if floor is None else torch.maximum(kth, floor)

    @property
    def _kth(self) -> Tensor:
        """Score of each prompt's own k-th result `[B]`; -inf while there are fewer."""
        if self._bounds.k_of is None:
            return self._pool.score[:, -1]
        return self._pool.score.gather(1, self._bounds.k_of[:, None] - 1)[:, 0]

    def _roots(self) -> _Chosen:
        """The prompt ends, which need no forwarding."""
        prompts = self._mask.prompts
        user = torch.arange(len(prompts), device=self._device)
        node = self._tree.roots(prompts)
        score = torch.zeros(len(prompts), device=self._device)
        count = self._tree.num_children[node]
        total, most = torch.stack([count.sum(), count.max()]).tolist()
        prefixes = Prefixes(user, prompts, node, prompts, score)
        return _Chosen(prefixes, torch.ones_like(user), count, total, most, 1)

    def _collect(self, chosen: _Chosen, children: Children) -> None:
        """Complete children join the results, the others the open prefixes."""
        tree, prefixes = self._tree, chosen.prefixes
        user = prefixes.user[children.prefix]
        parent_score = prefixes.score[children.prefix]
        failed = torch.where(children.failed, parent_score, -torch.inf)
        self._nan_score.scatter_reduce_(0, user, failed, "amax")
        real = torch.ones_like(user, dtype=torch.bool)
        prompt = prefixes.prompt[children.prefix]
        real = self._mask.allows(tree.index, prompt, tree.trie_node(children.node), real)
        score = torch.where(real & ~children.failed, parent_score + children.log_prob, -torch.inf)
        refused = (real & (children.log_prob == -torch.inf)).to(torch.int64)

        begin = chosen.children_of_user.cumsum(0) - chosen.children_of_user
        place = torch.arange(len(user), device=self._device) - begin[user]

        def dense(values: Tensor, free: float) -> Tensor:
            out = values.new_full((len(self._nodes), chosen.most_children), free)
            out[user, place] = values
            return out

        if self._round == 0:
            self._legal_mass = dense(children.log_prob.exp(), 0.0).sum(dim=1)
        self._refused |= dense(refused, 0).sum(dim=1) > 0
        score_BM, node_BM = dense(score, -torch.inf), dense(children.node, 0)
        self._pool = self._pool.collect(tree.index, tree.sid[node_BM], score_BM)
        inner_BM = (tree.num_children[node_BM] > 0) & (score_BM >= self._least[:, None])
        score_BM = torch.where(inner_BM, score_BM, -torch.inf)
        row_BM = dense(prefixes.row[children.prefix], 0)
        found = self._open.followed_by(Open(score_BM, node_BM, row_BM))
        self._open, dropped = found.best(_MOST_OPEN)
        if dropped is not None:
            self._drop(dropped)

    def _drop(self, score: Tensor) -> None:
        self._dropped = torch.maximum(self._dropped, score)

    def _choose(self) -> _Chosen | None:
        """The prefixes that the next round forwards; None: there are none that could matter."""
        self._open = self._open.keep(self._open.score >= self._least[:, None])
        num_open = self._open.real.sum(dim=1)
        most = self._limits.in_round(self._round)
        count = num_open.clamp(max=most)
        if self._may_dive(most):
            count = self._dive(num_open, count, most)
        slots = min(self._open.score.shape[1], max(most, *self._limits.widths, 0))
        head = self._open.first(slots)
        taken = torch.arange(slots, device=self._device) < count[:, None]
        children = torch.where(taken, self._tree.num_children[head.node], 0).sum(dim=1)
        look = [count.sum(), children.sum(), children.max(), count.max(), num_open.max()]
        total, num_children, most_children, slots, width = torch.stack(look).tolist()
        if not total:
            return None
        self._total += total
        if self._limits.max_nodes is not None and self._total > self._limits.max_nodes:
            raise TooManyNodes
        taken, head = taken[:, :slots], head.first(slots)
        self._at_depth.scatter_add_(1, self._tree.depth[head.node], taken.to(torch.int64))
        self._nodes += count
        self._rounds += count > 0
        self._round += 1
        user = torch.repeat_interleave(
            torch.arange(len(count), device=self._device), count, output_size=total
        )
        place = torch.arange(total, device=self._device) - (count.cumsum(0) - count)[user]
        prefixes = Prefixes(
            user,
            self._mask.prompts[user],
            head.node[user, place],
            head.row[user, place],
            head.score[user, place],
        )
        # What was taken is no longer open; what is left of a row shrinks to the widest.
        left = self._open.first(max(width, slots))
        places = torch.arange(left.score.shape[1], device=self._device)
        self._open = left.keep(places >= count[:, None])
        return _Chosen(prefixes, count, children, num_children, most_children, slots)

    def _may_dive(self, most: int) -> bool:
        """Whether any search could end as a beam in this round, as far as the host knows."""
        limits, levels = self._limits, self._tree.levels
        if limits.detect_flat and self._round >= levels - 1:
            return True
        if limits.budget is None:
            return False
        used = sum(limits.in_round(number) for number in range(self._round))
        return limits.budget - used < most + limits.reserve(levels)

    def _dive(self, num_open: Tensor, count: Tensor, most: int) -> Tensor:
        """How many prefixes each prompt forwards `[B]`, where some searches end as beams."""
        limits, tree = self._limits, self._tree
        left = None if limits.budget is None else limits.budget - self._nodes
        ends = torch.zeros_like(self._ending)
        if limits.detect_flat and self._round == tree.levels - 1:
            ends |= self._pool.score[:, 0] == -torch.inf
        if left is not None:
            ends |= left < most + limits.reserve(tree.levels)
        self._ending |= ends & (num_open > 0)
        self._open, width, dropped = self._beam.step(
            tree, self._open, self._ending, self._at_depth, left
        )
        self._drop(dropped)
        return torch.where(self._ending, width, count)

    def _forward(self, chosen: _Chosen) -> _Chosen:
        """Append the chosen prefixes to the context; theirs are the rows that are read."""
        prefixes, tree = chosen.prefixes, self._tree
        first = self._decoding.context.num_rows
        total = len(prefixes.node)
        rows = torch.arange(first, first + total, device=self._device)
        slot = rows - first - (chosen.of_user.cumsum(0) - chosen.of_user)[prefixes.user]
        self._decoding.extend(
            NodeBatch(
                prompt=prefixes.prompt,
                parent=prefixes.row,
                token=tree.index.token[tree.trie_node(prefixes.node)],
                depth=tree.depth[prefixes.node],
                slot=slot,
                num_slots=chosen.slots,
                max_depth=min(self._round, tree.levels - 1),
            )
        )
        return replace(chosen, prefixes=replace(prefixes, row=rows))
