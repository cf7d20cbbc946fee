"""What the prompts of a search may not enter: exclusions of a user, eligibility of its segment."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from engine.trees.device_trie import DeviceTrie


@dataclass(frozen=True, slots=True)
class SegmentMask:
    """Which trie nodes each segment of prompts may enter (`EligibleTrie`)."""

    alive: Tensor  # [segments, V] bool
    of_prompt: Tensor  # [prompts of the context] int64

    def __call__(self, prompt: Tensor, node: Tensor) -> Tensor:
        """Whether a prompt may enter a node; elementwise."""
        return self.alive[self.of_prompt[prompt], node]


@dataclass(frozen=True, slots=True)
class Mask:
    """What the prompts of a search may not enter."""

    prompts: Tensor  # [B] rows of the context
    dead: Tensor | None = None  # sorted keys of `dead_nodes`, `user` a row of the context
    segments: SegmentMask | None = None

    def of(self, who: Tensor) -> Mask:
        """For some of the prompts of the search."""
        return replace(self, prompts=self.prompts[who])

    def allows(self, index: DeviceTrie, prompt: Tensor, node: Tensor, real: Tensor) -> Tensor:
        """Where a node of the trie is `real` and has an item left for a prompt (a row of the
        context); elementwise, of any shape.
        """
        if self.segments is not None:
            real = real & self.segments(prompt, node)
        if self.dead is not None and len(self.dead):
            real = real & ~index.is_dead(prompt, node, self.dead)
        return real
