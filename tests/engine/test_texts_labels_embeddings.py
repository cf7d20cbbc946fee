"""Items named by text, labels behind items, and embeddings of prompts, against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backend import TokenColumns
from engine.decoding import Decoding
from engine.prompts.labels import LabelTokens
from engine.scoring.items import score_in_parts
from engine.scoring.labels import label_items
from engine.trees.device_trie import to_device
from engine.trees.sid_trie import build_trie
from engine.trees.token_tree import build_token_tree, repeat_trees
from schemas.requests import Ragged
from schemas.semantic_ids import TextTokens
from tests.engine.oracle import Oracle
from tests.factories import bound_space, prompts_of, random_codes, random_prompts

CPU = torch.device("cpu")
VOCAB = 64
TOLERANCE = 1e-5


def random_texts(rng, num_items):
    """Token ids of texts of 1 to 5 tokens; some are the beginning of others, some the same."""
    length = rng.integers(1, 6, num_items)
    codes = rng.integers(0, 4, (num_items, 5)).astype(np.int32)
    codes[np.arange(5) >= length[:, None]] = -1
    return codes[:, : int(length.max())]


class Texts:
    """Random texts, prompts and candidate sets over the tiny model."""

    def __init__(self, seed, folder, num_items=12):
        rng = np.random.default_rng(seed)
        self.trie = build_trie(random_texts(rng, num_items), prefixes=True)
        tokens = TextTokens(VOCAB, self.trie.depth)
        self.index = to_device(self.trie, tokens, "full_vocab", CPU)
        self.oracle = Oracle(folder, self.trie, tokens, "full_vocab")
        self.prefix = rng.integers(0, 20, seed % 3).tolist()
        self.prompts = random_prompts(rng, 3)
        self.candidates = Ragged.from_lists(
            rng.choice(num_items, rng.integers(0, num_items + 1), replace=False)
            for _ in self.prompts
        )

    @property
    def pairs(self):
        """(prompt, sid) of each candidate."""
        sids = self.trie.sid_of_item[self.candidates.values]
        users = self.candidates.row_ids
        return [(self.prefix + self.prompts[u], int(s)) for u, s in zip(users, sids, strict=True)]

    def prefill(self, backend):
        return backend.prefill(prompts_of(self.prompts, self.prefix), 0)


@pytest.mark.parametrize("length_norm", ["sum", "mean"])
@pytest.mark.parametrize("max_rows", [3, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_texts_score_as_the_oracle_says(seed, max_rows, length_norm, model_folder, torch_backend):
    case = Texts(seed, model_folder)
    got, _ = score_in_parts(
        Decoding(torch_backend, case.prefill(torch_backend), case.index),
        case.candidates,
        max_rows,
        length_norm=length_norm,
    )
    want = [case.oracle.score(prompt, sid) for prompt, sid in case.pairs]
    if length_norm == "mean":
        lengths = [len(case.oracle.tokens(sid)) for _, sid in case.pairs]
        want = [score / length for score, length in zip(want, lengths, strict=True)]
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=TOLERANCE)


def test_a_large_vocabulary_reads_single_logits_and_says_the_same(
    model_folder, torch_backend, monkeypatch
):
    """Beyond some size the logits of a row are not all computed to read a few."""
    case = Texts(1, model_folder)

    def scores():
        context = case.prefill(torch_backend)
        return score_in_parts(Decoding(torch_backend, context, case.index), case.candidates, 1000)[
            0
        ]

    want = scores()
    monkeypatch.setattr("engine.backends.torch.head._MANY", 8)
    monkeypatch.setattr("engine.backends.torch.head._PRODUCTS", 100)
    torch.testing.assert_close(scores(), want, rtol=0, atol=1e-5)


def label_case(seed, folder, *, texts):
    case = Texts(seed, folder)
    if not texts:
        rng = np.random.default_rng(seed)
        case.trie = build_trie(random_codes(rng, 12, ragged=True))
        case.index = to_device(case.trie, bound_space(), "full_vocab", CPU)
        case.oracle = Oracle(folder, case.trie, bound_space(), "full_vocab")
    return case


@given(
    seed=st.integers(0, 10_000),
    texts=st.booleans(),
    softmax=st.booleans(),
    suffix=st.lists(st.integers(0, 19), max_size=3),
    max_rows=st.sampled_from([5, 1000]),
    lists=st.lists(st.lists(st.integers(0, 4), min_size=1, unique=True), min_size=3, max_size=3),
)
@settings(max_examples=20, deadline=None)
def test_labels_are_those_of_separate_prompts(
    model_folder, torch_backend, seed, texts, softmax, suffix, max_rows, lists
):
    case = label_case(seed, model_folder, texts=texts)
    columns = TokenColumns(np.asarray([2, 7, 40, 41, 63]))  # 63 is an added token of no text
    labels = Ragged.from_lists(lists)
    got, rows = label_items(
        Decoding(torch_backend, case.prefill(torch_backend), case.index),
        case.candidates,
        LabelTokens(labels, columns, []),
        suffix=np.asarray(suffix, dtype=np.int64),
        softmax=softmax,
        max_rows=max_rows,
    )
    users = case.candidates.row_ids
    sids = case.trie.sid_of_item[case.candidates.values]
    for user in range(3):  # candidates with the same tokens share a leaf and its suffix
        distinct = len(set(sids[users == user].tolist()))
        assert rows[user] >= distinct * (1 + len(suffix))
    for place, (prompt, sid) in enumerate(case.pairs):
        mine = labels.row(int(users[place]))
        ids = columns.token_ids[mine].tolist()
        want = case.oracle.labels(prompt, sid, suffix, ids, softmax=softmax)
        np.testing.assert_allclose(got[place, : len(ids)].numpy(), want, rtol=0, atol=TOLERANCE)
        assert got[place, len(ids) :].isnan().all()


def test_items_never_see_each_other_and_their_order_changes_nothing(model_folder, torch_backend):
    """Bit for bit: alone, in company, in another order, in parts, and from a shared tree."""
    case = Texts(4, model_folder)
    items = list(range(12))
    columns = TokenColumns(np.asarray([2, 7, 40]))
    suffix = np.asarray([3, 4], dtype=np.int64)

    def labels(lists, max_rows=1000, tree=None):
        candidates = Ragged.from_lists(lists)
        context = torch_backend.prefill(prompts_of(case.prompts[: len(lists)], case.prefix), 0)
        return label_items(
            Decoding(torch_backend, context, case.index),
            candidates,
            LabelTokens(Ragged.from_lists([[0, 1, 2]] * len(lists)), columns, []),
            suffix=suffix,
            softmax=True,
            max_rows=max_rows,
            tree=tree,
        )[0]

    want = labels([items])
    backwards = labels([items[::-1]]).flip(0)
    alone = torch.cat([labels([[item]]) for item in items])
    assert torch.equal(backwards, want)
    assert torch.equal(alone, want)
    assert torch.equal(labels([items], max_rows=4), want)
    shared = Ragged.from_lists([items])
    tree = build_token_tree(case.trie, shared, forward_leaves=True)
    of_user = np.zeros(3, dtype=np.int64)
    three = labels([items] * 3, tree=repeat_trees(tree, shared, of_user))
    assert torch.equal(three[:12], want)
    assert (want.exp().sum(dim=1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("prefix", [[], [4, 9, 2]])
def test_embeddings_are_hidden_states_of_the_prompt(pooling, prefix, model_folder, torch_backend):
    rng = np.random.default_rng(0)
    prompts = random_prompts(rng, 5)
    trie = build_trie(random_codes(rng, 3))
    oracle = Oracle(model_folder, trie, bound_space(), "full_vocab")
    got = torch_backend.embed(prompts_of(prompts, prefix), pooling)
    want = np.stack([oracle.embed(prefix + prompt, pooling) for prompt in prompts])
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=TOLERANCE)
    alone = [torch_backend.embed(prompts_of([prompt], prefix), pooling) for prompt in prompts]
    assert torch.equal(torch.cat(alone), got), "a neighbour changed the bits of an embedding"
