"""Load a Hugging Face causal LM and check that we read it the way it reads itself.

Safetensors only, no remote code, nothing from a hub. Generation settings of the checkpoint
(`do_sample`, temperature, …) are never consulted.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from engine.checkpoint import lacking
from engine.torch_backend.memory import ModelSizes
from engine.torch_backend.tree_attention import ATTENTION_NAME
from schemas.errors import EngineError, quoted


def load_model(folder: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model in eval mode on the device, with token-tree attention.

    Raises:
        EngineError: no checkpoint, no safetensors, an architecture this transformers cannot load,
            missing weights, or a model whose attention is not the plain causal one we compute.
    """
    for problem in lacking(folder):
        raise problem
    quiet: Any = transformers_logging  # its functions carry no types
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _refuse_other_models(config, folder)
        _refuse_sliding_window(config, folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # we refuse them ourselves, with their names
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as err:
        raise EngineError(
            "the model cannot be loaded", got=quoted(" ".join(str(err).split())), where=folder
        ) from err
    model: PreTrainedModel
    model, report = loaded
    for name, found, wanted in sorted(report["mismatched_keys"]):
        raise EngineError(
            f"the checkpoint's tensor {name!r} has another size than config.json says",
            expected=f"{tuple(wanted)}",
            got=f"{tuple(found)}; {len(report['mismatched_keys'])} such tensors",
            where=folder,
            do="Save model and config together, after resizing the embeddings.",
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise EngineError(
            "the checkpoint lacks weights, which would be random",
            got=f"{len(missing)} missing, first {quoted(missing[:3])}",
            where=folder,
        )
    model.to(device)  # type: ignore[arg-type]  # its types say str
    model.eval()  # type: ignore[no-untyped-call]  # the library's
    return model


def _refuse_other_models(config: Any, folder: str) -> None:
    """A classifier's checkpoint loads as a language model too, and would score nonsense."""
    named = list(config.architectures or [])
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if named and not known & set(named):
        raise EngineError(
            "the checkpoint is not a causal language model",
            expected="architectures in config.json to name one, such as Qwen3ForCausalLM",
            got=", ".join(named),
            where=folder,
        )


def longest_position(config: Any) -> int:
    """Positions up to which the rotary embedding is the same whatever else is in the pass.

    LongRoPE switches its factors by the longest position of a pass: beyond the original length, a
    row would depend on its neighbours.
    """
    longest = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) == "longrope":
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        longest = min(longest, int(original or longest))
    return longest


def _refuse_sliding_window(config: Any, folder: str) -> None:
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    windowed = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    if kinds != {"full_attention"} or windowed:
        raise EngineError(
            "the model's attention is not plain causal attention",
            expected="full attention in every layer",
            got=f"layer types {sorted(kinds)}, sliding window {windowed}",
            where=folder,
        )


def sizes_of(model: PreTrainedModel) -> ModelSizes:
    """What a row of this model takes in memory, from its configuration."""
    config: Any = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    return ModelSizes(
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        intermediate=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        item_bytes=next(model.parameters()).element_size(),
    )


def head_of(model: PreTrainedModel, folder: str) -> nn.Linear:
    """The LM head; `EngineError` when it is not a linear layer over the last hidden state."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # as above
    if not isinstance(head, nn.Linear):
        raise EngineError("the model has no linear LM head", got=type(head).__name__, where=folder)
    return head


@torch.inference_mode()
def reference_log_probs(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """log p of every vocabulary entry after each token `[T, V]`, by the library's own forward.

    One sequence, no cache, the library's own attention: what our fast path is held against at
    start-up.
    """
    model.set_attn_implementation("sdpa")
    try:
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return torch.log_softmax(logits.float(), dim=-1)
