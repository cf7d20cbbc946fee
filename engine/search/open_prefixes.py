"""Prefixes that a search may still expand, and the beam that it may end as.

Legend: B prompts, F open prefixes of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.search.pool import sort_key
from engine.trees.quotas import place_in_group
from engine.trees.search_tree import SearchTree


@dataclass(frozen=True, slots=True)
class Open:
    """Open prefixes `[B, F]`, best first; score -inf where there is none."""

    score: Tensor
    node: Tensor  # of the tree
    row: Tensor  # of the context, that the prefix before its last token ends in

    @classmethod
    def none(cls, prompts: Tensor) -> Open:
        """Of prompts that nothing is open for."""
        empty = prompts.new_empty((len(prompts), 0))
        return cls(empty.float(), empty, empty)

    @property
    def real(self) -> Tensor:
        """Where there is one `[B, F]`."""
        return self.score > -torch.inf

    def keep(self, kept: Tensor) -> Open:
        """Those where `kept` `[B, F]` holds, in their places."""
        return replace(self, score=torch.where(kept, self.score, -torch.inf))

    def followed_by(self, other: Open) -> Open:
        """Both, side by side."""
        return Open(
            torch.cat([self.score, other.score], dim=1),
            torch.cat([self.node, other.node], dim=1),
            torch.cat([self.row, other.row], dim=1),
        )

    def ordered(self, places: Tensor) -> Open:
        """Those at these places `[B, F]`."""
        return Open(
            self.score.gather(1, places), self.node.gather(1, places), self.row.gather(1, places)
        )

    def first(self, width: int) -> Open:
        """The first of each prompt."""
        return Open(self.score[:, :width], self.node[:, :width], self.row[:, :width])

    def best(self, most: int) -> tuple[Open, Tensor | None]:
        """In order, at most so many, and the best score that there was no room for `[B]`."""
        key = sort_key(self.score, self.node)
        if key.shape[1] <= most:
            return self.ordered(key.argsort(dim=1, descending=True)), None
        places = key.topk(most + 1, dim=1).indices
        return self.ordered(places[:, :-1]), self.score.gather(1, places[:, -1:])[:, 0]


@dataclass(frozen=True, slots=True)
class Beam:
    """The beam that a search ends as, per length of a prefix, 0 to the longest."""

    widths: Tensor  # [L + 1] prefixes that are kept
    least: int  # that are forwarded, however many of that length were before
    per_group: Tensor | None  # [L + 1] of those, in one group of the quota

    def step(
        self, tree: SearchTree, prefixes: Open, ending: Tensor, before: Tensor, left: Tensor | None
    ) -> tuple[Open, Tensor, Tensor]:
        """One level of the beam, for the prompts that are `ending` `[B]`: the best of their
        shallowest open prefixes are to be forwarded, the rest of that length is dropped.

        Args:
            before: prefixes of each length that were forwarded already `[B, L + 1]`.
            left: prefixes that a prompt may still forward `[B]`; None: any number.

        Returns the open prefixes, those to be forwarded first; how many these are `[B]`; and the
        best score that was dropped `[B]`.
        """
        depth = torch.where(prefixes.real, tree.depth[prefixes.node], tree.levels)
        shallowest = depth.amin(dim=1, keepdim=True)
        level = (depth == shallowest) & prefixes.real & ending[:, None]
        here = level & ~self._over_quota(tree, prefixes.keep(level), shallowest)
        width = self.widths[shallowest] - before.gather(1, shallowest)
        width = width[:, 0].clamp(min=self.least)
        if left is not None:
            steps = (tree.levels - shallowest[:, 0]).clamp(min=1)
            width = torch.minimum(width, (left // steps).clamp(min=1))
        width = torch.minimum(here.sum(dim=1), width)
        order = (~here).to(torch.int8).argsort(dim=1, stable=True)
        prefixes, level = prefixes.ordered(order), level.gather(1, order)
        place = torch.arange(level.shape[1], device=level.device)
        gone = level & (place >= width[:, None])
        dropped = prefixes.keep(gone).score.amax(dim=1)
        return prefixes.keep(~gone), width, dropped

    def _over_quota(self, tree: SearchTree, level: Open, shallowest: Tensor) -> Tensor:
        """Those of a group that holds its share of the beam already `[B, F]`."""
        if tree.group is None or self.per_group is None:
            return torch.zeros_like(level.real)
        place = place_in_group(sort_key(level.score, level.node), tree.group[level.node])
        return place >= self.per_group[shallowest]
