"""A head in low precision gives the tokens that are asked for logits in float32, and a normaliser
that knows them. The oracle is the head in float64 over the same hidden states.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from engine.backend import Norm, Targets, TokenColumns
from engine.backends.torch import head as head_module
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.head import Head
from engine.backends.torch.head_transform import HeadTransform
from engine.backends.torch.prepacked import find_prepack
from engine.decoding import Decoding
from engine.prompts.labels import LabelTokens
from engine.scoring.labels import label_items
from engine.trees.token_tree import build_token_tree
from schemas.requests import Ragged
from tests.cases.helpers import index_of, pack, score, search

CPU = torch.device("cpu")
VOCAB, HIDDEN, ROWS = 700, 64, 37
TRANSFORMS = {
    "plain": None,
    "soft-capped": HeadTransform(cap=80.0),
    "scaled": HeadTransform(factor=1.25),
    "both": HeadTransform(factor=0.9, cap=50.0),
}
SETS = {
    "contiguous": np.arange(500, 628),
    "scattered": np.random.default_rng(0).permutation(VOCAB)[:90],
    "one": np.asarray([3]),
    "a whole block": np.arange(64, 320),
}


@pytest.fixture
def small(monkeypatch):
    """Sizes that make this vocabulary a large one: blocks of columns and of rows, a last part."""
    monkeypatch.setitem(head_module._COLUMNS, "cpu", 64)
    monkeypatch.setitem(head_module._ROWS, "cpu", 16)
    return lambda few: monkeypatch.setattr("engine.backends.torch.wide_logits._FEW", few)


def head_over(ids, *, dtype=torch.bfloat16, size=1.0, bias=False, likely=True):
    """A head and hidden states; `likely`: nearly all probability is with the tokens `ids`."""
    torch.manual_seed(1)
    layer = nn.Linear(HIDDEN, VOCAB, bias=bias)
    hidden = torch.randn(ROWS, HIDDEN)
    hidden[:, 0] = 8.0  # what lifts these tokens above the rest
    with torch.no_grad():
        layer.weight.mul_(size)
        layer.weight[:, 0] = 0.0
        if likely:
            layer.weight[torch.from_numpy(ids), 0] = 6.0
    return layer.to(dtype), hidden.to(dtype)


def every_pair(ids):
    row = torch.arange(ROWS).repeat_interleave(len(ids))
    columns = TokenColumns(np.asarray(ids, dtype=np.int64))
    return Targets(row=row, column=torch.arange(len(ids)).repeat(ROWS), columns=columns)


@torch.inference_mode()
def oracle(layer, hidden, transform=None, over=None):
    """log p of every token `[R, V]` float64."""
    logits = hidden.double() @ layer.weight.double().T
    if layer.bias is not None:
        logits = logits + layer.bias.double()
    if transform is not None:
        logits = logits * transform.factor
        if transform.cap is not None:
            logits = transform.cap * torch.tanh(logits / transform.cap)
    allowed = logits if over is None else logits[:, torch.from_numpy(over)]
    return logits - allowed.logsumexp(dim=1, keepdim=True)


@torch.inference_mode()
def read(layer, hidden, targets, norm=None, *, transform=None, prepack=None):
    head = Head(layer, independent=False, transform=transform, prepack=prepack)
    return head.log_probs(hidden, targets, norm or Norm("full_vocab"))


def near(got, want, nats=2e-4):
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=nats)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("ids", SETS.values(), ids=SETS)
def test_they_are_the_oracles_where_the_tokens_are_likely(small, ids, transform, dtype):
    small(256)
    layer, hidden = head_over(ids, dtype=dtype, size=4.0, bias=True)
    want = oracle(layer, hidden, transform)[:, torch.from_numpy(ids)]
    got = read(layer, hidden, every_pair(ids), transform=transform).view(ROWS, -1)
    near(got, want)
    assert (got <= 0).all()
    low = layer(hidden).float()
    low = low if transform is None else transform(low)
    rounded = low.log_softmax(dim=-1)[:, torch.from_numpy(ids)]
    if dtype == torch.bfloat16 and len(ids) > 1:
        assert (rounded - want).abs().max() > 1e-2, "this input would not show rounding"


@pytest.mark.parametrize("few", [0, 128, VOCAB], ids=["pairs", "codebook", "whole vocabulary"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_asked_for_all_at_once_they_sum_to_one(small, few, transform, monkeypatch):
    small(few)
    monkeypatch.setattr("engine.backends.torch.wide_logits._MANY", few)
    layer, hidden = head_over(SETS["one"], size=30.0, bias=True, likely=False)
    ids = np.random.default_rng(1).permutation(VOCAB)
    got = read(layer, hidden, every_pair(ids), transform=transform).view(ROWS, -1)
    near(got.double().exp().sum(dim=1), torch.ones(ROWS), 1e-4)
    near(got, oracle(layer, hidden, transform)[:, torch.from_numpy(ids)])


@pytest.mark.parametrize("ids", SETS.values(), ids=SETS)
def test_other_tokens_round_the_normaliser_and_no_difference_within_a_row(small, ids):
    """Where text has the probability, all tokens of a level share what its rounding leaves."""
    small(256)
    layer, hidden = head_over(ids, size=30.0, likely=False)
    assert layer(hidden).abs().max() > 50, "logits whose rounding is a large part of a nat"
    want = oracle(layer, hidden)[:, torch.from_numpy(ids)]
    got = read(layer, hidden, every_pair(ids)).view(ROWS, -1)
    assert (got <= 0).all()
    near(got, want, 0.5)
    inner = (got < 0).all(dim=1)
    near((got - got[:, :1])[inner], (want - want[:, :1])[inner])


@pytest.mark.parametrize("few", [0, 128], ids=["pairs", "codebook"])
def test_a_token_that_is_certain_keeps_its_distance_from_0(small, few, monkeypatch):
    """Its logit is nearly all of the normaliser: both must be the same number."""
    small(few)
    monkeypatch.setattr("engine.backends.torch.wide_logits._MANY", few)
    layer, hidden = head_over(SETS["one"], size=20.0, likely=True)
    with torch.no_grad():
        layer.weight[3, 0] = 7.71
        layer.weight[300, 0] = 7.03
    want = oracle(layer, hidden)[:, 3]
    assert want.max() > -1e-3 and want.min() < -0.1
    near(read(layer, hidden, every_pair([3, 300])).view(ROWS, 2)[:, 0], want, 1e-3)


def test_items_a_hundredth_of_a_nat_apart_keep_their_order_near_60():
    steps = 40
    hidden = torch.tensor([[1.0, 1.0, 1.0]]).to(torch.bfloat16)
    layer = nn.Linear(3, VOCAB, bias=False)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[:steps, 0] = 60.0
        layer.weight[:steps, 1] = torch.randperm(steps, generator=torch.Generator().manual_seed(0))
        layer.weight[:steps, 1] *= 0.0078125  # a power of two: exact in bfloat16
    layer.to(torch.bfloat16)
    columns = TokenColumns(np.arange(steps))
    targets = Targets(
        row=torch.zeros(steps, dtype=torch.int64), column=torch.arange(steps), columns=columns
    )
    order = layer.weight[:steps, 1].float().argsort()
    for norm in (Norm("full_vocab"), Norm("level", columns), Norm("trie")):
        got = read(layer, hidden, targets, norm)
        assert torch.equal(got.argsort(), order), norm.kind
        near(got[order].diff(), torch.full((steps - 1,), 0.0078125), 2e-5)
    assert len(layer(hidden)[0, :steps].unique()) < 4, "in bfloat16 nearly all tie"


@pytest.mark.parametrize("kind", ["level", "sid_range", "trie"])
@pytest.mark.parametrize("few", [16, 256], ids=["large sets", "small sets"])
def test_every_norm_is_over_the_same_numbers(small, kind, few, monkeypatch):
    small(few)
    ids, every = SETS["contiguous"], np.arange(400, VOCAB)
    layer, hidden = head_over(ids, size=30.0)
    targets = every_pair(ids)
    norm = Norm(kind, {"level": targets.columns, "sid_range": TokenColumns(every)}.get(kind))
    got = read(layer, hidden, targets, norm).view(ROWS, -1)
    over = every if kind == "sid_range" else ids
    near(got, oracle(layer, hidden, over=over)[:, torch.from_numpy(ids)])


@pytest.mark.parametrize("padded", [False, True], ids=["", "padding"])
def test_pairs_stand_in_for_their_own_logits_alone(small, padded, monkeypatch):
    """Texts: some tokens of some rows, one of them twice, and slots that are padding."""
    small(0)
    layer, hidden = head_over(SETS["scattered"], size=4.0)
    rng = np.random.default_rng(2)
    row = np.sort(np.concatenate([rng.integers(0, ROWS, 60), [5, 5]]))
    column = rng.integers(0, 90, 62)
    column[row == 5] = 7
    real = torch.from_numpy(rng.random(62) < 0.7) if padded else None
    ids = SETS["scattered"]
    targets = Targets(
        row=torch.from_numpy(row),
        column=torch.from_numpy(column),
        columns=TokenColumns(ids),
        real=real,
    )
    head = Head(layer, independent=False)
    with torch.inference_mode():
        got = head.log_probs(hidden, targets, Norm("full_vocab"))
        again = head.log_probs(hidden, targets, Norm("full_vocab"))
    assert torch.equal(got, again)
    assert (got <= 0).all()
    near(got, oracle(layer, hidden)[row, ids[column]], 0.05)


@pytest.mark.parametrize("few", [0, 128], ids=["pairs", "codebook"])
def test_logits_held_are_bounded_and_rows_in_parts_score_the_same(small, few, monkeypatch):
    small(few)
    ids = SETS["contiguous"]
    layer, hidden = head_over(ids, size=4.0)
    targets = every_pair(ids)
    want = read(layer, hidden, targets)
    monkeypatch.setattr("engine.backends.torch.wide_logits._LOGITS", 16 * len(ids))
    near(read(layer, hidden, targets), want, 1e-4)
    trie = read(layer, hidden, targets, Norm("trie")).view(ROWS, -1)
    near(trie.exp().sum(dim=1), torch.ones(ROWS), 1e-4)


@pytest.mark.parametrize("few", [0, 128], ids=["pairs", "codebook"])
def test_nan_and_towering_logits_are_what_they_were(small, few):
    small(few)
    ids = SETS["contiguous"]
    layer, hidden = head_over(ids, size=4.0)
    with torch.no_grad():
        layer.weight[600, 0] = 40.0  # 200 nats above the first block
    hidden[3] = torch.nan
    got = read(layer, hidden, every_pair(ids)).view(ROWS, -1)
    assert got[3].isnan().all()
    rest = torch.arange(ROWS) != 3
    near(got[rest], oracle(layer, hidden)[rest][:, torch.from_numpy(ids)], 1e-3)


@pytest.mark.parametrize("few", [128, VOCAB], ids=["codebook", "whole vocabulary"])
def test_weights_laid_out_for_the_machine_give_the_same(small, few):
    prepack = find_prepack()
    if prepack is None:
        pytest.skip("this machine has no operator that prepacks weights")
    small(few)
    ids = SETS["contiguous"]
    layer, hidden = head_over(ids, size=4.0, bias=True)
    want = oracle(layer, hidden)[:, torch.from_numpy(ids)]
    near(read(layer, hidden, every_pair(ids), prepack=prepack).view(ROWS, -1), want)


def test_a_float32_head_keeps_no_copy_and_takes_no_other_way():
    head = Head(nn.Linear(4, 9), independent=True)
    assert head._wide is None


def test_few_pairs_of_a_wide_set_are_products_of_their_own(monkeypatch):
    from engine.backends.torch.wide_logits import by_matmul

    columns = TokenColumns(np.arange(20_000))
    assert by_matmul(64, 64 * 20_000, columns), "a beam over all children"
    assert not by_matmul(64, 70, columns), "texts that share little"
    assert by_matmul(64, 70, TokenColumns(np.arange(8192))), "a codebook, whatever is asked"
    assert not by_matmul(1, 40_000, TokenColumns(np.arange(40_000))), "a copy of them is too large"


@pytest.fixture(scope="module")
def loud(tmp_path_factory, model_folder):
    """A bfloat16 backend whose logits are large."""
    from transformers import Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("loud")
    model = Qwen3ForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        model.lm_head.weight *= 30
    model.save_pretrained(folder)
    return TorchBackend(str(folder), "bfloat16", CPU)


@pytest.fixture
def read_by_tasks(loud, small, monkeypatch):
    """Whatever a task reads: the head's answer beside the oracle's, of the real targets."""
    real = loud._head
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(real._weight)
    found = []

    class Watched:
        def log_probs(self, hidden, targets, norm):
            got = real.log_probs(hidden, targets, norm)
            columns = torch.from_numpy(targets.columns.token_ids)
            over = None if norm.columns is None else norm.columns.token_ids
            asked = columns[targets.column]
            if norm.kind == "trie":
                logits = (hidden.double() @ layer.weight.double().T)[targets.row, asked]
                keep = torch.ones_like(asked, dtype=torch.bool)
                keep = keep if targets.real is None else targets.real
                sums = [logits[keep & (targets.row == r)].logsumexp(0) for r in targets.row]
                want = logits - torch.stack(sums)
            else:
                want = oracle(layer, hidden, over=over)[targets.row, asked]
            kept = slice(None) if targets.real is None else targets.real
            found.append((got[kept], want[kept]))
            return got

    monkeypatch.setattr(loud, "_head", Watched())
    return found


@pytest.mark.parametrize("norm", ["full_vocab", "sid_range", "level", "trie"])
def test_candidates_beams_and_labels_read_float32(loud, read_by_tasks, norm):
    trie, index = index_of(list(itertools.product(range(5), range(4), range(3))), norm)
    prompts = pack([[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]])
    items = list(range(trie.num_items))
    forced = score(loud, index, prompts, [items] * 3)
    beams = search(loud, index, prompts, width=60, k=10)
    for user in range(3):
        best = sorted(forced.reshape(3, -1)[user], reverse=True)[:10]
        np.testing.assert_allclose(beams.score[user].numpy(), best, rtol=0, atol=0.3)
    candidates = Ragged.from_lists([items] * 3)
    for softmax in (False, True):
        context = loud.prefill(prompts, 1000)
        got, _ = label_items(
            Decoding(loud, context, index),
            candidates,
            LabelTokens(Ragged.from_lists([[1, 2, 7]] * 3), TokenColumns(np.arange(64)), []),
            suffix=np.asarray([5, 6]),
            softmax=softmax,
            max_rows=1000,
            tree=build_token_tree(trie, candidates, forward_leaves=True),
        )
        assert (got <= 0).all()
    assert len(read_by_tasks) >= 6
    for got, want in read_by_tasks:
        near(got, want)
