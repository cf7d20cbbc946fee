"""What one would write with `transformers`: the same questions, asked of the same checkpoint.

Written to be fast rather than to lose: no row is padded, the last token of a candidate is not
forwarded, only the needed positions go through the head, and a log-probability is a gather minus a
log-sum-exp instead of a whole log-softmax.

Legend: U users, P prompt tokens, C candidates of a user, R rows of one forward, K results.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.workload import LEVELS, Workload
from schemas.requests import Ints

# The fastest of several batch sizes on a CPU: larger ones lose to the size of [rows, vocabulary].
_TOKENS = 2048  # prompt and candidate tokens in one forward
_ROWS = 128  # candidates in one forward where each is a row with a copy of the prompt's KV


class HuggingFace:
    """The library's model with its own attention, and the three ways to use it."""

    def __init__(self, work: Workload, device: torch.device) -> None:
        self._work = work
        self._device = device
        dtype = getattr(torch, work.shape.dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(work.folder, dtype=dtype)
        self.model: PreTrainedModel = model.to(device).eval()
        self._call: Any = self.model  # its calls and generate() carry no types
        self._prompts = work.prompts.to(device)  # [U, P]
        self._candidates = work.candidate_tokens.to(device)  # [U, C, 3]
        self._allowed = _children(work)

    @torch.inference_mode()
    def score_resending(self) -> Tensor:
        """Scores `[U, C]`; a row is a prompt and a candidate."""
        users, count, _ = self._candidates.shape
        prompts = self._prompts[:, None].expand(-1, count, -1).flatten(0, 1)
        tokens = self._candidates.flatten(0, 1)
        step = max(1, _TOKENS // (prompts.shape[1] + LEVELS - 1))
        scores = []
        for begin in range(0, len(tokens), step):
            part = slice(begin, begin + step)
            rows = torch.cat([prompts[part], tokens[part, :-1]], dim=1)
            logits = self._call(rows, use_cache=False, logits_to_keep=LEVELS).logits
            scores.append(_log_probs(logits, tokens[part]).sum(dim=1))
        return torch.cat(scores).view(users, count)

    @torch.inference_mode()
    def score_copying_cache(self) -> Tensor:
        """Scores `[U, C]`; each prompt once, its KV copied for every candidate."""
        users, count, _ = self._candidates.shape
        prompts = DynamicCache(config=self.model.config)
        first = self._call(self._prompts, past_key_values=prompts, logits_to_keep=1).logits
        score = _log_probs(first, self._candidates[:, :, 0]).flatten()
        tokens = self._candidates.flatten(0, 1)
        user = torch.arange(users, device=self._device).repeat_interleave(count)
        scores = []
        for begin in range(0, len(tokens), _ROWS):
            part = slice(begin, begin + _ROWS)
            cache = copy.copy(prompts)
            cache.layers = [copy.copy(layer) for layer in prompts.layers]
            cache.batch_select_indices(user[part])
            later = self._call(tokens[part, :-1], past_key_values=cache).logits
            scores.append(score[part] + _log_probs(later, tokens[part, 1:]).sum(dim=1))
        return torch.cat(scores).view(users, count)

    @torch.inference_mode()
    def beams(self) -> tuple[Ints, Tensor]:
        """SID tokens `[U, K, 3]` and scores `[U, K]`, by the library's own beam search."""
        shape = self._work.shape
        length = shape.prompt_tokens
        out = self._call.generate(
            self._prompts,
            attention_mask=torch.ones_like(self._prompts),
            num_beams=shape.width,
            num_return_sequences=shape.k,
            max_new_tokens=LEVELS,
            prefix_allowed_tokens_fn=lambda _, row: self._allowed[tuple(row[length:].tolist())],
            do_sample=False,
            length_penalty=0.0,
            early_stopping="never",
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=0,
        )
        tokens = out.sequences[:, length:].view(shape.users, shape.k, LEVELS)
        return tokens.cpu().numpy(), out.sequences_scores.view(shape.users, shape.k).float()


def _log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log p of tokens: `[R, L, V]` with `[R, L]`, or `[u, 1, V]` with C tokens each `[u, C]`."""
    logits = logits.float()
    total = logits.logsumexp(dim=-1)  # [R, L] or [u, 1]
    if logits.shape[1] == 1:
        return logits[:, 0].gather(1, tokens) - total
    return logits.gather(2, tokens[..., None])[..., 0] - total


def _children(work: Workload) -> dict[tuple[int, ...], list[int]]:
    """Tokens that may follow each prefix of a SID."""
    tokens = work.sid_tokens(np.arange(work.trie.num_sids, dtype=np.int64)).tolist()
    allowed: dict[tuple[int, ...], dict[int, None]] = {}
    for sid in tokens:
        for level in range(LEVELS):
            allowed.setdefault(tuple(sid[:level]), {})[sid[level]] = None
    return {prefix: list(after) for prefix, after in allowed.items()}
