"""The results of a search so far, and the order that all searches have in common.

Legend: B prompts, M entries of a prompt, K results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.trees.device_trie import DeviceTrie
from engine.trees.quotas import place_in_group

_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Pool:
    """The best finished SIDs so far `[B, K]`, best first; score -inf where there is none."""

    sid: Tensor
    score: Tensor  # float32

    @classmethod
    def empty(cls, prompts: Tensor, k: int) -> Pool:
        """Nothing yet."""
        shape, device = (len(prompts), k), prompts.device
        sid = torch.zeros(shape, dtype=torch.int64, device=device)
        return cls(sid, torch.full(shape, -torch.inf, device=device))

    def of(self, who: Tensor) -> Pool:
        """Those of some of the prompts."""
        return Pool(self.sid[who], self.score[who])

    def collect(self, index: DeviceTrie, sid_BM: Tensor, score_BM: Tensor) -> Pool:
        """With more SIDs, where `sid_BM` is not -1. The quota counts those that are in already."""
        score_BM = torch.where(sid_BM >= 0, score_BM, -torch.inf)
        score = torch.cat([self.score, score_BM], dim=1)
        sid = torch.cat([self.sid, sid_BM.clamp(min=0)], dim=1)
        if index.quota is not None:
            group = index.quota.group_of_sid[sid]
            over = place_in_group(sort_key(score, sid), group) >= index.quota.max_items
            score = torch.where(over, -torch.inf, score)
        best = sort_key(score, sid).topk(self.score.shape[1], dim=1).indices
        return Pool(sid.gather(1, best), score.gather(1, best))


def sort_key(score: Tensor, order: Tensor) -> Tensor:
    """One int64 per entry: larger is better score, then smaller `order`. Makes top-k deterministic.

    The bits of a float sort as integers once those of negative numbers are flipped; `order`, below
    2^32, fills the low half, so that equal scores fall back on it and no two keys of a row are
    equal.
    """
    bits = (score + 0.0).view(torch.int32)  # + 0.0: -0.0 becomes 0.0
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ascending.to(torch.int64) << 32) | (_LOW - order)
