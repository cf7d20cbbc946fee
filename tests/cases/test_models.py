"""CASES A and B: a checkpoint is scored as its own library scores it, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    StableLmConfig,
    StableLmForCausalLM,
)

from engine.backends.torch.backend import TorchBackend
from schemas.errors import EngineError
from tests.cases.helpers import (
    CPU,
    found_sids,
    index_of,
    pack,
    published,
    score,
    search,
    torch_config,
)
from tests.engine.oracle import Oracle
from tests.factories import (
    TINY_DECODER,
    bound_space,
    random_codes,
    save_tokenizer,
    sid_space,
    tiny_model,
    write_config,
    write_inputs,
)

SHAPE = TINY_DECODER | {"tie_word_embeddings": False}


def save(folder: Path, config_class, model_class, **changes) -> str:
    torch.manual_seed(0)
    model = model_class(config_class(**{**SHAPE, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


PLAIN = {
    "Llama": (LlamaConfig, LlamaForCausalLM, {}),
    "Llama, tied head": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "Qwen2, biased queries": (Qwen2Config, Qwen2ForCausalLM, {}),
    "Mistral without a window": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "Phi, biased head": (PhiConfig, PhiForCausalLM, {}),
    "Granite, scaled logits": (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 8.0}),
    "Cohere, scaled logits": (CohereConfig, CohereForCausalLM, {}),
}
OTHER = {
    "Mistral with a window": (MistralConfig, MistralForCausalLM, {"sliding_window": 4}),
    "Gemma2, alternating windows": (Gemma2Config, Gemma2ForCausalLM, {"head_dim": 8}),
    "Bloom, ALiBi positions": (BloomConfig, BloomForCausalLM, {"n_layer": 2, "n_head": 4}),
    "StableLM, attention of its own": (StableLmConfig, StableLmForCausalLM, {}),
    "DeepSeek, latent attention": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "Gemma2, soft-capped": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {
            "head_dim": 8,
            "layer_types": ["full_attention"] * 2,
            "sliding_window": None,
            "attn_logit_softcapping": 1.0,
            "final_logit_softcapping": 2.0,
        },
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_architecture_scores_as_its_library_does(name, tmp_path):
    """A29: the models we say we run, against one full forward per item."""
    folder = save(tmp_path, *PLAIN[name][:2], **PLAIN[name][2])
    backend = TorchBackend(folder, "float32", CPU)
    trie, index = index_of(random_codes(np.random.default_rng(1), 25))
    oracle = Oracle(folder, trie, bound_space(), "full_vocab")
    prefix, prompt = [5, 6], [3, 1, 4, 1]
    got = score(backend, index, pack([prompt], prefix=prefix), [range(25)])
    want = oracle.all_scores([*prefix, *prompt])
    np.testing.assert_allclose(got, want[trie.sid_of_item], rtol=0, atol=1e-5)
    sids = found_sids(search(backend, index, pack([prompt], prefix=prefix), width=100, k=5))
    np.testing.assert_allclose(want[sids], np.sort(want)[::-1][:5], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", OTHER)
def test_an_architecture_we_do_not_compute_is_refused_at_start(name, tmp_path):
    """A29, vllm #55501: another head gave garbage with status 200."""
    folder = save(tmp_path, *OTHER[name][:2], **OTHER[name][2])
    with pytest.raises(EngineError) as refused:
        TorchBackend(folder, "float32", CPU)
    assert folder in str(refused.value)


def test_positions_that_turn_with_the_length_are_refused_beyond_it(nightshelf, tmp_path):
    """A29: LongRoPE takes other factors above 16 positions, so that a pass of short prompts, a
    pass of nodes and the library itself would all turn the same token differently.
    """
    write_inputs(tmp_path)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
    }
    model = save(tmp_path / "model", LlamaConfig, LlamaForCausalLM, rope_parameters=rope)
    err = nightshelf("run", torch_config(tmp_path, model), check=5).err
    assert "position" in err
    assert not list(tmp_path.glob("out/**/*.parquet"))


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_a_classifier_is_not_taken_for_a_language_model(nightshelf, tmp_path, tied):
    """A29, vllm #55501: a reranker's checkpoint, whose head is not an LM head."""
    write_inputs(tmp_path)
    model = save(
        tmp_path / "model", Qwen3Config, Qwen3ForSequenceClassification, tie_word_embeddings=tied
    )
    done = nightshelf("run", torch_config(tmp_path, model), check=5)
    assert "model" in done.err
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").rglob("*.parquet"))


@pytest.mark.parametrize(
    "setting",
    ["speculative={model: draft}", "num_speculative_tokens=3", "draft_model=draft", "mtp=true"],
)
def test_speculative_settings_are_refused_before_any_work(nightshelf, tmp_path, setting):
    """A15, vllm #53488 and #42592: log-probabilities were silently wrong under speculation."""
    write_inputs(tmp_path)
    done = nightshelf("plan", write_config(tmp_path), "--set", f"engine.{setting}", check=2)
    assert f"engine.{setting.split('=')[0]}: unknown key" in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("setting", ["adapter=lora", "lora={path: x}", "adapters={de: a, fr: b}"])
def test_adapter_settings_are_refused_before_any_work(nightshelf, tmp_path, setting):
    """A28, vllm #17205: beams with LoRA were not supported, which came out late."""
    write_inputs(tmp_path)
    done = nightshelf("plan", write_config(tmp_path), "--set", f"engine.{setting}", check=2)
    assert f"engine.{setting.split('=')[0]}: unknown key" in done.err


def test_an_adapter_in_the_model_folder_is_refused(nightshelf, tmp_path, model_folder):
    """A28, B14: an adapter that would not be applied must not be passed over in silence."""
    write_inputs(tmp_path)
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "elsewhere", "r": 8}
    (model / "adapter_config.json").write_text(json.dumps(adapter))
    shutil.copy(model / "model.safetensors", model / "adapter_model.safetensors")
    done = nightshelf("plan", torch_config(tmp_path, str(model)), check=None)
    assert done.code in (2, 5), "the plan took the folder as if there were no adapter"
    assert "adapter" in done.err


def test_added_sid_tokens_beyond_the_base_vocabulary_are_accepted(
    nightshelf, tmp_path, model_folder
):
    """A6, sglang 0.5.23: label tokens above the tokenizer's base vocabulary were refused."""
    tokenizer = Tokenizer.from_file(f"{model_folder}/tokenizer.json")
    assert tokenizer.token_to_id("<a_0>") == tokenizer.get_vocab_size(with_added_tokens=False)
    write_inputs(tmp_path)
    nightshelf("run", torch_config(tmp_path, model_folder))
    assert published(tmp_path)["user_id"].n_unique() == 40


@pytest.mark.parametrize("rows", [34, 35])
def test_sid_tokens_need_an_embedding_row_each(nightshelf, tmp_path, rows):
    """A6, B14: the last of 15 SID tokens has id 34: 35 rows hold it, 34 do not."""
    write_inputs(tmp_path)
    config = torch_config(tmp_path, tiny_model(tmp_path / "model", vocab=rows))
    if rows == 35:
        nightshelf("plan", config)
        nightshelf("run", config)
    else:
        err = nightshelf("plan", config, check=3).err
        assert "ids below 34" in err
        assert "id 34" in err


def test_embeddings_of_another_size_than_the_config_says_are_refused(nightshelf, tmp_path):
    """B14, qlora #214, peft #2898: 32100 against 38272 rows gave metrics of zero."""
    write_inputs(tmp_path)
    model = tiny_model(tmp_path / "model", vocab=40)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 64}))
    err = nightshelf("run", torch_config(tmp_path, model), check=5).err
    assert "has another size than config.json says" in err
    assert "40" in err
    assert "64" in err


def test_a_sid_token_that_is_several_tokens_is_refused(nightshelf, tmp_path, model_folder):
    """B2, MiniOneRec #28: the model wrote SIDs as digits; every SID token must be one id."""
    write_inputs(tmp_path)
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    pieces = sorted(set("<>_abc0123456789"))
    space = sid_space()
    whole = [space.token(lv, c) for lv, size in enumerate(space.sizes) for c in range(size)]
    vocab = {text: i for i, text in enumerate([*pieces, *whole])}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab, []))  # it knows the tokens, and no merges
    assert tokenizer.token_to_id("<a_0>") is not None
    assert len(tokenizer.encode("<a_0>").ids) == 5
    tokenizer.save(str(model / "tokenizer.json"))
    err = nightshelf("plan", torch_config(tmp_path, str(model)), check=3).err
    assert "one token" in err
    assert "<a_0>" in err
