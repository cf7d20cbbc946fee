"""The only door to TensorRT-LLM, and what this build of it can do.

Nothing here parses a version: what a build has is looked for (`LLM.encode`, the fields of its
arguments), and what it gets wrong is found by the self-test (engine/backends/trtllm/self_test.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from engine.backends.trtllm.memory import BeamPlan, EncodePlan
from engine.backends.trtllm.spec import SPEC
from schemas.errors import EngineError
from schemas.settings import EngineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The parts of `tensorrt_llm` that are used, and its version for messages."""

    llm: Any  # class LLM
    sampling_params: Any  # class SamplingParams
    kv_cache_config: Any  # class KvCacheConfig
    request_error: type[Exception]
    version: str

    def start(
        self,
        settings: EngineSettings,
        folder: str,
        plan: EncodePlan | BeamPlan,
        *,
        kv_cache: dict[str, Any] | None = None,
        **own: Any,
    ) -> Any:
        """An `LLM` over a folder, within the plan's limits: what both engines have in common.

        No block of KV is used again, which could give one user's vectors to another, and no prompt
        is cut, which could cut it inside its soft tokens.
        """
        return self.llm(
            model=folder,
            skip_tokenizer_init=True,
            checkpoint_format="HF",  # without it no input processor of a model is looked for
            dtype=settings.dtype,
            max_batch_size=plan.max_batch_size,
            max_seq_len=plan.max_seq_len,
            max_num_tokens=plan.max_num_tokens,
            enable_chunked_prefill=False,
            cuda_graph_config=None,  # its graphs refuse tensors of ours and multi-item prompts
            kv_cache_config=self.kv_cache_config(enable_block_reuse=False, **(kv_cache or {})),
            **own,
        )

    @property
    def missing(self) -> list[str]:
        """What the encode engine needs and this build lacks; empty: nothing."""
        fields = _argument_names()
        found = [] if hasattr(self.llm, "encode") else ["LLM.encode"]
        if fields is not None and "encode_only" not in fields:
            found.append("LLM(encode_only=…)")
        return found


def load_library() -> Library:
    """Import TensorRT-LLM. Loads CUDA: call it where the device is already bound.

    The engine is told to live in this process, so that it ends when the worker does.

    Raises:
        EngineError: it is not installed, cannot be loaded here, or is too old.
    """
    os.environ.setdefault("TRTLLM_NO_USAGE_STATS", "1")  # it reports its use to its maker
    os.environ.setdefault("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    try:
        root = import_module("tensorrt_llm")
        api = import_module("tensorrt_llm.llmapi")
        library = Library(
            llm=root.LLM,
            sampling_params=root.SamplingParams,
            kv_cache_config=api.KvCacheConfig,
            request_error=api.RequestError,
            version=str(getattr(root, "__version__", "unknown")),
        )
    except (ImportError, AttributeError, OSError) as err:
        # OSError: a CUDA or MPI library that it links to is not there.
        raise SPEC.cannot_load(f"{type(err).__name__}: {err}") from err
    if library.missing:
        raise EngineError(
            "this TensorRT-LLM is too old: it cannot encode",
            expected="a build with " + " and ".join(library.missing),
            got=f"version {library.version}",
            do=SPEC.install,
        )
    return library


def _argument_names() -> set[str] | None:
    """Keywords that `LLM` takes; None where this build does not say."""
    try:
        arguments = import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs
        return set(arguments.model_fields)
    except (ImportError, AttributeError):
        return None
