"""A tiny random checkpoint of each architecture, saved as its own library saves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.factories import TINY_DECODER, save_tokenizer

_FULL = {"layer_types": ["full_attention"] * 2}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_ROUTED = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}

# name -> (model_type, changes to the shape)
SCORES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "biogpt": ("biogpt", {}),
    "bitnet": ("bitnet", {}),
    "codegen": ("codegen", _GPT | {"rotary_dim": 8}),
    "cohere, logits times 1/16": ("cohere", {}),
    "cohere, logits times 0.95": ("cohere", {"logit_scale": 0.95}),
    "cohere2, a window that no layer has": ("cohere2", _FULL | {"sliding_window": 8}),
    "ctrl": ("ctrl", {}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "gemma": ("gemma", {"head_dim": 8}),
    "gemma2, logits capped": (
        "gemma2",
        _FULL
        | {
            "head_dim": 8,
            "sliding_window": 8,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3_text": ("gemma3_text", _FULL | {"head_dim": 8}),
    "gemma3_text, logits capped": (
        "gemma3_text",
        _FULL | {"head_dim": 8, "final_logit_softcapping": 2.0, "sliding_window": 8},
    ),
    "glm": ("glm", {"head_dim": 8, "pad_token_id": 0}),
    "glm4": ("glm4", {"head_dim": 8, "pad_token_id": 0}),
    "glm4_moe": ("glm4_moe", _ROUTED),
    "gpt2": ("gpt2", _GPT),
    "gpt_bigcode": ("gpt_bigcode", _GPT),
    "gpt_neox": ("gpt_neox", {}),
    "gptj": ("gptj", _GPT | {"rotary_dim": 8}),
    "granite": ("granite", {}),
    "granite, logits by 8": ("granite", {"logits_scaling": 8.0}),
    "granite, logits by 1.05": ("granite", {"logits_scaling": 1.05}),
    "granitemoe, logits by 3": ("granitemoe", {"num_local_experts": 4, "logits_scaling": 3.0}),
    "granitemoeshared": ("granitemoeshared", {"num_local_experts": 4, "logits_scaling": 3.0}),
    "helium": ("helium", {"head_dim": 8}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 8}),
    "hy_v3": ("hy_v3", {}),
    "hyperclovax, logits times 3": ("hyperclovax", {"logits_scaling": 3.0}),
    "jais2": ("jais2", {}),
    "jetmoe": ("jetmoe", {}),
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "ministral": ("ministral", _FULL | {"head_dim": 8}),
    "ministral3": ("ministral3", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, a window as long as its positions": ("mistral", {"sliding_window": 256}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "nanochat, logits capped at 15": ("nanochat", {}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _FULL),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "opt": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "persimmon": ("persimmon", {}),
    "phi, a biased head": ("phi", {}),
    "phi3": ("phi3", {"pad_token_id": 0}),
    "phimoe, a biased head": ("phimoe", {"num_local_experts": 4, "lm_head_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2, a window above its layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen2_moe": ("qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 16}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3, a window that is off": ("qwen3", {"head_dim": 8, "sliding_window": 8}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS),
    "seed_oss": ("seed_oss", {"head_dim": 8}),
    "smollm3": ("smollm3", {"pad_token_id": 0}),
    "solar_open": ("solar_open", {}),
    "starcoder2": ("starcoder2", {}),
}

# name -> (model_type, changes, what the refusal says)
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}, "ALiBi"),
    "cohere2": ("cohere2", {"sliding_window": 8}, "sliding_window 8"),
    "cwm": ("cwm", {"pad_token_id": 0}, "sliding_attention"),
    "dbrx": (
        "dbrx",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 256,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1},
        },
        "dbrx: attention of its own",
    ),
    "deepseek_v2": ("deepseek_v2", _LATENT | _ROUTED, "latent attention"),
    "deepseek_v3": ("deepseek_v3", _LATENT | _ROUTED, "latent attention"),
    "diffllama": ("diffllama", {}, "a difference of two attentions"),
    "doge": ("doge", {}, "a mask that depends on the values"),
    "exaone4": ("exaone4", {"sliding_window": 8}, "sliding_window 8"),
    "falcon": ("falcon", {}, "falcon: attention of its own"),
    "falcon, ALiBi": ("falcon", {"alibi": True}, "falcon: attention of its own"),
    "gemma2": ("gemma2", {"head_dim": 8}, "attn_logit_softcapping"),
    "gemma2, windows": (
        "gemma2",
        {"head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": None},
        "sliding_window 8",
    ),
    "gemma3_text": ("gemma3_text", {"head_dim": 8}, "sliding_attention"),
    "gpt_neo": (
        "gpt_neo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        "gpt_neo: attention of its own",
    ),
    "gpt_oss": (
        "gpt_oss",
        {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
        "attention sinks",
    ),
    "llama4_text": ("llama4_text", {}, "chunked_attention"),
    "mamba": ("mamba", {}, "a recurrent state"),
    "minicpm3": ("minicpm3", _LATENT, "latent attention"),
    "mistral": ("mistral", {"sliding_window": 8}, "sliding_window 8"),
    "mistral, its default": (
        "mistral",
        {"max_position_embeddings": 8192},
        "sliding_window 4096",
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 8}, "sliding_window 8"),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "mpt: ALiBi"),
    "nemotron": ("nemotron", {}, "nemotron: attention of its own"),
    "openai-gpt": ("openai-gpt", _GPT, "openai-gpt: attention of its own"),
    "phi3": ("phi3", {"pad_token_id": 0, "sliding_window": 8}, "sliding_window 8"),
    "qwen2, windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "sliding_window 8",
    ),
    "qwen3_moe, windows": (
        "qwen3_moe",
        _EXPERTS | {"use_sliding_window": True, "sliding_window": 8},
        "sliding_window 8",
    ),
    "qwen3_next": ("qwen3_next", {}, "linear_attention"),
    "rwkv": ("rwkv", {}, "a recurrent state"),
    "stablelm": ("stablelm", {}, "stablelm: attention of its own"),
    "starcoder2": ("starcoder2", {"sliding_window": 8}, "sliding_window 8"),
    "t5": ("t5", {"d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4}, "encoder-decoder"),
    "xglm": (
        "xglm",
        {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},
        "xglm: attention of its own",
    ),
    "youtu": ("youtu", _LATENT, "latent attention"),
}


def save_model(folder: Path, model_type: str, changes: dict[str, Any], scale: float = 1.0) -> str:
    """A random model; `scale` of its head."""
    shape = {**TINY_DECODER, "tie_word_embeddings": False, **changes}
    if model_type == "dbrx":  # its configuration takes no foreign sizes
        shape = {"vocab_size": 64, **changes}
    config = AutoConfig.for_model(model_type, **shape)
    torch.manual_seed(0)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        if scale != 1.0:
            model.get_output_embeddings().weight.mul_(scale)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)
