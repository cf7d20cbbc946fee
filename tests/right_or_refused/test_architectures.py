"""A checkpoint is scored as transformers scores it, to 1e-5 in float32, or refused in words that
name what stands in the way. One tiny random model of each architecture; none is skipped.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.probe import TOLERANCE, relative_errors
from engine.checkpoints.architecture import _OTHER, SCORED, read_config, refusals
from schemas.errors import EngineError
from tests.cases.helpers import CPU, index_of, pack, score
from tests.factories import random_codes
from tests.right_or_refused.architectures import REFUSED, SCORES, save_model

PREFIX, PROMPTS = [5, 6], [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
ITEMS = 8


@torch.inference_mode()
def by_transformers(folder, trie, tokens):
    """Summed log-probabilities, one forward per prompt and item."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    for prompt in PROMPTS:
        head = PREFIX + prompt
        for sid in trie.sid_of_item:
            codes = trie.codes_of_sid[sid]
            item = [int(tokens.token_ids[level][code]) for level, code in enumerate(codes)]
            row = model(input_ids=torch.tensor([head + item]), use_cache=False).logits[0].double()
            log_p = row.log_softmax(dim=-1)
            out.append(sum(float(log_p[len(head) - 1 + i, t]) for i, t in enumerate(item)))
    return np.asarray(out)


def by_us(folder, dtype="float32"):
    from tests.factories import bound_space

    trie, index = index_of(random_codes(np.random.default_rng(1), ITEMS))
    backend = TorchBackend(folder, dtype, CPU)
    got = score(backend, index, pack(PROMPTS, prefix=PREFIX), [range(ITEMS)] * len(PROMPTS))
    return got, trie, bound_space()


@pytest.mark.parametrize("name", SCORES)
def test_an_architecture_scores_as_transformers_does(name, tmp_path):
    folder = save_model(tmp_path, *SCORES[name])
    assert not list(refusals(folder, read_config(folder), own_forward=True)), "plan would refuse it"
    got, trie, tokens = by_us(folder)
    np.testing.assert_allclose(got, by_transformers(folder, trie, tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", SCORES)
def test_an_architecture_starts_in_bfloat16(name, tmp_path):
    """The architecture is decided about in float32, the rest in parts of the logits' size."""
    folder = save_model(tmp_path, *SCORES[name])
    got, _, _ = by_us(folder, "bfloat16")
    assert np.isfinite(got).all()


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_architecture_is_refused_in_words_that_name_what(name, dtype, tmp_path):
    model_type, changes, words = REFUSED[name]
    folder = save_model(tmp_path, model_type, changes)
    with pytest.raises(EngineError) as refused:
        TorchBackend(folder, dtype, CPU)
    assert words in str(refused.value)
    assert folder in str(refused.value)
    assert "nightshelf_token_tree" not in str(refused.value)
    first = next(refusals(folder, read_config(folder), own_forward=True))
    assert str(first) == str(refused.value), "plan says another thing than run"


def test_every_type_that_is_listed_has_been_tried():
    assert {model_type for model_type, _ in SCORES.values()} == SCORED
    untried = set(_OTHER) - {model_type for model_type, _, _ in REFUSED.values()}
    assert untried == {"mamba2", "falcon_h1", "recurrent_gemma"}, "sizes of their own"


@pytest.mark.parametrize("scale", [0.02, 1.0, 20.0, 60.0])
def test_logits_of_any_size_are_accepted(scale, tmp_path):
    """A plain Qwen3 whose largest logit is 40 to 60 rounds by a quarter in bfloat16."""
    folder = save_model(tmp_path, "qwen3", {"head_dim": 8}, scale=scale)
    by_us(folder, "bfloat16")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("nanochat", {}),
        ("granite", {"logits_scaling": 1.05}),
        ("granite", {"logits_scaling": 1.001}),
        ("cohere", {"logit_scale": 0.95}),
        ("gemma3_text", {"head_dim": 8, "layer_types": ["full_attention"] * 2}
         | {"final_logit_softcapping": 15.0}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("scale", [1.0, 10.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_that_we_do_not_know_is_refused_however_little_it_changes(
    name, changes, scale, dtype, tmp_path, monkeypatch
):
    monkeypatch.setattr("engine.backends.torch.backend.head_transform", lambda config: None)
    folder = save_model(tmp_path, name, changes, scale=scale)
    with pytest.raises(EngineError, match="does not score as its own library does"):
        TorchBackend(folder, dtype, CPU)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_small_factor_on_small_logits_shows_too(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.backends.torch.backend.head_transform", lambda config: None)
    folder = save_model(tmp_path, "granite", {"logits_scaling": 1.05}, scale=0.01)
    with pytest.raises(EngineError, match="does not score as its own library does"):
        TorchBackend(folder, dtype, CPU)


def test_an_attention_that_differs_in_a_layer_is_refused_in_bfloat16(tmp_path, monkeypatch):
    """A window that config.json does not show, below what bfloat16 rounds away."""
    monkeypatch.setattr("engine.checkpoints.architecture.other_attention", lambda raw, folder: None)
    folder = save_model(tmp_path, "mistral", {"sliding_window": 64})
    with pytest.raises(EngineError, match="does not score as its own library does"):
        TorchBackend(folder, "bfloat16", CPU)


def test_errors_are_in_parts_of_the_size_of_the_logits():
    want = torch.log_softmax(torch.randn(5, 100, generator=torch.Generator().manual_seed(0)), -1)
    for size in (0.1, 1.0, 50.0):
        base = torch.log_softmax(size * want, -1)
        other = torch.log_softmax(1.01 * size * want, -1)
        error = relative_errors(other, base)
        assert (error > 10 * TOLERANCE["float32"]).all()
        assert (error < TOLERANCE["bfloat16"]).all()
    assert relative_errors(torch.full_like(want, torch.nan), want).isinf().all()
