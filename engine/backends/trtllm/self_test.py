"""What the encode engine is asked at start-up, because builds differ and the wrong ones answer too.

Two items behind one prompt must read as two prompts of their own do, and the prompt's end as the
prompt alone. Refused or wrong: single-item prompts from then on, with the reason in the log. A
failure of plain prompts is the engine's end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.backend import PackedPrompts
from engine.backends.trtllm.beam_engine import BeamEngine
from engine.backends.trtllm.context import TrtllmContext
from engine.backends.trtllm.encode_engine import EncodeEngine, as_prompt
from engine.backends.trtllm.errors import running
from engine.backends.trtllm.packing import DELIMITER
from schemas.errors import EngineError
from schemas.requests import Ints

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}  # nats, largest difference among likely tokens
_LIKELY = 64

LogProbs = Callable[[Tensor], Tensor]  # rows of the engine's output -> log p of every token


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What came out. `refused`: why multi-item prompts are not used; None: they are."""

    device: torch.device
    refused: str | None


def probe_tokens(vocab_size: int) -> tuple[Ints, list[Ints]]:
    """A prompt and two items, of different lengths, from anywhere in the vocabulary."""
    tokens = (7 * np.arange(11, dtype=np.int64) + 3) % vocab_size
    return tokens[:6], [tokens[6:9], tokens[9:11]]


def run_self_test(
    engine: EncodeEngine, vocab_size: int, dtype: str, log_probs: LogProbs, *, multi_item: bool
) -> SelfTest:
    """See the module. `multi_item` False: only plain prompts are tried.

    Raises:
        EngineError: plain prompts do not work.
    """
    prefix, items = probe_tokens(vocab_size)
    plain = [prefix, *(np.concatenate([prefix, item]) for item in items)]
    try:
        out = engine.encode([as_prompt(tokens, None) for tokens in plain])
        want = [log_probs(rows[-1:]) for rows in out]
        counts = [len(rows) for rows in out]
    except torch.OutOfMemoryError:
        raise
    except Exception as err:  # of any layer below
        raise EngineError(
            "TensorRT-LLM's encode engine does not run",
            got=f"{type(err).__name__}: {err}",
            do="Its kernels need bfloat16, a head width of 64, 128 or 256, and a supported GPU.",
        ) from err
    if counts != [len(tokens) for tokens in plain]:
        raise EngineError(
            "TensorRT-LLM's encode engine does not give a row per token",
            expected=str([len(tokens) for tokens in plain]),
            got=str(counts),
        )
    if not all(rows.isfinite().all() for rows in want):
        raise EngineError("TensorRT-LLM's encode engine gives NaN", got="a probe of 6 tokens")
    refused = "engine.trtllm.multi_item is off"
    if multi_item:
        refused = _compare(engine, prefix, items, want, dtype, log_probs) or ""
    return SelfTest(out[0].device, refused or None)


def _compare(
    engine: EncodeEngine,
    prefix: Ints,
    items: list[Ints],
    want: list[Tensor],
    dtype: str,
    log_probs: LogProbs,
) -> str | None:
    """Why multi-item prompts cannot be used; None: they agree with plain ones."""
    parts = [prefix, *items]
    tokens = np.concatenate([np.append(part, DELIMITER) for part in parts])
    ends = np.cumsum([len(part) + 1 for part in parts]) - 2
    try:
        rows = engine.encode([as_prompt(tokens, [len(part) for part in parts])])[0]
        got = [log_probs(rows[int(end) : int(end) + 1]) for end in ends]
    except torch.OutOfMemoryError:
        raise
    except Exception as err:  # refusals have no type of their own: ValueError, TypeError, …
        return f"refused: {type(err).__name__}: {err}"
    for name, one, other in zip(("prompt", "item 1", "item 2"), got, want, strict=True):
        difference = largest_difference(one, other)
        if not difference <= TOLERANCE[dtype]:
            return f"wrong: the end of the {name} differs by {difference:.3g} nats"
    return None


def largest_difference(got: Tensor, want: Tensor) -> float:
    """Nats, over the tokens that are likely by `want` `[1, vocab]`."""
    likely = want.topk(min(_LIKELY, want.shape[1]), dim=1).indices
    return float((got.gather(1, likely) - want.gather(1, likely)).abs().max())


@torch.inference_mode()
def check_beams(
    beams: BeamEngine,
    engine: EncodeEngine,
    prompt_tokens: int,
    vocab_size: int,
    device: torch.device,
    dtype: str,
    log_probs: LogProbs,
) -> None:
    """The best beam behind a probe must have the score of its tokens, read one by one.

    Raises:
        EngineError: it has not, or there is no beam at all.
    """
    prefix = probe_tokens(vocab_size)[0][:prompt_tokens]
    found = beams.search(TrtllmContext(one_prompt(prefix), device))
    tokens, score = found.tokens[0], found.score[0].copy()
    score[(found.length[0] != tokens.shape[1]) | ~np.isfinite(score)] = -np.inf
    best = int(score.argmax())
    limit = tokens.shape[1] * TOLERANCE[dtype]
    difference = float("inf")
    if score[best] > -np.inf:
        whole = np.concatenate([prefix, tokens[best]])
        with running("read a beam again"):
            rows = engine.encode([as_prompt(whole, None)])[0]
        chosen = torch.from_numpy(tokens[best]).to(rows.device)[:, None]
        forced = log_probs(rows[len(prefix) - 1 : -1]).gather(1, chosen)
        difference = abs(float(forced.sum()) - float(score[best]))
    if not difference <= limit:
        raise EngineError(
            "TensorRT-LLM's beams do not have the scores of their tokens",
            expected=f"a difference of at most {limit:g} nats",
            got=f"{difference:.3g}",
            do="Use task.generate.mode: constrained, or another version (docs/trtllm.md).",
        )


def one_prompt(tokens: Ints) -> PackedPrompts:
    """A prompt without vectors, alone."""
    none = np.empty(0, dtype=np.int64)
    return PackedPrompts(
        token_ids=tokens,
        offsets=np.asarray([0, len(tokens)], dtype=np.int64),
        static_prefix=none,
        soft_positions=none,
        soft_vectors=None,
    )
