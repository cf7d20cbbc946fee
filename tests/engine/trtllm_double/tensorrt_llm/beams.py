"""Beam search over the whole vocabulary, as the sampler returns it.

What callers must expect of upstream and get here too: the order of beams means nothing; where there
are fewer finite candidates than beams, rows are empty, or have the score -inf; a logits processor
sees what was sampled in its slot, not the history of its beam.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tensorrt_llm.executor.result import CompletionOutput, Logprob
from tensorrt_llm.recorder import FAULTS

Step = Callable[[list[list[int]]], torch.Tensor]  # histories -> logits [beams, vocab]


def search(step: Step, params: Any, prompt: list[int]) -> list[CompletionOutput]:
    """`best_of` beams of `max_tokens` tokens."""
    width = params.beam_width
    beams: list[list[int]] = [[]]
    scores = torch.zeros(1)
    each: list[list[float]] = [[]]
    slots: list[list[int]] = [[] for _ in range(width)]
    for _ in range(params.max_tokens):
        logits = step(beams)
        if params.logits_processor is not None:
            histories = [prompt + slot for slot in slots[: len(beams)]]
            params.logits_processor(0, logits[:, None], histories, None, None)
        log_probs = torch.log_softmax(logits.float(), dim=-1)
        total = scores[:, None] + log_probs
        best = total.flatten().topk(min(width, total.numel()))
        parent, token = best.indices // total.shape[1], best.indices % total.shape[1]
        chosen = log_probs[parent, token]
        each = [
            [*each[int(p)], float(c)] for p, c in zip(parent.tolist(), chosen.tolist(), strict=True)
        ]
        beams = [
            [*beams[int(p)], int(t)] for p, t in zip(parent.tolist(), token.tolist(), strict=True)
        ]
        scores = best.values
        for slot, t in zip(slots, token.tolist(), strict=False):
            slot.append(int(t))
    found = [
        _completion(i, beam, float(score), parts, params)
        for i, (beam, score, parts) in enumerate(zip(beams, scores, each, strict=True))
    ]
    found += [CompletionOutput(i, finish_reason="length") for i in range(len(found), width)]
    found = _faulty(found)
    return found[1:] + found[:1]  # in no order that anyone may rely on


def _completion(i, beam, score, parts, params) -> CompletionOutput:
    asked = params.logprobs is not None
    return CompletionOutput(
        i,
        token_ids=beam,
        cumulative_logprob=score if asked else None,
        logprobs=[{t: Logprob(p)} for t, p in zip(beam, parts, strict=True)] if asked else [],
        finish_reason="length",
    )


def _faulty(found: list[CompletionOutput]) -> list[CompletionOutput]:
    half = len(found) // 2
    for output, twin in zip(found[half:], found, strict=False):
        if "beams_empty" in FAULTS:
            output.token_ids, output.cumulative_logprob = [], None
        if "beams_infinite" in FAULTS:
            output.cumulative_logprob = float("-inf")
        if "beams_doubled" in FAULTS:
            output.token_ids = list(twin.token_ids)
            output.cumulative_logprob = twin.cumulative_logprob
    return found
