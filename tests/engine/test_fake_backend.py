"""The fake is public: its numbers can be checked by hand, and the real algorithms run over it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.backends.fake.backend import FakeBackend, fake_log_prob
from engine.decoding import Decoding
from engine.generate.beam_search import beam_search
from engine.scoring.items import score_items
from engine.search.pool import sort_key
from engine.trees.device_trie import to_device
from engine.trees.exclusions import dead_nodes
from engine.trees.sid_trie import build_trie
from engine.trees.token_tree import build_token_tree
from schemas.requests import Ragged
from tests.factories import bound_space, prompts_of, random_codes

CPU = torch.device("cpu")


def setting(seed=0, num_items=40, norm="full_vocab", ragged=True):
    trie = build_trie(random_codes(np.random.default_rng(seed), num_items, ragged=ragged))
    return FakeBackend(), trie, to_device(trie, bound_space(), norm, CPU)


def all_scores(backend, trie, index, prompts):
    everything = Ragged.from_lists([range(trie.num_items)] * len(prompts))
    tree = build_token_tree(trie, everything)
    context = backend.prefill(prompts_of(prompts), tree.num_rows)
    scores = score_items(Decoding(backend, context, index), tree, max_rows=13)
    return scores.view(len(prompts), -1)[:, trie.items[trie.first_item[:-1]]]  # by sid


def test_a_score_is_the_sum_of_the_hashes_anyone_can_compute():
    backend, trie, index = setting()
    space, prompt = bound_space(), [5, 6, 7]
    scores = all_scores(backend, trie, index, [prompt])[0]
    key = np.asarray(prompt, dtype="<i8").tobytes()
    for sid in range(trie.num_sids):
        path, total = [], 0.0
        for level, code in enumerate(c for c in trie.codes_of_sid[sid].tolist() if c >= 0):
            token = int(space.token_ids[level][code])
            total += fake_log_prob(key, path, token)
            path.append(token)
        assert math.isclose(total, float(scores[sid]), abs_tol=1e-4)


def test_a_narrow_first_level_never_narrows_later_ones():
    """Three first codes and a width of 64: later levels still get all of the width."""
    codes = np.stack(np.meshgrid(range(3), range(4), range(6)), -1).reshape(-1, 3)
    trie = build_trie(codes.astype(np.int32))
    index = to_device(trie, bound_space(), "full_vocab", CPU)
    backend = FakeBackend()
    context = backend.prefill(prompts_of([[1]]), 0)
    beams = beam_search(
        Decoding(backend, context, index), prompts=torch.tensor([0]), widths=(64, 64), k=72
    )
    assert beams.nodes == 3 + 12
    assert (beams.score > -torch.inf).all(), "all 72 items come back"
    assert float(beams.pruned[0]) == -math.inf


def test_more_wanted_than_there_are_gives_what_there_is():
    backend, trie, index = setting(num_items=3)
    context = backend.prefill(prompts_of([[1], [2]]), 0)
    beams = beam_search(
        Decoding(backend, context, index), prompts=torch.tensor([0, 1]), widths=(9, 9), k=50
    )
    found = beams.score > -torch.inf
    assert found.sum(dim=1).tolist() == [trie.num_sids] * 2
    for user in range(2):
        sids = beams.sid[user][found[user]].tolist()
        assert len(set(sids)) == len(sids)


def test_exclusions_remove_items_and_change_no_score():
    backend, trie, index = setting(num_items=30)
    want = all_scores(backend, trie, index, [[1]])[0]
    excluded = Ragged.from_lists([list(range(0, 30, 2))])
    dead = torch.from_numpy(dead_nodes(trie, excluded))
    context = backend.prefill(prompts_of([[1]]), 0)
    beams = beam_search(
        Decoding(backend, context, index),
        prompts=torch.tensor([0]),
        widths=(9, 99),
        k=40,
        dead=dead,
    )
    found = beams.score[0] > -torch.inf
    sids = beams.sid[0][found]
    alive = {int(trie.sid_of_item[i]) for i in range(1, 30, 2)}
    assert set(sids.tolist()) == alive
    torch.testing.assert_close(beams.score[0][found], want[sids], rtol=0, atol=1e-5)


def test_a_forced_token_is_free_under_the_trie_norm():
    codes = np.asarray([[1, 2, 3], [4, 0, 0]], dtype=np.int32)
    trie = build_trie(codes)
    index = to_device(trie, bound_space(), "trie", CPU)
    backend = FakeBackend()
    scores = all_scores(backend, trie, index, [[1]])[0]
    assert float(scores.exp().sum()) == pytest.approx(1.0, abs=1e-6)
    context = backend.prefill(prompts_of([[1]]), 0)
    beams = beam_search(
        Decoding(backend, context, index), prompts=torch.tensor([0]), widths=(1, 1), k=2
    )
    # The best prefix is followed alone, and its two forced tokens cost nothing.
    assert float(beams.score[0, 0]) == float(scores.max())
    assert float(beams.pruned[0]) == pytest.approx(float(scores.min()), abs=1e-6)


def test_equal_scores_fall_back_on_the_smaller_number():
    score = torch.tensor([[-1.0, -0.0, 0.0, -1.0, -torch.inf, -1.0]])
    order = torch.tensor([[5, 9, 2, 3, 0, 4]])
    ranked = sort_key(score, order).sort(descending=True).indices
    assert order[0][ranked[0]].tolist() == [2, 9, 3, 4, 5, 0]


def test_the_seed_and_the_vector_are_part_of_a_prompt():
    backend, trie, index = setting()
    plain = all_scores(backend, trie, index, [[1, 0, 2]])
    other = all_scores(FakeBackend(seed=1), trie, index, [[1, 0, 2]])
    assert not torch.equal(plain, other)
