"""The engine's own beam search: one `LLM(max_beam_width=W)`, open vocabulary, a fixed number of
tokens.

Every request must ask for exactly the width that the engine was built with. What comes back is
taken as it is: beams may be empty, not finite, doubled or outside the catalog, and in any order;
engine/generate/native_beams.py sorts that out.

Block reuse is off: keys of cached blocks hold token ids alone, and two users whose prompts differ
only in a vector would share them. Requests with vectors carry a salt of their vectors besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.trtllm.context import TrtllmContext
from engine.backends.trtllm.encode_engine import check_outputs
from engine.backends.trtllm.errors import running, starting
from engine.backends.trtllm.library import Library
from engine.backends.trtllm.memory import BeamPlan
from engine.backends.trtllm.tensor_route import MODALITY, TOKEN_IDS
from schemas.requests import Ints
from schemas.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Hypotheses:
    """Beams as the engine gave them, `[B, W]`. `length` 0: an empty beam; `failed`: a request that
    was refused, whose beams are all empty."""

    tokens: Ints  # [B, W, L], -1 behind a beam's end
    length: Ints  # [B, W] tokens that came, of which the first L are here
    score: NDArray[np.float32]  # [B, W] sum of log p; NaN where the engine gave none
    failed: NDArray[np.bool_]  # [B]


class BeamEngine:
    """One engine of one width, on this process's device."""

    def __init__(
        self,
        library: Library,
        settings: EngineSettings,
        plan: BeamPlan,
        folder: str,
        placeholder: int | None,
    ) -> None:
        self._plan = plan
        self._placeholder = placeholder
        self._request_error = library.request_error
        with starting("beam engine", settings):
            self._llm = library.start(
                settings,
                folder,
                plan,
                max_beam_width=plan.width,
                kv_cache={
                    "enable_partial_reuse": False,
                    "max_tokens": plan.kv_tokens,
                    "dtype": settings.trtllm.kv_cache_dtype,
                },
            )
            self._sampling = library.sampling_params(
                max_tokens=plan.steps,
                use_beam_search=True,
                best_of=plan.width,
                n=plan.width,
                end_id=-1,  # no token ends a semantic ID early
                ignore_eos=True,
                logprobs=0,  # without it there are no scores
                detokenize=False,
                add_special_tokens=False,
            )

    def search(self, context: TrtllmContext) -> Hypotheses:
        """Beams behind every prompt of the context.

        Raises:
            ShardFailedError: the engine failed. A request that it refused only fails its prompt.
        """
        num = context.num_prompts
        context.forwarded += context.prompts.lengths + self._plan.width * (self._plan.steps - 1)
        requests = [self._request(context, prompt) for prompt in range(num)]
        outputs: list[Any] = []
        with running(f"search beams for {num} prompts"):
            try:
                outputs = self._generate(requests)
            except self._request_error:
                outputs = [self._alone(request) for request in requests]
        return self._collect(outputs)

    def close(self) -> None:
        """Free the device and end the engine's processes."""
        self._llm.shutdown()

    def _request(self, context: TrtllmContext, prompt: int) -> tuple[dict[str, Any], str | None]:
        """A prompt as `generate` takes it, and its salt."""
        tokens = context.prompts.row(prompt)
        if context.soft_vectors is None:
            return {"prompt_token_ids": tokens.tolist()}, None
        assert self._placeholder is not None, "the backend refuses soft tokens without the plug-in"
        places = context.soft_places
        first, last = places.offsets[prompt], places.offsets[prompt + 1]
        vectors = context.soft_vectors[first:last].cpu()
        tokens = tokens.copy()
        tokens[places.values[first:last]] = self._placeholder
        # "prompt" only leads the request to where vectors are looked at; our input processor takes
        # the token ids.
        request = {
            "prompt": "-",
            TOKEN_IDS: tokens.tolist(),
            "multi_modal_embeddings": {MODALITY: [vectors]},
        }
        return request, salt_of(vectors)

    def _generate(self, requests: list[tuple[dict[str, Any], str | None]]) -> list[Any]:
        salts = [salt for _, salt in requests]
        more: dict[str, Any] = {} if salts[0] is None else {"cache_salt": salts}
        found: list[Any] = self._llm.generate(
            [prompt for prompt, _ in requests],
            sampling_params=self._sampling,
            use_tqdm=False,
            **more,
        )
        check_outputs([prompt for prompt, _ in requests], found)
        return found

    def _alone(self, request: tuple[dict[str, Any], str | None]) -> Any:
        """One request's output; None where it is refused again."""
        try:
            return self._generate([request])[0]
        except self._request_error:
            return None

    def _collect(self, outputs: list[Any]) -> Hypotheses:
        shape = (len(outputs), self._plan.width)
        tokens = np.full((*shape, self._plan.steps), -1, dtype=np.int64)
        length = np.zeros(shape, dtype=np.int64)
        score = np.full(shape, np.nan, dtype=np.float32)
        failed = np.zeros(len(outputs), dtype=bool)
        for b, output in enumerate(outputs):
            if output is None or getattr(output, "error", None):
                failed[b] = True
                continue
            for w, beam in enumerate(output.outputs[: self._plan.width]):
                ids = list(beam.token_ids or [])
                length[b, w] = len(ids)
                tokens[b, w, : len(ids)] = ids[: self._plan.steps]
                if beam.cumulative_logprob is not None:
                    score[b, w] = beam.cumulative_logprob
        return Hypotheses(tokens, length, score, failed)


def salt_of(vectors: Tensor) -> str:
    """A salt of the cache for these vectors: other vectors, another salt."""
    data = vectors.to(torch.float32).contiguous().numpy().tobytes()
    return f"{xxhash.xxh3_128_hexdigest(data)}-{len(vectors)}"
