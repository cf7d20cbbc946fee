"""What goes through the model together: passes of whole prompts or of tree nodes, and their layout.

On a CPU a pass is about a thousand rows: its temporaries stay in the cache and are given back to
the allocator instead of the system (page faults of large temporaries cost more than the arithmetic
on them), and a matmul is as fast at a thousand rows as at any more. On CUDA everything is one pass.

With a fused kernel (varlen.py) the rows of a pass stay packed, sorted by prompt.

Legend: B prompts, n rows of a pass, b prompts and S node slots of a block, A ancestors of a node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.backend import NodeBatch
from engine.backends.torch.context import PrefixKV, TorchContext
from engine.backends.torch.varlen import Segments
from engine.row_tiles import LEAST_KEYS, TILE, padded, row_chunks
from schemas.requests import Ints

ROWS_PER_THREAD = 1024  # of one pass on a CPU
_PADDED_SLOTS = 2  # most slots of a block for each that its prompts would have apart; a block costs
# about as much as these save, and the slots of a tree are few beside the keys of its prompt


@dataclass(frozen=True, slots=True)
class PrefixPass:
    """Forwards the static prefix, P rows, and keeps its KV."""

    prefix: PrefixKV
    num_rows: int
    independent: bool


@dataclass(frozen=True, slots=True)
class PromptPass:
    """Forwards some of the packed prompts; `place[t]` is a token's position in `[b * length]`."""

    context: TorchContext
    prompts: slice
    rows: slice  # of the packed tokens
    place: Tensor | None  # [n]; None: the rows stay packed
    length: int  # of the longest of these prompts, padded
    independent: bool
    ends: Tensor | None  # [b] rows of the pass that are read behind the last layer; None: all

    @property
    def num_rows(self) -> int:
        """Tokens forwarded."""
        return int(self.rows.stop - self.rows.start)

    @property
    def shape(self) -> tuple[int, int]:
        """b prompts, each as long as the longest, padded."""
        return self.prompts.stop - self.prompts.start, self.length


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring prompts whose nodes attend together, laid out as `[b, S]`."""

    prompts: slice
    rows: slice  # of the pass
    slots: int  # S
    place: Tensor | None  # [rows] in [b * S]; None: the rows are the layout already
    shortest: int  # tokens of the shortest of these prompts …
    longest: int  # … and of the longest

    @property
    def keys(self) -> int:
        """Keys of the block's prompts that anyone looks at, in whole tiles."""
        return padded(self.longest, LEAST_KEYS)

    def prepack(self, x: Tensor) -> Tensor:
        """Rows `[m, H, G, C]` as `[b * H, S * G, C]`; free slots are zero."""
        b, (_, heads, group, width) = self.prompts.stop - self.prompts.start, x.shape
        if self.place is not None:
            free = x.new_zeros((b * self.slots, heads, group, width))
            x = free.index_copy_(0, self.place, x)
        x = x.view(b, self.slots, heads, group, width).transpose(1, 2)
        return x.reshape(b * heads, self.slots * group, width)

    def pack(self, x: Tensor, heads: int) -> Tensor:
        """What `prepack` did, undone: `[b * H, S * G, C]` to rows `[m, H, G, C]`."""
        x = x.view(-1, heads, self.slots, x.shape[1] // self.slots, x.shape[2]).transpose(1, 2)
        x = x.flatten(0, 1)
        return x if self.place is None else x.index_select(0, self.place)


@dataclass(frozen=True, slots=True)
class NodePass:
    """Forwards n of the nodes of a call, stored in the context behind one another."""

    context: TorchContext
    nodes: Tensor  # [n] which of the call's nodes these are
    stored: slice  # where their KV goes
    ancestors: Tensor  # [n, A] where the KV of each node's ancestors is, itself first
    is_ancestor: Tensor  # [n, A]
    blocks: list[Block]
    segments: Segments | None = None  # whose the rows are, sorted by prompt; instead of blocks

    @property
    def num_rows(self) -> int:
        """Nodes forwarded."""
        return len(self.nodes)


TreePass = PrefixPass | PromptPass | NodePass


def prompt_passes(
    context: TorchContext, offsets: Ints, independent: bool, ends_only: bool
) -> Iterator[PromptPass]:
    """Whole prompts, in order, as many as fit a pass; a longer one has a pass of its own."""
    device = context.lengths.device
    if context.kernels is not None:
        every, tokens = slice(0, len(offsets) - 1), slice(0, int(offsets[-1]))
        ends = torch.from_numpy(offsets[1:] - 1).to(device) if ends_only else None
        yield PromptPass(context, every, tokens, None, context.max_length, independent, ends)
        return
    most = _most_rows(context)
    first = 0
    while first < len(offsets) - 1:
        stop = int(np.searchsorted(offsets, offsets[first] + most, side="right")) - 1
        stop = max(stop, first + 1)
        lengths = np.diff(offsets[first : stop + 1])
        length = padded(int(lengths.max()), LEAST_KEYS)
        place = np.concatenate([np.arange(n) + i * length for i, n in enumerate(lengths)])
        rows = slice(int(offsets[first]), int(offsets[stop]))
        put = torch.from_numpy(place).to(device)
        ends = torch.from_numpy(lengths.cumsum() - 1).to(device) if ends_only else None
        yield PromptPass(context, slice(first, stop), rows, put, length, independent, ends)
        first = stop


def node_passes(context: TorchContext, nodes: NodeBatch, independent: bool) -> Iterator[NodePass]:
    """The nodes of one call, of which the context holds the parents already.

    On a CPU, and for fused attention, they go prompt by prompt, parents first, so that a pass meets
    few prompts. Else they stay as they are, in one block over all prompts. On a GPU nothing waits
    for the device.
    """
    count, first = len(nodes.token), context.num_nodes
    if _on_cpu(context) or context.kernels is not None:
        order = torch.argsort(nodes.prompt * (nodes.max_depth + 1) + nodes.depth, stable=True)
    else:
        order = torch.arange(count, device=context.lengths.device)
    context.place_nodes(order)
    ancestors, is_ancestor = context.ancestors(count, nodes.max_depth)
    if context.kernels is not None:
        segments = context.segments_of(nodes.prompt, nodes.num_slots)
        stored, ancestors = slice(first, first + count), ancestors[order]
        yield NodePass(context, order, stored, ancestors, is_ancestor[order], [], segments)
        return
    for part in row_chunks(count, _most_rows(context)):
        some = order[part]
        if _on_cpu(context):
            blocks = _blocks(nodes.prompt[some].numpy(), context.prompt_tokens, independent)
        else:
            blocks = [_whole_block(context, nodes)]
        stored = slice(first + part.start, first + part.stop)
        yield NodePass(context, some, stored, ancestors[some], is_ancestor[some], blocks)


def _on_cpu(context: TorchContext) -> bool:
    return context.lengths.device.type == "cpu"


def _most_rows(context: TorchContext) -> int:
    if _on_cpu(context):
        return ROWS_PER_THREAD * torch.get_num_threads()
    return 1 << 31


def _whole_block(context: TorchContext, nodes: NodeBatch) -> Block:
    lengths, slots = context.prompt_tokens, padded(nodes.num_slots, TILE)
    place = nodes.prompt * slots + nodes.slot
    return Block(
        slice(0, len(lengths)),
        slice(0, len(place)),
        slots,
        place,
        int(lengths.min()),
        int(lengths.max()),
    )


def _blocks(prompt: Ints, lengths: Ints, independent: bool) -> list[Block]:
    """Runs of neighbouring prompts with about as many nodes each; `prompt` `[n]` is ascending."""
    ids, starts, counts = np.unique(prompt, return_index=True, return_counts=True)
    ends, blocks, i = starts + counts, [], 0
    apart = (
        -(-counts // TILE) * TILE if independent else counts
    )  # slots of each in a block of its own
    while i < len(ids):
        j, slots, total = i + 1, int(apart[i]), int(apart[i])
        while j < len(ids) and ids[j] == ids[j - 1] + 1:
            wider, total = max(slots, int(apart[j])), total + int(apart[j])
            if wider * (j + 1 - i) > _PADDED_SLOTS * total:
                break
            j, slots = j + 1, wider
        place = None
        if (counts[i:j] != slots).any():
            place = torch.from_numpy(
                np.concatenate([np.arange(counts[at]) + (at - i) * slots for at in range(i, j)])
            )
        own = lengths[ids[i] : ids[j - 1] + 1]
        blocks.append(
            Block(
                slice(int(ids[i]), int(ids[j - 1]) + 1),
                slice(int(starts[i]), int(ends[j - 1])),
                slots,
                place,
                int(own.min()),
                int(own.max()),
            )
        )
        i = j
    return blocks
