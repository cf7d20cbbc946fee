"""The library's layers and ours, which take fewer passes over memory, compute the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
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

from engine.backends.torch import compiled, varlen
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.compiled import find_compiled, right
from engine.backends.torch.fused_layers import ON_CPU, Steps, _is_plain, _norm, use_fused_layers
from engine.backends.torch.varlen import Kernels
from engine.decoding import Decoding
from engine.scoring.items import score_items
from engine.trees.device_trie import to_device
from engine.trees.sid_trie import build_trie
from engine.trees.token_tree import build_token_tree
from schemas.requests import Ragged
from tests.factories import TINY_DECODER, bound_space, prompts_of, random_codes, random_prompts

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
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


def score(backend, prefix=(4, 9, 2)):
    rng = np.random.default_rng(5)
    trie = build_trie(random_codes(rng, 30))
    index = to_device(trie, bound_space(), "full_vocab", CPU)
    prompts = random_prompts(rng, 6, longest=20)
    tree = build_token_tree(trie, Ragged.from_lists([range(30)] * len(prompts)))
    context = backend.prefill(prompts_of(prompts, prefix), tree.num_rows)
    return score_items(Decoding(backend, context, index), tree, 1000)


PLAIN = Steps(compiled.norm, compiled.turned, compiled.gated)  # what is compiled for CUDA


@pytest.mark.parametrize("steps", [ON_CPU, PLAIN], ids=["cpu", "cuda"])
@pytest.mark.parametrize("name", MODELS)
def test_lean_layers_compute_what_the_library_computes(name, steps, tmp_path):
    """In float32, where a formula that differs shows; the engine uses them in bfloat16."""
    backend = TorchBackend(save(tmp_path / "model", *MODELS[name]), "float32", CPU)
    want = score(backend)
    backend._skips = use_fused_layers(backend._body, steps)
    assert backend._skips, "the last layer too"
    replaced = [m for m in backend._body.modules() if "forward" in vars(m)]
    assert len(replaced) >= 2 * 4 + 1, "attention, MLP and norms of two layers, and the last norm"
    torch.testing.assert_close(score(backend), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_with_fused_layers_is_as_near_to_float32_as_without(name, tmp_path, monkeypatch):
    folder = save(tmp_path / "model", *MODELS[name])
    want = score(TorchBackend(folder, "float32", CPU))
    fused = (score(TorchBackend(folder, "bfloat16", CPU)) - want).abs().mean()
    monkeypatch.setattr("engine.backends.torch.backend.use_fused_layers", lambda body, steps: False)
    plain = (score(TorchBackend(folder, "bfloat16", CPU)) - want).abs().mean()
    assert fused < 1.5 * plain + 0.01


@pytest.mark.parametrize("prefix", [(), (4, 9, 2)], ids=["no prefix", "prefix"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_last_layer_forwards_the_ends_of_prompts_and_what_is_read_does_not_change(
    layout, prefix, tmp_path, monkeypatch
):
    backend = TorchBackend(save(tmp_path / "model", *MODELS["Qwen3"]), "float32", CPU)
    last = backend._body.layers[-1]
    rows = []
    last.mlp.register_forward_hook(lambda module, given, out: rows.append(given[0].shape[1]))
    if layout == "packed":  # as for a fused kernel
        monkeypatch.setattr("engine.backends.torch.passes._on_cpu", lambda context: False)
        backend._path = replace(backend._path, flash=Kernels(varlen.plain, varlen.combine))
    prompts = random_prompts(np.random.default_rng(5), 6, longest=20)
    given = prompts_of(prompts, prefix)
    read = {
        "last": lambda: backend.embed(given, "last"),
        "mean": lambda: backend.embed(given, "mean"),
        "scores": lambda: score(backend, prefix),
    }
    want = {name: what() for name, what in read.items()}
    backend._skips = use_fused_layers(backend._body)
    forwarded = {}
    for name, what in read.items():
        rows.clear()
        torch.testing.assert_close(what(), want[name], rtol=0, atol=2e-5)
        forwarded[name] = rows[0]
    assert forwarded["last"] == forwarded["scores"] == len(prompts)
    assert forwarded["mean"] >= len(given.token_ids)


class GemmaRMSNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(16))
        self.variance_epsilon = 1e-6

    def forward(self, x):
        return _norm(x, 1 + self.weight, self.variance_epsilon)


def test_a_norm_of_another_formula_is_left_alone():
    norm = GemmaRMSNorm()
    assert not _is_plain(norm)
    use_fused_layers(norm)
    assert "forward" not in vars(norm)


def test_compiled_steps_are_tried_before_they_are_used(monkeypatch, caplog):
    caplog.set_level("INFO", logger="nightshelf.torch")
    monkeypatch.setattr(compiled, "right", lambda made, device: right(made, CPU))
    good = compiled.compiled("aot_eager")  # traced as for CUDA, and run as it is
    monkeypatch.setattr(compiled, "compiled", lambda: good)
    assert find_compiled(CUDA) is good
    for step in ("norm", "turned", "gated"):
        wrong = replace(good.steps, **{step: lambda x, *_: 1.1 * x})
        monkeypatch.setattr(compiled, "compiled", lambda wrong=wrong: replace(good, steps=wrong))
        assert find_compiled(CUDA) is None

    def no_compiler():
        raise RuntimeError("Cannot find a working triton installation")

    monkeypatch.setattr(compiled, "compiled", no_compiler)
    assert find_compiled(CUDA) is None
    assert ["does not give what plain code gives" in m for m in caplog.messages[:3]] == [True] * 3
    assert "Cannot find a working triton installation" in caplog.messages[3]


def test_a_step_is_compiled_twice_at_most_whatever_the_rows():
    """A first number of rows and heads, and any: a nightly run does not compile."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    made = compiled.compiled(counter)
    for rows in (5, 9, 300, 17, 4096, 33):
        made.steps.norm(torch.ones(rows, 64, dtype=torch.bfloat16), torch.ones(64), 1e-6)
    assert counter.frame_count <= 2
    for rows in (5, 9, 300, 17, 4096, 33):
        turn = torch.ones(rows, 1, 8)
        for heads in (4, 2):  # of queries, and of keys
            x = torch.ones(rows, heads, 8, dtype=torch.bfloat16)
            made.steps.turned(x, torch.ones(8), 1e-6, turn, turn)
        made.log_sum(torch.ones(rows, 100, dtype=torch.bfloat16))
        made.log_sum(torch.ones(rows, 30, dtype=torch.bfloat16))  # the head's last columns
    assert counter.frame_count <= 2 + 2 * 3
