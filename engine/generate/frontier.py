"""The pieces of one step of a beam search: expand, mask, select.

Candidates are the children in the catalog's trie, so no invalid semantic ID can appear. They are
masked before selection, and every step has a shape known before it starts.

Legend: B prompts, W beams of a prompt at this level, M child slots of a prompt (an upper bound).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.backend import ROUNDING, NodeBatch, Targets
from engine.decoding import Decoding
from engine.search.masks import Mask
from engine.search.pool import sort_key
from engine.trees.device_trie import DeviceTrie
from engine.trees.quotas import place_in_group


@dataclass(frozen=True, slots=True)
class Front:
    """Beams of one level, best first."""

    node_BW: Tensor  # trie node
    parent_BW: Tensor  # context row that a beam continues
    score_BW: Tensor  # float32
    live_BW: Tensor  # bool
    group_BW: Tensor  # trie node of the quota's level above or at each beam; the root further up

    @property
    def width(self) -> int:
        """W."""
        return self.node_BW.shape[1]

    def of(self, who: Tensor, columns: slice) -> Front:
        """Some of the beams of some of the prompts."""
        return Front(
            *(
                x[:, columns][who]
                for x in (self.node_BW, self.parent_BW, self.score_BW, self.live_BW, self.group_BW)
            )
        )


@dataclass(frozen=True, slots=True)
class Children:
    """Candidates for the next level, one slot each."""

    node_BM: Tensor
    beam_BM: Tensor  # which beam it continues
    real_BM: Tensor  # False: a padding slot, or one that its prompt must not enter
    group_BM: Tensor  # as in Front
    log_prob_BM: Tensor  # of its token
    score_BM: Tensor  # -inf for slots that are not real, and for those that failed

    def allowed(self, index: DeviceTrie, mask: Mask) -> Children:
        """Those that have an item left for their prompt; the others are padding."""
        prompt_BM = mask.prompts[:, None].expand_as(self.node_BM)
        real_BM = mask.allows(index, prompt_BM, self.node_BM, self.real_BM)
        score_BM = torch.where(real_BM, self.score_BM, -torch.inf)
        return replace(self, real_BM=real_BM, score_BM=score_BM)

    @property
    def failed_BM(self) -> Tensor:
        """Whether what the model gave is no log-probability: NaN, or above 0."""
        return (self.log_prob_BM.isnan() | (self.log_prob_BM > ROUNDING)) & self.real_BM

    @property
    def refused_BM(self) -> Tensor:
        """Whether the model gave probability 0, where an item may stand."""
        return (self.log_prob_BM == -torch.inf) & self.real_BM


def root(prompts: Tensor) -> Front:
    """The empty prefix of each prompt, which needs no forwarding."""
    zeros = torch.zeros_like(prompts)[:, None]
    live = torch.ones_like(zeros, dtype=torch.bool)
    return Front(zeros, prompts[:, None], zeros.float(), live, zeros)


def forward(decoding: Decoding, front: Front, prompts: Tensor, depth: int) -> Tensor:
    """Append the beams of a front, of `depth` tokens, to the context; their rows `[B, W]`."""
    index = decoding.index
    num_prompts, width = front.node_BW.shape
    first = decoding.context.num_rows
    nodes = NodeBatch(
        prompt=prompts[:, None].expand_as(front.node_BW).reshape(-1),
        parent=front.parent_BW.reshape(-1),
        token=index.token[front.node_BW].reshape(-1),
        depth=torch.full((front.node_BW.numel(),), depth, device=index.device),
        slot=torch.arange(width, device=index.device).repeat(num_prompts),
        num_slots=width,
        max_depth=depth,
    )
    decoding.extend(nodes)
    rows = torch.arange(first, first + num_prompts * width, device=index.device)
    return rows.view(num_prompts, width)


def expand(decoding: Decoding, front: Front, row_BW: Tensor, depth: int) -> Children:
    """All children of the front in M slots, scored from the context rows of its beams."""
    index = decoding.index
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
    log_probs = decoding.log_probs(row_BW.reshape(-1), targets, index.norms[depth])
    log_probs = log_probs.view(num_prompts, slots)

    score_BM = front.score_BW.gather(1, beam_BM) + log_probs
    sound_BM = real_BM & (log_probs <= ROUNDING)  # False for NaN
    score_BM = torch.where(sound_BM, score_BM, -torch.inf)
    inherited = front.group_BW.gather(1, beam_BM)
    at_level = index.quota is not None and depth + 1 == index.quota.level
    group_BM = node_BM if at_level else inherited
    return Children(node_BM, beam_BM, real_BM, group_BM, log_probs, score_BM)


def select(
    index: DeviceTrie, children: Children, row_BW: Tensor, width: int, cap: int | None
) -> tuple[Front, Tensor]:
    """The next front, which continues `row_BW`, and the best score that was dropped `[B]`.

    With a `cap`, no group of the quota holds more beams than that.
    """
    inner = index.sid[children.node_BM] < 0
    score_BM = torch.where(inner, children.score_BM, -torch.inf)
    dropped = score_BM.new_full((len(score_BM),), -torch.inf)
    if cap is not None:
        key_BM = sort_key(score_BM, children.node_BM)
        over = place_in_group(key_BM, children.group_BM) >= cap
        dropped = torch.where(over, score_BM, -torch.inf).amax(dim=1)
        score_BM = torch.where(over, -torch.inf, score_BM)
    key_BM = sort_key(score_BM, children.node_BM)
    slots = key_BM.shape[1]
    best_BW = key_BM.topk(min(width + 1, slots), dim=1).indices
    ranked = score_BM.gather(1, best_BW)
    if slots > width:
        dropped = torch.maximum(dropped, ranked[:, width])

    best_BW = best_BW[:, :width]
    score_BW = ranked[:, :width]
    live_BW = score_BW > -torch.inf
    front = Front(
        node_BW=torch.where(live_BW, children.node_BM.gather(1, best_BW), 0),
        parent_BW=row_BW.gather(1, children.beam_BM.gather(1, best_BW)),
        score_BW=score_BW,
        live_BW=live_BW,
        group_BW=children.group_BM.gather(1, best_BW),
    )
    return front, dropped
