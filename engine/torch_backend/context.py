"""KV of a batch: the static prefix once, each prompt once, and tree nodes appended one after
another.

Legend: B prompts, L longest prompt, P static prefix, H KV heads, D head width, n nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class PrefixKV:
    """Keys and values of the static prefix per layer, `[H, P, D]` each; shared by reference."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    length: int = 0


class TorchContext:
    """What `prefill` makes and `extend` grows. Layers are filled in order during a forward pass."""

    def __init__(
        self,
        lengths: Tensor,
        max_length: int,
        prefix: PrefixKV,
        hidden_size: int,
        max_nodes: int,
        dtype: torch.dtype,
    ) -> None:
        self.lengths = lengths  # [B] tokens of each prompt, the prefix not counted
        self.max_length = max_length
        self.prefix = prefix
        self.prompt_keys: list[Tensor] = []  # per layer [B, H, L, D]
        self.prompt_values: list[Tensor] = []
        self.node_keys: list[Tensor] = []  # per layer [capacity, H, D]
        self.node_values: list[Tensor] = []
        self.num_nodes = 0
        self._capacity = max_nodes
        device, rows = lengths.device, len(lengths) + max_nodes
        self.hidden = torch.zeros((rows, hidden_size), dtype=dtype, device=device)  # [B + capacity]
        self.parent = torch.full((max_nodes,), -1, dtype=torch.int64, device=device)  # node or -1

    @property
    def num_prompts(self) -> int:
        """B."""
        return len(self.lengths)

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
            return torch.cat([tensor, tensor.new_zeros((grow, *tensor.shape[1:]))])

        self.node_keys = [longer(t) for t in self.node_keys]
        self.node_values = [longer(t) for t in self.node_values]
        self.hidden, self.parent = longer(self.hidden), longer(self.parent)
        self._capacity += grow

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the KV `[n, H, D]` of the nodes being forwarded, behind those already there."""
        if layer == len(self.node_keys):
            shape = (self._capacity, *keys.shape[1:])
            self.node_keys.append(keys.new_zeros(shape))
            self.node_values.append(keys.new_zeros(shape))
        place = slice(self.num_nodes, self.num_nodes + len(keys))
        self.node_keys[layer][place] = keys
        self.node_values[layer][place] = values

    def ancestors(self, num_new: int, depth: int) -> tuple[Tensor, Tensor]:
        """For the newest nodes: themselves and their ancestors `[n, depth]`, and which are real."""
        here = torch.arange(self.num_nodes, self.num_nodes + num_new, device=self.lengths.device)
        path = [here]
        for _ in range(depth - 1):
            here = torch.where(here >= 0, self.parent[here.clamp(min=0)], -1)
            path.append(here)
        table = torch.stack(path, dim=1)
        return table.clamp(min=0), table >= 0
