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

from engine.backends.torch.memory import ModelSizes
from engine.backends.torch.tree_attention import ATTENTION_NAME, OtherAttentionError
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
    quiet: Any = transformers_logging  # its functions carry no types
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _refuse_other_models(config, folder)
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
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # we refuse them ourselves, with their names
                output_loading_info=True,
            )
    except EngineError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as err:
        if ATTENTION_NAME in str(err):
            raise own_attention(None, folder, err) from err
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
    """What config.json does not tell alone; and a classifier's checkpoint, which loads as a
    language model too and would score nonsense.
    """
    for problem in architecture.refusals(folder, config.to_dict(), own_forward=True):
        raise problem
    named = list(config.architectures or [])
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if named and not known & set(named):
        raise architecture.not_causal(named, folder)


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
