"""What one would write with `transformers`: the same questions, asked of the same checkpoint.

Written to be fast rather than to lose: no row is padded, the last token of a candidate is not
forwarded, only the needed positions go through the head, and a log-probability is a gather minus a
log-sum-exp instead of a whole log-softmax.

Legend: U users, P prompt tokens, C candidates of a user, R rows of one forward, K results.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging as transformers_logging

from benchmarks.checkpoint import LEVELS, Checkpoint
from benchmarks.workload import Workload
from schemas.requests import Ints

# The fastest of several batch sizes on a CPU: larger ones lose to the size of [rows, vocabulary].
# On CUDA large enough to fill the device; not tuned.
_TOKENS = {"cpu": 2048, "cuda": 16_384}  # prompt and candidate tokens in one forward
_ROWS = {"cpu": 128, "cuda": 256}  # candidates in one forward, each with a copy of the prompt's KV


def load_reference(checkpoint: Checkpoint, device: torch.device) -> PreTrainedModel:
    """The library's model with its own attention."""
    quiet: Any = transformers_logging  # its functions carry no types
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*past_key_values. is deprecated")
    dtype = getattr(torch, checkpoint.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=dtype)
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


class HuggingFace:
    """The three ways to use the library on a workload whose prompts have one length."""

    def __init__(self, work: Workload, model: PreTrainedModel) -> None:
        self._work = work
        self._model = model
        self._call: Any = model  # its calls and generate() carry no types
        prompts = torch.from_numpy(np.stack(work.prompt_tokens))
        self._prompts = prompts.to(model.device)  # [U, P]
        self._candidates = torch.from_numpy(work.candidate_tokens).to(model.device)  # [U, C, 3]
        self._allowed: dict[tuple[int, ...], list[int]] = {}
        if work.case.task == "generate":
            self._allowed = _children(work)

    @torch.inference_mode()
    def score_resending(self, sample: int) -> Tensor:
        """Scores of the first candidates `[U, sample]`; a row is a prompt and a candidate."""
        candidates = self._candidates[:, :sample]
        users, count, _ = candidates.shape
        prompts = self._prompts[:, None].expand(-1, count, -1).flatten(0, 1)
        tokens = candidates.flatten(0, 1)
        step = max(1, _TOKENS[self._model.device.type] // (prompts.shape[1] + LEVELS - 1))
        scores = []
        for begin in range(0, len(tokens), step):
            part = slice(begin, begin + step)
            rows = torch.cat([prompts[part], tokens[part, :-1]], dim=1)
            logits = self._call(rows, use_cache=False, logits_to_keep=LEVELS).logits
            scores.append(_log_probs(logits, tokens[part]).sum(dim=1))
        return torch.cat(scores).view(users, count)

    @torch.inference_mode()
    def score_sharing_cache(self) -> Tensor:
        """Scores `[U, C]`; each prompt once, its KV copied for every candidate of a forward."""
        users, count, _ = self._candidates.shape
        prompts = DynamicCache(config=self._model.config)
        first = self._call(self._prompts, past_key_values=prompts, logits_to_keep=1).logits
        score = _log_probs(first, self._candidates[:, :, 0]).flatten()
        tokens = self._candidates.flatten(0, 1)
        user = torch.arange(users, device=tokens.device).repeat_interleave(count)
        scores = []
        step = _ROWS[self._model.device.type]
        for begin in range(0, len(tokens), step):
            part = slice(begin, begin + step)
            cache = copy.copy(prompts)
            cache.layers = [copy.copy(layer) for layer in prompts.layers]
            cache.batch_select_indices(user[part])
            later = self._call(tokens[part, :-1], past_key_values=cache).logits
            scores.append(score[part] + _log_probs(later, tokens[part, 1:]).sum(dim=1))
        return torch.cat(scores).view(users, count)

    @torch.inference_mode()
    def beams(self) -> tuple[Ints, Tensor]:
        """SID tokens `[U, K, 3]` and scores `[U, K]`, by the library's own beam search."""
        case, length = self._work.case, self._prompts.shape[1]
        out = self._call.generate(
            self._prompts,
            attention_mask=torch.ones_like(self._prompts),
            num_beams=case.width,
            num_return_sequences=case.k,
            max_new_tokens=LEVELS,
            prefix_allowed_tokens_fn=lambda _, row: self._allowed[tuple(row[length:].tolist())],
            do_sample=False,
            length_penalty=0.0,
            early_stopping="never",
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=0,
        )
        tokens: Ints = out.sequences[:, length:].view(case.users, case.k, LEVELS).cpu().numpy()
        return tokens, out.sequences_scores.view(case.users, case.k).float()


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
