"""The encode engine: `LLM(encode_only=True)`, which forwards packed prompts and gives a vector per
token: logits, or, with our plug-in, hidden states. It has no KV cache, so nothing of one user can
reach another, and nothing is kept between calls.

Outputs stay on the device; of a call only the rows that are asked for are copied out of its output.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.backends.trtllm.checkpoint import CheckpointFacts
from engine.backends.trtllm.context import TrtllmContext
from engine.backends.trtllm.errors import running, starting
from engine.backends.trtllm.library import Library
from engine.backends.trtllm.memory import EncodePlan
from engine.backends.trtllm.packing import LONGEST_ITEM, Call, CallBudget, Request
from engine.backends.trtllm.tensor_route import HIDDEN_ONLY, SOFT_POSITIONS, SOFT_VECTORS
from schemas.errors import EngineError
from schemas.requests import Ints
from schemas.settings import EngineSettings


class EncodeEngine:
    """One engine on this process's device."""

    def __init__(
        self,
        library: Library,
        settings: EngineSettings,
        facts: CheckpointFacts,
        plan: EncodePlan,
        folder: str,
        *,
        plugin: bool,
    ) -> None:
        """Args:
        folder: the checkpoint, or the prepared one that names our class.
        plugin: `folder` names our class: outputs are hidden states, soft tokens are taken.
        """
        self._plugin = plugin
        self._vocab_size = facts.vocab_size
        with starting("encode engine", settings):
            self._llm = library.start(
                settings,
                folder,
                plan,
                encode_only=True,
                attn_backend="FLASHINFER",  # the only one with multi-item scoring
            )
        self.budget = CallBudget(plan.max_num_tokens, plan.max_seq_len, plan.max_batch_size)

    def read(self, context: TrtllmContext, call: Call) -> Tensor:
        """Vectors at the rows of the call, in the order of `call.rows`: logits `[r, vocab]`, or
        hidden states `[r, H]`.

        Raises:
            ShardFailedError: the engine failed.
        """
        outputs = self.read_all(context, call)
        rows = [
            output[torch.from_numpy(request.positions).to(output.device)]
            for output, request in zip(outputs, call.requests, strict=True)
        ]
        return torch.cat(rows) if len(rows) > 1 else rows[0]

    def read_all(self, context: TrtllmContext, call: Call) -> list[Tensor]:
        """Vectors of every token of each prompt of the call."""
        for request in call.requests:
            context.forwarded[request.prompt] += len(request.tokens)
        return self._encode(call, self._tensors(context, call))

    def encode(self, prompts: list[dict[str, Any]], **tensors: Any) -> list[Tensor]:
        """The engine's own call: a vector per token of each prompt, on the device.

        Raises what TensorRT-LLM raises; the self-test wants to see it.
        """
        if self._plugin:
            tensors = {HIDDEN_ONLY: True} | tensors
        outputs = self._llm.encode(
            prompts,
            add_special_tokens=False,
            batch_indexed_model_output=False,
            copy_logits_to_host=False,
            **tensors,
        )
        check_outputs(prompts, outputs)
        for output, prompt in zip(outputs, prompts, strict=True):
            if len(output.logits) != len(prompt["prompt_token_ids"]):
                raise EngineError(
                    "TensorRT-LLM's encode engine does not give a row per token",
                    expected=f"{len(prompt['prompt_token_ids'])} rows",
                    got=str(tuple(output.logits.shape)),
                )
        if self._plugin:
            return [output.logits for output in outputs]
        # A head may be padded for its kernel; what is behind the vocabulary is nothing.
        return [output.logits[:, : self._vocab_size] for output in outputs]

    def close(self) -> None:
        """Free the device."""
        self._llm.shutdown()

    def _encode(self, call: Call, tensors: dict[str, Tensor]) -> list[Tensor]:
        prompts = [as_prompt(request.tokens, request.part_lens) for request in call.requests]
        with running(f"encode {len(prompts)} prompts"):
            return self.encode(prompts, **tensors)

    def _tensors(self, context: TrtllmContext, call: Call) -> dict[str, Tensor]:
        """Soft tokens of the call: their positions among all its tokens, and their vectors."""
        if context.soft_vectors is None:
            return {}
        assert self._plugin, "the backend refuses soft tokens without the plug-in"
        positions, which = soft_places(context, call.requests)
        device = context.soft_vectors.device
        return {
            SOFT_POSITIONS: torch.from_numpy(positions).to(device),
            SOFT_VECTORS: context.soft_vectors[torch.from_numpy(which).to(device)],
        }


def check_outputs(prompts: list[dict[str, Any]], outputs: list[Any]) -> None:
    """An output for each prompt, in the order of the prompts: by their tokens, where an output
    carries them. With vectors only their number is known, since others stand for their tokens.

    Raises:
        EngineError: it is not so, and which output is whose cannot be known.
    """
    wrong = None
    if len(outputs) != len(prompts):
        wrong = f"{len(outputs)} outputs"
    for place, (prompt, output) in enumerate(zip(prompts, outputs, strict=False)):
        sent = prompt.get("prompt_token_ids")
        echoed = getattr(output, "prompt_token_ids", None)
        if sent is None or echoed is None or wrong is not None:
            continue
        if list(echoed) != sent:
            wrong = f"output {place} is of another prompt"
    if wrong is not None:
        raise EngineError(
            "TensorRT-LLM's outputs are not those of the prompts it was given",
            expected=f"{len(prompts)} outputs, in the order of the prompts",
            got=wrong,
            do="Nothing of this shard is kept; see docs/trtllm.md for the versions that are known.",
        )


def as_prompt(tokens: Ints, part_lens: list[int] | None) -> dict[str, Any]:
    """A prompt as `encode` takes it. The layout is checked here, where its owner is known."""
    prompt: dict[str, Any] = {"prompt_token_ids": tokens.tolist()}
    if part_lens is not None:
        assert len(part_lens) >= 2, "a multi-item prompt has an item"
        assert sum(part_lens) + len(part_lens) == len(tokens), "a delimiter stands behind each part"
        assert max(part_lens[1:]) <= LONGEST_ITEM, "an item is too long for its kernel"
        prompt["multi_item_part_lens"] = part_lens
    return prompt


def soft_places(context: TrtllmContext, requests: tuple[Request, ...]) -> tuple[Ints, Ints]:
    """Soft tokens of the requests, laid end to end: positions, and numbers of their vectors."""
    positions, which, begin = [], [], 0
    for request in requests:
        places = context.soft_places
        first, last = places.offsets[request.prompt], places.offsets[request.prompt + 1]
        positions.append(begin + places.values[first:last])
        which.append(np.arange(first, last))
        begin += len(request.tokens)
    return np.concatenate(positions).astype(np.int64), np.concatenate(which).astype(np.int64)
