"""The library's layers and ours, which take fewer passes over memory, compute the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.device_trie import to_device
from engine.item_scoring import score_items
from engine.sid_trie import build_trie
from engine.token_tree import build_token_tree
from engine.torch_backend import TorchBackend
from engine.torch_backend.lean import _is_plain, _norm, use_lean_layers
from schemas.requests import Ragged
from tests.factories import TINY_DECODER, bound_space, prompts_of, random_codes, random_prompts

CPU = torch.device("cpu")
MODELS = {
    "Qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "Qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "Llama": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "Llama, another rotary": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "Mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
}


def save(folder, config_class, model_class, more):
    torch.manual_seed(1)
    config = config_class(**TINY_DECODER, head_dim=8, **more)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)  # biases and norms too
    model.save_pretrained(folder)
    return str(folder)


def score(backend):
    rng = np.random.default_rng(5)
    trie = build_trie(random_codes(rng, 30))
    index = to_device(trie, bound_space(), "full_vocab", CPU)
    prompts = random_prompts(rng, 6, longest=20)
    tree = build_token_tree(trie, Ragged.from_lists([range(30)] * len(prompts)))
    context = backend.prefill(prompts_of(prompts, (4, 9, 2)), tree.num_rows)
    return score_items(backend, context, index, tree, 1000)


@pytest.mark.parametrize("name", MODELS)
def test_lean_layers_compute_what_the_library_computes(name, tmp_path):
    """In float32, where a formula that differs shows; the engine uses them in bfloat16."""
    backend = TorchBackend(save(tmp_path / "model", *MODELS[name]), "float32", CPU)
    want = score(backend)
    use_lean_layers(backend._body)
    replaced = [m for m in backend._body.modules() if "forward" in vars(m)]
    assert len(replaced) >= 2 * 4 + 1, "attention, MLP and norms of two layers, and the last norm"
    torch.testing.assert_close(score(backend), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_with_lean_layers_is_as_near_to_float32_as_without(name, tmp_path, monkeypatch):
    folder = save(tmp_path / "model", *MODELS[name])
    want = score(TorchBackend(folder, "float32", CPU))
    lean = (score(TorchBackend(folder, "bfloat16", CPU)) - want).abs().mean()
    monkeypatch.setattr("engine.torch_backend.use_lean_layers", lambda body: None)
    plain = (score(TorchBackend(folder, "bfloat16", CPU)) - want).abs().mean()
    assert lean < 1.5 * plain + 0.01


class GemmaRMSNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(16))
        self.variance_epsilon = 1e-6

    def forward(self, x):
        return _norm(x, weight=1 + self.weight, eps=self.variance_epsilon)


def test_a_norm_of_another_formula_is_left_alone():
    norm = GemmaRMSNorm()
    assert not _is_plain(norm)
    use_lean_layers(norm)
    assert "forward" not in vars(norm)
