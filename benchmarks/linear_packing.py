"""Linear multi-item packing, as SGLang and TensorRT-LLM score many items, through our own backend.

There a request is `prompt <d> item1 <d> item2 <d> …`: every item is a chain of its own, each of
its tokens is forwarded and so is its delimiter, an item sees the prompt and itself, and its
positions start again behind the prompt; a delimiter sees the prompt alone, and nothing sees it.
Here the same rows go through `Backend.extend`, so that against the token tree only the layout
differs: no prefix is shared between items, last tokens and delimiters are forwarded. Logits over
the whole vocabulary are read at the prompt's end and at each token of an item, which is less than
TensorRT-LLM computes (it returns those of every packed position).

Sources: SGLang PR 10979, TensorRT-LLM PR 14693, and the mask in FlashInfer's prefill kernel.

Legend: U users, C items of a user, L tokens of an item, n nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.backend import Backend, Context, NodeBatch, Norm, PackedPrompts, Targets, TokenColumns
from schemas.requests import Ints, place_within

_DELIMITER = 0  # any token: nothing sees it
_FULL = Norm("full_vocab")


@dataclass(frozen=True, slots=True)
class _Level:
    """The tokens of one place in the items: what is read together, and each item's column in it."""

    columns: TokenColumns
    column: Tensor  # [U*C]


class LinearPacking:
    """Scores of items by their tokens; `rows` of them go through the layers."""

    def __init__(
        self, backend: Backend, prompts: PackedPrompts, items: Ints, max_rows: int = 8192
    ) -> None:
        """Args: items: `[U, C, L]` tokens; max_rows: nodes of one pass, as the engine's packs."""
        self._backend = backend
        self._device = backend.facts.device
        self._prompts = prompts
        users, count, self._length = items.shape
        self._shape = (users, count)
        self._user = np.repeat(np.arange(users, dtype=np.int64), count)
        flat = items.reshape(users * count, self._length)
        self._tokens = self._put(flat)
        self._levels = [self._level(flat[:, place]) for place in range(self._length)]
        self._step = max(1, max_rows // (self._length + 1))
        self.rows = len(prompts.token_ids) + flat.size + len(flat)

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        """Scores `[U, C]`, nats, float32."""
        num_items = len(self._tokens)
        chunk = min(self._step, num_items)
        context = self._backend.prefill(self._prompts, chunk * (self._length + 1))
        ends = torch.arange(self._shape[0], device=self._device)
        first = self._targets(self._put(self._user), 0, slice(None))
        score = self._backend.log_probs(context, ends, first, _FULL)
        for begin in range(0, num_items, chunk):
            part = slice(begin, begin + chunk)
            before = context.num_rows
            self._backend.extend(context, self._chains(before, part))
            score[part] += self._later_tokens(context, before, part)
            context.rewind(before)
        return score.view(self._shape)

    def _later_tokens(self, context: Context, first_row: int, part: slice) -> Tensor:
        """log p of the second and later tokens, summed `[n items]`."""
        num_items = len(self._tokens[part])
        start = torch.arange(num_items, device=self._device) * (self._length + 1) + first_row
        row = torch.arange(num_items, device=self._device)
        total = torch.zeros(num_items, device=self._device)
        for place in range(1, self._length):
            targets = self._targets(row, place, part)
            total += self._backend.log_probs(context, start + place - 1, targets, _FULL)
        last = self._targets(row, 0, part)  # read as those engines do, and not used
        self._backend.log_probs(context, start + self._length - 1, last, _FULL)
        return total

    def _chains(self, first_row: int, part: slice) -> NodeBatch:
        """The items of a part: `L` nodes in a row and a delimiter each."""
        user, length = self._user[part], self._length
        count, per_item = len(user), self._length + 1
        row = first_row + np.arange(count * per_item).reshape(count, per_item)
        parent = np.concatenate([user[:, None], row[:, : length - 1], user[:, None]], axis=1)
        depth = np.broadcast_to([*range(1, length + 1), 1], (count, per_item))
        prompt = np.repeat(user, per_item)
        slot = place_within(prompt)
        delimiters = self._tokens.new_full((count, 1), _DELIMITER)
        return NodeBatch(
            prompt=self._put(prompt),
            parent=self._put(parent.ravel()),
            token=torch.cat([self._tokens[part], delimiters], dim=1).flatten(),
            depth=self._put(depth.ravel()),
            slot=self._put(slot),
            num_slots=int(slot.max()) + 1,
            max_depth=length,
        )

    def _level(self, tokens: Ints) -> _Level:
        ids, column = np.unique(tokens, return_inverse=True)
        return _Level(TokenColumns(ids), self._put(column))

    def _targets(self, row: Tensor, place: int, part: slice) -> Targets:
        level = self._levels[place]
        return Targets(row=row, column=level.column[part], columns=level.columns)

    def _put(self, array: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self._device)
