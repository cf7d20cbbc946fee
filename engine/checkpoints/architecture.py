"""What config.json says of an architecture, read without torch: whether its attention is the plain
causal one that we compute, and whether the checkpoint is a causal language model at all.

`refusals` is asked before a run starts, by `validate` and `plan`; the torch backend asks the same
of the configuration as transformers completes it, and then holds the model against its library
(engine/backends/torch/probe.py), which is the last word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from schemas.errors import EngineError

FULL = "full_attention"
_OURS = f"{FULL} in every layer"

# Start, and score as transformers does: tests/right_or_refused/test_architectures.py has each.
SCORED = {
    "apertus", "arcee", "biogpt", "bitnet", "codegen", "cohere", "cohere2", "ctrl", "ernie4_5",
    "ernie4_5_moe", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe",
    "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "granite", "granitemoe", "granitemoeshared",
    "helium", "hunyuan_v1_dense", "hy_v3", "hyperclovax", "jais2", "jetmoe", "llama", "mistral",
    "ministral", "ministral3", "mixtral", "nanochat", "olmo", "olmo2", "olmo3", "olmoe", "opt",
    "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "seed_oss", "smollm3", "solar_open", "starcoder2",
}  # fmt: skip

_OWN = "attention of its own, which ours cannot stand in for"
_ALIBI = "ALiBi, where scores depend on the distance of two tokens"
_LATENT = "latent attention, whose keys and values differ in width"
_RECURRENT = "a recurrent state instead of attention"
_OTHER = {  # never the attention we compute
    "bloom": _ALIBI,
    "mpt": _ALIBI,
    "dbrx": _OWN,
    "diffllama": "a difference of two attentions",
    "doge": "a mask that depends on the values",
    "falcon": _OWN,
    "gpt_neo": _OWN,
    "nemotron": _OWN,
    "openai-gpt": _OWN,
    "stablelm": _OWN,
    "xglm": _OWN,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "minicpm3": _LATENT,
    "youtu": _LATENT,
    "gpt_oss": "attention sinks",
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "rwkv": _RECURRENT,
    "falcon_h1": _RECURRENT,
    "recurrent_gemma": _RECURRENT,
}
_ALWAYS_WINDOWED = {  # a window is every layer's: these know no layer_types; and its default
    "mistral": 4096, "ministral3": None, "mixtral": None, "phi3": None, "phi4_multimodal": None,
    "phimoe": None, "qwen3_moe": None, "starcoder2": None,
}  # fmt: skip
_ASK_FIRST = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")  # use_sliding_window
_BEHIND_SOME_LAYERS = ("qwen2", "qwen2_moe", "qwen3")  # max_window_layers of them
_BY_DEFAULT = {  # layers where config.json lists none
    **dict.fromkeys(
        ("afmoe", "cohere2", "cwm", "exaone4", "exaone_moe", "gemma2", "gemma3", "gemma3_text",
         "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gpt_oss", "mimo_v2_flash",
         "ministral", "olmo3", "vaultgemma"),
        "sliding_attention",
    ),
    **dict.fromkeys(
        ("bamba", "granitemoehybrid", "jamba", "kimi_linear", "minimax", "nemotron_h",
         "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
        "linear_attention",
    ),
    "llama4": "chunked_attention",
    "llama4_text": "chunked_attention",
    "lfm2": "conv",
    "lfm2_moe": "conv",
}  # fmt: skip
_ENCODERS = {
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "longt5", "marian", "mbart",
    "mt5", "mvp", "pegasus", "plbart", "prophetnet", "switch_transformers", "t5", "t5gemma",
    "t5gemma2", "umt5", "whisper",
}  # fmt: skip
_CAUSAL = re.compile(r"ForCausalLM|LMHead|Gemma\w*ForConditionalGeneration|GenerationDecoder")
_ANOTHER_TASK = re.compile(r"For(?!CausalLM|ConditionalGeneration)[A-Z]|Model$")
_QUANTISERS = {  # quant_method: what its weights cannot be read without
    "awq": "gptqmodel",
    "gptq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed_tensors",
    "aqlm": "aqlm",
    "hqq": "hqq",
    "eetq": "eetq",
    "quanto": "optimum.quanto",
    "quark": "quark",
    "torchao": "torchao",
    "vptq": "vptq",
    "higgs": "flute",
    "spqr": "spqr_quant",
    "auto-round": "auto_round",
}


def read_config(folder: str) -> dict[str, Any]:
    """config.json of a checkpoint.

    Raises:
        EngineError: it is not there, cannot be read, or is no object.
    """
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise no_config(folder) from None
    except (OSError, ValueError, RecursionError) as err:
        raise EngineError("config.json cannot be read", got=str(err), where=str(path)) from err
    if not isinstance(raw, dict):
        raise EngineError(
            "config.json cannot be read",
            expected="an object",
            got=type(raw).__name__,
            where=str(path),
        )
    return raw


def no_config(folder: str) -> EngineError:
    """The error of a folder without one."""
    return EngineError(
        "the model folder is not a checkpoint: it has no config.json",
        where=folder,
        do="Save the model with save_pretrained(folder).",
        field="engine.model",
    )


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that is about text."""
    inner = raw.get("text_config")
    return {**raw, **inner} if isinstance(inner, dict) else raw


def refusals(folder: str, raw: Mapping[str, Any], *, own_forward: bool) -> Iterator[EngineError]:
    """Why a backend does not run the checkpoint with this config.json, as far as it tells."""
    if _is_encoder_decoder(raw):
        yield _refused(
            "the model is an encoder-decoder",
            "a causal language model, such as Qwen3ForCausalLM",
            str(raw.get("model_type")),
            folder,
        )
        return
    classes = named(raw)
    if any(map(_ANOTHER_TASK.search, classes)) and not any(map(_CAUSAL.search, classes)):
        yield not_causal(classes, folder)
    sizes = {n: text_config(raw).get(n) for n in ("max_position_embeddings", "n_positions")}
    for name, size in sizes.items():
        if isinstance(size, int) and size < 1:
            yield EngineError(
                "the model has no positions",
                expected=f"a number above 0 as {name} in config.json",
                got=str(size),
                where=folder,
                do="Correct config.json, or save the model again with save_pretrained(folder).",
                field="engine.model",
            )
    if not own_forward:
        return
    if problem := other_attention(raw, folder):
        yield problem
    if problem := _quantiser_missing(raw, folder):
        yield problem


def named(raw: Mapping[str, Any]) -> list[str]:
    """The classes that config.json names."""
    found = raw.get("architectures")
    return [str(name) for name in found] if isinstance(found, list) else [str(found)] * bool(found)


def declared_vocab_size(folder: str) -> int | None:
    """Ids that the model has, by its config.json; None where it does not say."""
    size = text_config(read_config(folder)).get("vocab_size")
    return size if isinstance(size, int) else None


def longest_position(raw: Mapping[str, Any]) -> int:
    """Positions up to which the position embedding is the same whatever else is in the pass.

    LongRoPE switches its factors by the longest position of a pass: beyond the original length, a
    row would depend on its neighbours.
    """
    text = text_config(raw)
    sizes = [text.get(name) for name in ("max_position_embeddings", "n_positions")]
    longest = next((n for n in sizes if isinstance(n, int) and n > 0), 1 << 30)
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) == "longrope":
        name = "original_max_position_embeddings"
        longest = min(longest, int(rope.get(name) or text.get(name) or longest))
    return longest


def has_window(folder: str) -> bool:
    """Whether config.json names a sliding window, used or not."""
    return bool(text_config(read_config(folder)).get("sliding_window"))


def is_known(raw: Mapping[str, Any]) -> bool:
    """Whether the torch backend was tried on this type of model."""
    kind = text_config(raw).get("model_type")
    return kind in SCORED or kind in _OTHER or kind in _BY_DEFAULT


def other_attention(raw: Mapping[str, Any], folder: str) -> EngineError | None:
    """The error of a model whose attention is not plain causal attention; None: it may be."""
    text = text_config(raw)
    kind = str(text.get("model_type"))
    if kind in _OTHER:
        return not_ours(f"{kind}: {_OTHER[kind]}", folder)
    if text.get("alibi") is True:
        return not_ours(f"{kind}: {_ALIBI}", folder)
    if text.get("attn_logit_softcapping") is not None:
        got = f"attn_logit_softcapping {text['attn_logit_softcapping']}"
        return not_ours(f"{kind}: {got}: scores with a cap", folder)
    if text.get("kv_lora_rank") is not None:
        return not_ours(f"{kind}: {_LATENT}", folder)
    kinds = _layer_types(text, kind)
    window = _window(text, kind, kinds)
    if kinds == {FULL} and window is None:
        return None
    listed = f"layer types {sorted(kinds)}" if kinds != {FULL} else "every layer"
    return not_ours(listed + (f", sliding_window {window}" if window else ""), folder)


def _layer_types(text: Mapping[str, Any], kind: str) -> set[str]:
    if kind in _ALWAYS_WINDOWED:
        return {FULL}
    listed = text.get("layer_types")
    if isinstance(listed, list):
        return {str(name) for name in listed} or {FULL}
    return {_BY_DEFAULT.get(kind, FULL)}


def _window(text: Mapping[str, Any], kind: str, kinds: set[str]) -> int | None:
    """The window of those layers that have one, if a sequence can be longer than it."""
    window = text.get("sliding_window", _ALWAYS_WINDOWED.get(kind))
    listed = kind not in _ALWAYS_WINDOWED and isinstance(text.get("layer_types"), list)
    if not isinstance(window, int) or (listed and "sliding_attention" not in kinds):
        return None
    if not text.get("use_sliding_window", kind not in _ASK_FIRST):
        return None
    layers, first = text.get("num_hidden_layers"), text.get("max_window_layers")
    if kind in _BEHIND_SOME_LAYERS and not listed and isinstance(layers, int):
        window = window if layers > (first if isinstance(first, int) else 28) else None
    longest = text.get("max_position_embeddings")
    never = window is not None and isinstance(longest, int) and window >= longest
    return None if never else window


def _is_encoder_decoder(raw: Mapping[str, Any]) -> bool:
    return raw.get("is_encoder_decoder") is True or raw.get("model_type") in _ENCODERS


def _quantiser_missing(raw: Mapping[str, Any], folder: str) -> EngineError | None:
    section = raw.get("quantization_config")
    if not isinstance(section, dict):
        return None
    method = str(section.get("quant_method") or "unknown")
    package = _QUANTISERS.get(method)
    if package is None or find_spec(package.partition(".")[0]) is not None:
        return None
    return EngineError(
        "the weights are quantised, and what reads them is not installed",
        expected=f"the package {package}",
        got=f"quant_method {method} in config.json",
        where=folder,
        do="Install it, or use a checkpoint in float32 or bfloat16.",
        field="engine.model",
    )


def not_ours(got: str, folder: str) -> EngineError:
    """The error of another attention."""
    what = "the model's attention is not plain causal attention"
    return _refused(what, _OURS, got, folder)


def not_causal(named: list[str], folder: str) -> EngineError:
    """The error of a checkpoint for another task: it would load, and score nonsense."""
    return _refused(
        "the checkpoint is not a causal language model",
        "architectures in config.json to name one, such as Qwen3ForCausalLM",
        ", ".join(named),
        folder,
    )


def _refused(what: str, expected: str, got: str, folder: str) -> EngineError:
    return EngineError(
        what,
        expected=expected,
        got=got,
        where=folder,
        do="Use a model of another kind; docs/bring-your-own-model.md names those that run.",
        field="engine.model",
    )
