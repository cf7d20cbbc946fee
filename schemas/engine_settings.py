"""The `engine` section: what runs the model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
)

from schemas.section import Count, Name, Place, Positive, Section

DEFAULT_BACKEND = "torch"  # the embedded one
Precision = Literal["float32", "bfloat16"]
Rows = Annotated[Positive, Field(le=100_000_000)]  # in one pass
Users = Annotated[Positive, Field(le=1_000_000)]  # in one pass


class TrtllmSettings(Section):
    """How TensorRT-LLM's engines are built; only `engine.backend: trtllm` reads it."""

    max_num_tokens: Rows | Literal["auto"] = Field(
        "auto", description="Tokens of one encode call; auto: what the GPU holds"
    )
    max_batch_size: Users = Field(256, description="Prompts of one encode call")
    multi_item: Literal["auto", "off"] = Field(
        "auto", description="Many items behind one prompt; off: one prompt per item"
    )
    plugin: Literal["auto", "off"] = Field(
        "auto", description="Our Qwen3 model inside TensorRT-LLM: soft tokens, head on demand"
    )
    kv_cache_dtype: Literal["auto", "fp8", "nvfp4"] = Field(
        "auto", description="Precision of the KV cache of task.generate.mode native"
    )
    placeholder_id: Count | None = Field(
        None, description="Token that stands for a soft token; unset: the last id without a text"
    )


class EngineSettings(Section):
    """What runs the model, and how much it may take at once."""

    backend: Name = Field(
        DEFAULT_BACKEND, description="fake | torch | trtllm; see engine/backends/registry.py"
    )
    model: Place | None = Field(
        None, description="Checkpoint folder: config.json, tokenizer.json, *.safetensors"
    )
    projector: Place | None = Field(
        None, description="Folder with projector.json and projector.safetensors for {user_vector}"
    )
    dtype: Precision = Field("float32", description="Model precision")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: CUDA when there is one"
    )
    max_batch_tokens: Rows | Literal["auto"] = Field(
        "auto",
        description="Rows (prompt tokens, tree nodes, beams) packed together; auto: what the GPU "
        "holds, 8192 on a CPU",
    )
    max_batch_users: Users = Field(256, description="Users in one packed pass")
    tensor_parallel: Annotated[Positive, Field(le=1024)] = Field(
        1, description="An engine has one GPU: above 1 is refused; see run.workers"
    )
    options: dict[str, Any] = Field(
        {}, description="Settings of a backend of your own, as its specification says"
    )
    seed: Count = Field(0, description="Seed of the fake backend")
    trtllm: TrtllmSettings = Field(
        TrtllmSettings(),
        description="How TensorRT-LLM's engines are built",
    )
