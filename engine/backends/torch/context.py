"""KV of a batch: the static prefix once, each prompt once, and tree nodes appended one after
another.

Legend: B prompts, T their tokens, L longest prompt, P static prefix, H KV heads, D head width, n
nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.backends.torch.varlen import Kernels, Segments
from engine.row_tiles import LEAST_KEYS, padded
from schemas.requests import Ints


@dataclass(slots=True)
class PrefixKV:
    """Keys and values of the static prefix per layer, `[H, P, D]` each; shared by reference."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    length: int = 0
    hidden_sum: Tensor | None = None  # [hidden] float32, over the prefix; None: no prefix


class TorchContext:
    """What `prefill` makes and `extend` grows. Layers are filled in order during a forward pass."""

    def __init__(
        self,
        prompt_tokens: Ints,
        device: torch.device,
        prefix: PrefixKV,
        hidden_size: int,
        max_nodes: int,
        dtype: torch.dtype,
        kernels: Kernels | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens  # [B] of each prompt, the prefix not counted; host
        self.lengths = torch.from_numpy(prompt_tokens).to(device)  # [B] the same on the device
        self.max_length = padded(int(prompt_tokens.max()), LEAST_KEYS)  # L
        self.prefix = prefix
        self.kernels = kernels  # of fused attention; None: there are none here
        self.segments = None if kernels is None else _segments(self.lengths, self.max_length)
        self.prompt_keys: list[Tensor] = []  # per layer [B, H, L, D]; [T, H, D] with kernels
        self.prompt_values: list[Tensor] = []
        self.node_keys: list[Tensor] = []  # per layer [capacity, H, D]
        self.node_values: list[Tensor] = []
        self.num_nodes = 0
        self._capacity = max_nodes
        rows = len(prompt_tokens) + max_nodes
        self.hidden = torch.empty((rows, hidden_size), dtype=dtype, device=device)  # [B + capacity]
        self.parent = torch.full((max_nodes,), -1, dtype=torch.int64, device=device)  # node or -1
        self.stored = torch.zeros_like(self.parent)  # where a node's KV is

    @property
    def num_prompts(self) -> int:
        """B."""
        return len(self.prompt_tokens)

    @property
    def num_rows(self) -> int:
        """B + nodes."""
        return self.num_prompts + self.num_nodes

    def rewind(self, num_rows: int) -> None:
        """Forget the nodes from row `num_rows` on; what comes next overwrites them."""
        self.num_nodes = num_rows - self.num_prompts

    def reserve(self, nodes: int) -> None:
        """Make room for `nodes` more; only a caller that announced too few pays this copy."""
        needed = self.num_nodes + nodes
        if needed <= self._capacity:
            return
        grow = max(needed, 2 * self._capacity) - self._capacity

        def longer(tensor: Tensor) -> Tensor:
            return torch.cat([tensor, tensor.new_empty((grow, *tensor.shape[1:]))])

        self.node_keys = [longer(t) for t in self.node_keys]
        self.node_values = [longer(t) for t in self.node_values]
        self.hidden, self.parent = longer(self.hidden), longer(self.parent)
        self.stored = longer(self.stored)
        self._capacity += grow

    def keep_prompts(self, layer: int, prompts: slice, keys: Tensor, values: Tensor) -> None:
        """Store the KV `[b, l, H, D]` of some prompts, zero behind each prompt's tokens."""
        _, length, heads, width = keys.shape
        if layer == len(self.prompt_keys):
            shape = (self.num_prompts, heads, self.max_length, width)
            self.prompt_keys.append(keys.new_zeros(shape))
            self.prompt_values.append(keys.new_zeros(shape))
        self.prompt_keys[layer][prompts, :, :length] = keys.transpose(1, 2)
        self.prompt_values[layer][prompts, :, :length] = values.transpose(1, 2)

    def keep_packed(self, keys: Tensor, values: Tensor) -> None:
        """Store the KV `[T, H, D]` of all prompts at the next layer as it is."""
        self.prompt_keys.append(keys.contiguous())
        self.prompt_values.append(values.contiguous())

    def keep_nodes(self, layer: int, stored: slice, keys: Tensor, values: Tensor) -> None:
        """Store the KV `[n, H, D]` of the nodes being forwarded."""
        if layer == len(self.node_keys):
            shape = (self._capacity, *keys.shape[1:])
            self.node_keys.append(keys.new_empty(shape))
            self.node_values.append(keys.new_empty(shape))
        self.node_keys[layer][stored] = keys
        self.node_values[layer][stored] = values

    def segments_of(self, prompt: Tensor, longest: int) -> Segments:
        """Rows that are sorted by their `prompt` `[n]`, at most `longest` of each."""
        counts = torch.zeros_like(self.lengths).index_add_(0, prompt, torch.ones_like(prompt))
        return _segments(counts, longest)

    def place_nodes(self, order: Tensor) -> None:
        """The KV of the newest nodes will be stored in this order."""
        new = torch.arange(self.num_nodes, self.num_nodes + len(order), device=order.device)
        self.stored[new[order]] = new

    def ancestors(self, num_new: int, depth: int) -> tuple[Tensor, Tensor]:
        """Where the KV of the newest nodes and of their ancestors is stored `[n, depth]`, a node
        itself first; and which are real. What is not real points to the node itself.
        """
        node = torch.arange(self.num_nodes, self.num_nodes + num_new, device=self.lengths.device)
        here, path = node, [node]
        for _ in range(depth - 1):
            here = torch.where(here >= 0, self.parent[here.clamp(min=0)], -1)
            path.append(here)
        table = torch.stack(path, dim=1)
        return self.stored[torch.where(table >= 0, table, node[:, None])], table >= 0


def _segments(counts: Tensor, longest: int) -> Segments:
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
    starts[1:] = counts.cumsum(dim=0)
    return Segments(starts, longest)
