"""Load a Hugging Face causal LM and check that we read it the way it reads itself.

Safetensors only, no remote code, nothing from a hub. Generation settings of the checkpoint
(`do_sample`, temperature, …) are never consulted.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from engine.backends.torch.memory import ModelSizes
from engine.backends.torch.tree_attention import ATTENTION_NAME, OtherAttentionError
from engine.backends.torch.weights import (
    LIBRARY_ERRORS,
    cannot_load,
    check_finite,
    load_config,
    load_problems,
    report_problems,
)
from engine.checkpoints import architecture
from engine.checkpoints.files import checkpoint_problems
from schemas.errors import EngineError, quoted

_WINDOW = 2  # tokens


def load_model(
    folder: str, dtype: torch.dtype, device: torch.device, *, layers: int | None = None
) -> PreTrainedModel:
    """The model in eval mode on the device, with token-tree attention.

    Args:
        layers: how many of its layers, from the first; None: all.

    Raises:
        EngineError: no checkpoint, no safetensors, an architecture this transformers cannot load,
            missing weights, or a model whose attention is not the plain causal one we compute.
    """
    for problem in checkpoint_problems(folder, own_forward=True):
        raise problem
    for problem in load_problems(folder):
        raise problem
    config = load_config(folder)
    plain = GenerationConfig()  # type: ignore[no-untyped-call]  # the library's
    try:
        if layers is not None:
            _keep_layers(config.get_text_config(), layers)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                generation_config=plain,  # that of the folder is not read
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # we refuse them ourselves, with their names
                output_loading_info=True,
            )
    except LIBRARY_ERRORS as err:
        if ATTENTION_NAME in str(err):
            raise own_attention(None, folder, err) from err
        raise cannot_load(folder, err) from err
    model: PreTrainedModel
    model, report = loaded
    if layers is not None:
        report |= {"unexpected_keys": ()}  # the other layers
    for problem in report_problems(report, config, folder):
        raise problem
    model.to(device)  # type: ignore[arg-type]  # its types say str
    model.eval()  # type: ignore[no-untyped-call]  # the library's
    check_finite(model, folder)
    return model


def longest_position(config: Any) -> int:
    """As in engine/checkpoints/architecture.py, of a config that transformers completed."""
    longest = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
    return min(longest, architecture.longest_position(config.to_dict()))


def own_attention(model: PreTrainedModel | None, folder: str, error: Exception) -> EngineError:
    """The error of a model that does not run with our attention in place of its own."""
    name = "it" if model is None else type(model).__name__
    own = model is None or not model._supports_attention_backend
    if own or isinstance(error, OtherAttentionError):
        said = (
            str(error) if isinstance(error, OtherAttentionError) else "cannot be replaced by ours"
        )
        return architecture.not_ours(f"{name}: attention of its own: {said}", folder)
    return EngineError(
        "this architecture is not supported by the torch backend",
        got=quoted(f"{name}: {type(error).__name__}: {error}"),
        where=folder,
        do="Use a model of another kind; docs/bring-your-own-model.md names those that run.",
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
def reference_log_probs(
    model: PreTrainedModel, tokens: Tensor, path: Tensor, position: Tensor
) -> Tensor:
    """log p of every vocabulary entry after some tokens `[R, V]` of paths `[B, T]`, by the
    library's own forward.

    No cache, the library's own attention: what our fast path is held against at start-up. Paths
    are padded at their ends, where a causal model does not look.
    """
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        logits = model(input_ids=tokens, use_cache=False).logits[path, position]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return torch.log_softmax(logits.float(), dim=-1)


def _keep_layers(config: Any, layers: int) -> None:
    """Shorten a configuration: its number of layers, and what it lists for each; and a window that
    no layer should have, so that a layer which has it shows.
    """
    every = int(config.num_hidden_layers)
    layers = min(layers, every)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == every:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers
    window = getattr(config, "sliding_window", None)
    if window and window < architecture.longest_position(config.to_dict()):
        config.sliding_window = _WINDOW
