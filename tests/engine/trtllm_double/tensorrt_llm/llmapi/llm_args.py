"""Argument classes: every one refuses keywords that the contract does not name."""

from __future__ import annotations

from typing import Any

from tensorrt_llm import contract
from tensorrt_llm.recorder import record


class _Strict:
    """A pydantic model with `extra="forbid"`, as far as callers can tell."""

    entry: str

    def __init__(self, **kwargs: Any) -> None:
        record(self.entry, **kwargs)
        fields = contract.constructor(self.entry)
        for name in kwargs:
            if name not in fields:
                raise ValueError(
                    f"1 validation error for {self.entry}\n{name}\n"
                    "  Extra inputs are not permitted [type=extra_forbidden]"
                )
        for name, default in (fields | kwargs).items():
            setattr(self, name, default)


class KvCacheConfig(_Strict):
    """Settings of the KV cache."""

    entry = "KvCacheConfig"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.dtype not in ("auto", "fp8", "nvfp4"):
            raise ValueError(f"1 validation error for KvCacheConfig\ndtype\n  {self.dtype!r}")


class CudaGraphConfig(_Strict):
    """Settings of CUDA graphs."""

    entry = "CudaGraphConfig"


class TorchLlmArgs:
    """Names of the fields, for those who look a feature up."""

    model_fields = dict.fromkeys(contract.constructor("LLM"))
