"""What the torch backend promises beyond right numbers: independent rows, and a safe start."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.backend import Norm, Targets, TokenColumns
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.head import _COLUMNS, _ROWS, Head
from engine.backends.torch.tree_attention import _MAX_SCORES
from engine.decoding import Decoding
from engine.generate.beam_search import beam_search
from engine.prompts.projector import load_projector
from engine.scoring.items import score_items
from engine.trees.device_trie import to_device
from engine.trees.sid_trie import build_trie
from engine.trees.token_tree import build_token_tree
from schemas.errors import EngineError
from schemas.requests import Ragged
from tests.factories import bound_space, prompts_of, random_codes, random_prompts, tiny_model

CPU = torch.device("cpu")


def setting(seed=3, users=12):
    rng = np.random.default_rng(seed)
    trie = build_trie(random_codes(rng, 30))
    index = to_device(trie, bound_space(), "full_vocab", CPU)
    prompts = random_prompts(rng, users, longest=25)
    sets = [rng.choice(30, rng.integers(1, 30), replace=False).tolist() for _ in prompts]
    return trie, index, prompts, sets


def score(backend, trie, index, prompts, sets, *, prefix=(), max_rows=1000, reserve=True):
    tree = build_token_tree(trie, Ragged.from_lists(sets))
    context = backend.prefill(prompts_of(prompts, prefix), tree.num_rows if reserve else 0)
    return score_items(Decoding(backend, context, index), tree, max_rows)


@pytest.mark.parametrize("prefix", [(), (4, 9, 2)], ids=["no prefix", "prefix"])
def test_scores_are_the_same_bits_whatever_the_batch_the_neighbours_or_the_chunks(
    torch_backend, prefix
):
    """float32 on CPU. A difference in the last bit here means another matmul kernel was taken."""
    trie, index, prompts, sets = setting()
    prompts[0] = [1] * 90  # longer than a tile of keys
    together = score(torch_backend, trie, index, prompts, sets, prefix=prefix)
    pairs = list(zip(prompts, sets, strict=True))
    alone = [score(torch_backend, trie, index, [p], [s], prefix=prefix) for p, s in pairs]
    assert torch.equal(together, torch.cat(alone))
    reversed_ = score(torch_backend, trie, index, prompts[::-1], sets[::-1], prefix=prefix)
    parts = reversed_.split([len(s) for s in sets[::-1]])
    assert torch.equal(together, torch.cat(parts[::-1]))
    chunked = score(
        torch_backend, trie, index, prompts, sets, prefix=prefix, max_rows=5, reserve=False
    )
    assert torch.equal(together, chunked)
    torch.set_num_threads(2)
    try:
        assert torch.equal(
            together, score(torch_backend, trie, index, prompts, sets, prefix=prefix)
        )
    finally:
        torch.set_num_threads(1)


def test_scoring_and_generation_give_the_same_bits(torch_backend):
    trie, index, prompts, _ = setting()
    everything = [range(30)] * len(prompts)
    scores = score(torch_backend, trie, index, prompts, everything).view(len(prompts), 30)
    for width in (3, 30):
        context = torch_backend.prefill(prompts_of(prompts), 0)
        beams = beam_search(
            Decoding(torch_backend, context, index),
            prompts=torch.arange(12),
            widths=(width, width),
            k=8,
        )
        items = torch.from_numpy(trie.items[trie.first_item[beams.sid.numpy()]]).long()
        found = beams.score > -torch.inf
        assert torch.equal(scores.gather(1, items)[found], beams.score[found])


def test_the_same_batch_gives_the_same_bits(torch_backend):
    trie, index, prompts, sets = setting()
    first = score(torch_backend, trie, index, prompts, sets)
    assert all(
        torch.equal(first, score(torch_backend, trie, index, prompts, sets)) for _ in range(4)
    )


def test_a_static_prefix_is_forwarded_once_and_changes_no_number(torch_backend):
    trie, index, prompts, sets = setting()
    prefix = [4, 9, 2, 11]
    whole = score(torch_backend, trie, index, [prefix + p for p in prompts], sets)
    shared = score(torch_backend, trie, index, prompts, sets, prefix=prefix)
    torch.testing.assert_close(whole, shared, rtol=0, atol=1e-5)
    key = np.asarray(prefix, dtype=np.int64)
    assert torch_backend._prefix(key) is torch_backend._prefix(key)


def test_bfloat16_is_near_float32_and_ranks_alike(model_folder, torch_backend):
    trie, index, prompts, sets = setting()
    want = score(torch_backend, trie, index, prompts, sets)
    half = TorchBackend(model_folder, "bfloat16", CPU)
    got = score(half, trie, index, prompts, sets)
    assert (got - want).abs().max() < 0.5
    context = half.prefill(prompts_of(prompts), 0)
    beams = beam_search(
        Decoding(half, context, index), prompts=torch.arange(len(prompts)), widths=(8, 8), k=5
    )
    assert (beams.score > -torch.inf).all()


@pytest.mark.parametrize("kind", ["full_vocab", "level"])
def test_the_head_in_chunks_equals_the_head_in_one(kind, monkeypatch):
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 300)
    hidden = torch.randn(50, 16)
    columns = TokenColumns(np.asarray([7, 3, 200, 299]))
    row = torch.arange(50).repeat_interleave(3)
    targets = Targets(row=row, column=torch.arange(150) % 4, columns=columns)
    norm = Norm(kind, None if kind == "full_vocab" else columns)
    want = Head(linear, independent=False).log_probs(hidden, targets, norm)
    logits = linear(hidden)
    allowed = logits if kind == "full_vocab" else logits[:, columns.token_ids]
    direct = logits[row, torch.from_numpy(columns.token_ids)[targets.column]]
    torch.testing.assert_close(want, direct - allowed.logsumexp(1)[row], rtol=0, atol=1e-5)
    monkeypatch.setitem(_ROWS, "cpu", 16)
    monkeypatch.setattr("engine.backends.torch.head._LOGITS", 64)
    monkeypatch.setitem(_COLUMNS, "cpu", 33)
    got = Head(linear, independent=False).log_probs(hidden, targets, norm)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_attention_in_chunks_of_prompts_equals_attention_in_one(torch_backend, monkeypatch):
    trie, index, prompts, sets = setting()
    want = score(torch_backend, trie, index, prompts, sets)
    monkeypatch.setitem(_MAX_SCORES, "cpu", 500)
    got = score(torch_backend, trie, index, prompts, sets)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("prefix", [(), (4, 9, 2)], ids=["no prefix", "prefix"])
def test_nodes_laid_out_as_on_a_gpu_score_the_same(torch_backend, prefix, monkeypatch):
    """One pass, and one block over all prompts; a CPU's passes of few rows, and their seams."""
    trie, index, prompts, sets = setting()
    want = score(torch_backend, trie, index, prompts, sets, prefix=prefix)
    monkeypatch.setattr("engine.backends.torch.passes.ROWS_PER_THREAD", 16)
    few = score(torch_backend, trie, index, prompts, sets, prefix=prefix)
    torch.testing.assert_close(few, want, rtol=0, atol=1e-5)
    monkeypatch.setattr("engine.backends.torch.passes._on_cpu", lambda context: False)
    whole = score(torch_backend, trie, index, prompts, sets, prefix=prefix)
    torch.testing.assert_close(whole, want, rtol=0, atol=1e-5)


def test_weights_that_are_missing_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match="lacks weights"):
        TorchBackend(str(tmp_path), "float32", CPU)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_no_numbers_are_named_as_the_reason(tmp_path, value, dtype):
    """It is the checkpoint, not an architecture that we lack."""
    from safetensors.torch import load_file, save_file

    tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.input_layernorm.weight"].fill_(value)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    said = "tensor 'model.layers.1.input_layernorm.weight' holds NaN or infinite"
    if value == 3e38:  # a number, and too large to calculate with
        said = f"gets NaN from this checkpoint.*NaN in {dtype}"
    with pytest.raises(EngineError, match=said):
        TorchBackend(str(tmp_path), dtype, CPU)


@pytest.mark.parametrize(
    ("spec", "tensors", "message"),
    [
        (None, {}, "no projector.json"),
        ('{"kind": "conv"}', {}, "projector.json cannot be used"),
        ('{"kind": "mlp", "input_dim": 2, "output_dim": 4}', {}, "lacks hidden_dim"),
        ('{"kind": "linear", "input_dim": 2, "output_dim": 4}', None, "cannot be read"),
        (
            '{"kind": "linear", "input_dim": 2, "output_dim": 4}',
            {"weight": (4, 3)},
            r"expected shape \(4, 2\), got shape \(4, 3\)",
        ),
        ('{"kind": "linear", "input_dim": 2, "output_dim": 4}', {"w": (4, 2)}, "got tensors w"),
    ],
)
def test_projectors_that_do_not_fit_are_refused(tmp_path, spec, tensors, message):
    from safetensors.torch import save_file

    if spec is not None:
        (tmp_path / "projector.json").write_text(spec)
    if tensors is not None:
        named = {name: torch.zeros(shape) for name, shape in tensors.items()}
        save_file(named, tmp_path / "projector.safetensors")
    with pytest.raises(EngineError, match=message):
        load_projector(str(tmp_path), CPU)


def test_projectors_are_the_layers_they_say(tmp_path):
    from safetensors.torch import save_file

    torch.manual_seed(0)
    fc1, fc2 = torch.nn.Linear(3, 5), torch.nn.Linear(5, 8)
    named = {f"fc{i}.{n}": p.data for i, m in ((1, fc1), (2, fc2)) for n, p in m.named_parameters()}
    save_file(named, tmp_path / "projector.safetensors")
    (tmp_path / "projector.json").write_text(
        '{"kind": "mlp", "input_dim": 3, "hidden_dim": 5, "output_dim": 4, "num_tokens": 2}'
    )
    vectors = torch.randn(6, 3)
    got = load_projector(str(tmp_path), CPU)(vectors)
    want = fc2(torch.nn.functional.gelu(fc1(vectors))).view(12, 4)
    torch.testing.assert_close(got, want)
