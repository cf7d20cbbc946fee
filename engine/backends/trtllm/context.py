"""Prompts and the nodes hanging from them, on the host: TensorRT-LLM takes lists of token ids and
keeps nothing between calls.

Legend: B prompts, n nodes, H hidden size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.backend import NodeBatch, PackedPrompts
from engine.prompts.builder import join
from schemas.requests import Ints, Ragged


class TrtllmContext:
    """What `prefill` makes and `extend` grows. Nothing is forwarded until something is read."""

    def __init__(self, packed: PackedPrompts, device: torch.device) -> None:
        num, length = packed.num_prompts, len(packed.static_prefix)
        prefix = Ragged(
            np.arange(num + 1, dtype=np.int64) * length, np.tile(packed.static_prefix, num)
        )
        self.prompts = join([prefix, Ragged(packed.offsets, packed.token_ids)], num)  # [B]
        first = np.searchsorted(packed.soft_positions, packed.offsets)
        shift = np.repeat(length - packed.offsets[:-1], np.diff(first))
        self.soft_places = Ragged(first.astype(np.int64), packed.soft_positions + shift)  # [B]
        self.soft_vectors = packed.soft_vectors  # [S, H] by prompt
        self.parent = np.empty(0, dtype=np.int64)  # [n] a node, -1: the prompt end
        self.token = np.empty(0, dtype=np.int64)
        self.prompt = np.empty(0, dtype=np.int64)
        self.depth = np.empty(0, dtype=np.int64)  # [n] 1 for a child of a prompt end
        self.forwarded = np.zeros(num, dtype=np.int64)  # [B] tokens sent for each prompt
        self._known = np.zeros(num, dtype=bool)  # [rows] which hidden states are kept
        self._asked = np.zeros(num, dtype=bool)  # [rows] which were asked about
        self._hidden: Tensor | None = None  # [rows, H]
        self._device = device

    @property
    def num_prompts(self) -> int:
        """B."""
        return self.prompts.num_rows

    @property
    def num_rows(self) -> int:
        """B + n."""
        return self.num_prompts + len(self.token)

    def append(self, nodes: NodeBatch) -> None:
        """Note the nodes. Waits for the device: their tokens must be known on the host."""
        table = torch.stack([nodes.parent, nodes.token, nodes.prompt, nodes.depth]).cpu().numpy()
        parent = np.maximum(table[0] - self.num_prompts, -1)
        self.parent = np.concatenate([self.parent, parent])
        self.token = np.concatenate([self.token, table[1]])
        self.prompt = np.concatenate([self.prompt, table[2]])
        self.depth = np.concatenate([self.depth, table[3]])
        none = np.zeros(table.shape[1], dtype=bool)
        self._known = np.concatenate([self._known, none])
        self._asked = np.concatenate([self._asked, none])

    def rewind(self, num_rows: int) -> None:
        """Forget the nodes from row `num_rows` on."""
        kept = num_rows - self.num_prompts
        self.parent, self.token = self.parent[:kept], self.token[:kept]
        self.prompt, self.depth = self.prompt[:kept], self.depth[:kept]
        self._known, self._asked = self._known[:num_rows], self._asked[:num_rows]

    def to_read(self, asked: Ints, needed: Ints) -> Ints:
        """Rows to forward when `needed` of the `asked` rows have real targets.

        Nodes that nobody asked about yet were appended to be read later: they come along, so that
        a tree is forwarded in one go. What was asked about without a target (a dead beam) does not.
        """
        self._asked[asked] = True
        nodes = self.num_prompts + np.flatnonzero(~self._asked[self.num_prompts :])
        rows = np.union1d(needed, nodes).astype(np.int64)
        return rows[~self._known[rows]]

    def keep(self, rows: Ints, hidden: Tensor) -> None:
        """Keep hidden states `[r, H]` of rows."""
        if self._hidden is None:
            self._hidden = hidden.new_zeros((self.num_rows, hidden.shape[1]))
        self._reserve()
        self._hidden[torch.from_numpy(rows).to(hidden.device)] = hidden
        self._known[rows] = True

    def hidden(self, rows: Tensor) -> Tensor:
        """Kept hidden states `[r, H]`; of a row that was never kept, anything finite."""
        self._reserve()
        assert self._hidden is not None, "nothing was read yet"
        return self._hidden[rows]

    def _reserve(self) -> None:
        """Room for all rows."""
        if self._hidden is None or len(self._hidden) >= self.num_rows:
            return
        more = max(self.num_rows, 2 * len(self._hidden)) - len(self._hidden)
        self._hidden = torch.cat(
            [self._hidden, self._hidden.new_zeros((more, self._hidden.shape[1]))]
        )
