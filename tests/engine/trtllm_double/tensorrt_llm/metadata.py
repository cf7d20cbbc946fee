"""Attention of a packed pass: positions and who sees whom, as FlashInfer's kernel has it.

Source of the rule: flashinfer include/flashinfer/attention/prefill.cuh, multi-item scoring; and the
encoder runner's position ids.
"""

from __future__ import annotations

from typing import Any

import torch

from tensorrt_llm.recorder import FAULTS


class AttentionMetadata:
    """Sequences of a pass, all of them contexts."""

    def __init__(
        self,
        seq_lens: list[int],
        part_lens: list[list[int]] | None = None,
        cache: Any = None,
    ) -> None:
        self.seq_lens = seq_lens
        self.num_contexts = len(seq_lens)
        self.multi_item_part_lens = part_lens
        self.padded_num_tokens = None
        self._cache = cache
        self.embedded: torch.Tensor | None = None

    def position_ids(self) -> torch.Tensor:
        """`[1, tokens]`: every item begins where the prefix ends."""
        out = []
        for i, length in enumerate(self.seq_lens):
            if self.multi_item_part_lens is None:
                out.append(torch.arange(length))
                continue
            prefix, *items = self.multi_item_part_lens[i]
            out.append(torch.arange(prefix + 1))
            out += [torch.arange(prefix, prefix + item + 1) for item in items]
        return torch.cat(out)[None]

    def additive_mask(self, dtype: torch.dtype) -> torch.Tensor:
        """`[1, 1, tokens, tokens]`: 0 where a row sees a column."""
        total = sum(self.seq_lens)
        seen = torch.zeros(total, total, dtype=torch.bool)
        begin = 0
        for i, length in enumerate(self.seq_lens):
            part = slice(begin, begin + length)
            seen[part, part] = self._seen(i, length)
            begin += length
        mask = torch.zeros(total, total, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
        return mask[None, None]

    def _seen(self, i: int, length: int) -> torch.Tensor:
        row, column = torch.arange(length)[:, None], torch.arange(length)[None]
        causal = column <= row
        if self.multi_item_part_lens is None or "multi_item_wrong" in FAULTS:
            return causal
        prefix, *items = self.multi_item_part_lens[i]
        place = [0] * (prefix + 1)
        for item in items:
            place += [*range(1, item + 1), 0]
        inside = row < column + torch.tensor(place)[:, None]
        return causal & ((row < prefix) | (column < prefix) | inside)

    def poisoned(self, embedded: torch.Tensor) -> torch.Tensor:
        """The embeddings whose keys and values attention sees: with block reuse, those of an
        earlier request with the same tokens."""
        return embedded if self._cache is None else self._cache.seen_by_attention(embedded)


class BlockCache:
    """Reused blocks: keys hold the salt and token ids, and nothing of what stood at them."""

    def __init__(self) -> None:
        self._stored: dict[tuple[str | None, tuple[int, ...]], torch.Tensor] = {}

    def of(self, salt: str | None, tokens: list[int], width: int) -> _Request:
        """The cache as one request's `width` sequences meet it; the last token is never cached."""
        return _Request(self._stored, salt, tuple(tokens[:-1]), width)


class _Request:
    def __init__(self, stored, salt, tokens, width) -> None:
        self._stored, self._key, self._width = stored, (salt, tokens), width

    def seen_by_attention(self, embedded: torch.Tensor) -> torch.Tensor:
        length = len(self._key[1])
        each = embedded.view(self._width, -1, embedded.shape[-1]).clone()
        if self._key in self._stored:
            each[:, :length] = self._stored[self._key]
        else:
            self._stored[self._key] = each[0, :length].clone()
        return each.view_as(embedded)
