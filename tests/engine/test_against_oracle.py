"""Scoring and beams of the torch backend against the oracle, on random ragged catalogs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.decoding import Decoding
from engine.generate.beam_search import beam_search
from engine.scoring.items import score_items
from engine.trees.device_trie import to_device
from engine.trees.exclusions import dead_nodes
from engine.trees.sid_trie import build_trie
from engine.trees.token_tree import build_token_tree
from schemas.requests import Ragged
from tests.engine.oracle import Oracle
from tests.factories import SIZES, bound_space, prompts_of, random_codes, random_prompts

NORMS = ("full_vocab", "sid_range", "level", "trie")
TOLERANCE = 1e-5


def make_case(seed: int, norm: str, model_folder: str):
    rng = np.random.default_rng(seed)
    codes = random_codes(rng, int(rng.integers(3, 40)), ragged=bool(seed % 2))
    trie, space = build_trie(codes), bound_space()
    index = to_device(trie, space, norm, torch.device("cpu"))
    prefix = rng.integers(0, 20, 3).tolist() if seed % 3 else []
    prompts = random_prompts(rng, 4)
    oracle = Oracle(model_folder, trie, space, norm)
    return rng, trie, index, prefix, prompts, oracle


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("seed", range(6))
def test_scores_of_candidate_sets_equal_the_oracle(seed, norm, model_folder, torch_backend):
    rng, trie, index, prefix, prompts, oracle = make_case(seed, norm, model_folder)
    candidates = Ragged.from_lists(
        rng.choice(trie.num_items, rng.integers(0, trie.num_items + 1), replace=False)
        for _ in prompts
    )
    tree = build_token_tree(trie, candidates)
    context = torch_backend.prefill(prompts_of(prompts, prefix), tree.num_rows)
    got = score_items(Decoding(torch_backend, context, index), tree, max_rows=7).numpy()
    want = [
        oracle.score(prefix + prompts[user], int(trie.sid_of_item[item]))
        for user, item in zip(candidates.row_ids, candidates.values, strict=True)
    ]
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
    assert (got <= 0).all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("seed", range(6))
def test_wide_beams_are_the_exhaustive_ranking(seed, norm, model_folder, torch_backend):
    rng, trie, index, prefix, prompts, oracle = make_case(seed, norm, model_folder)
    k = 7
    context = torch_backend.prefill(prompts_of(prompts, prefix), 0)
    beams = beam_search(
        Decoding(torch_backend, context, index),
        prompts=torch.arange(len(prompts)),
        widths=(1000,) * len(SIZES),
        k=k,
    )
    assert (beams.pruned == -torch.inf).all(), "nothing is dropped when the beam is wide enough"
    for user, prompt in enumerate(prompts):
        want = oracle.all_scores(prefix + prompt)
        best = np.lexsort((np.arange(len(want)), -want))[:k]
        found = beams.score[user] > -torch.inf
        assert int(found.sum()) == min(k, trie.num_sids)
        np.testing.assert_allclose(
            beams.score[user][found].numpy(), want[best], rtol=0, atol=TOLERANCE
        )
        np.testing.assert_allclose(
            want[beams.sid[user][found].numpy()], want[best], rtol=0, atol=TOLERANCE
        )


@pytest.mark.parametrize("seed", range(12))
def test_certified_beams_equal_the_exhaustive_top_k(seed, model_folder, torch_backend):
    """Narrow beams miss items; those with a certificate never do."""
    norm = NORMS[seed % 4]
    rng, trie, index, prefix, prompts, oracle = make_case(seed, norm, model_folder)
    excluded = Ragged.from_lists(rng.choice(trie.num_items, trie.num_items // 3) for _ in prompts)
    dead = torch.from_numpy(dead_nodes(trie, excluded))
    k, width = 3, int(rng.integers(1, 6))
    context = torch_backend.prefill(prompts_of(prompts, prefix), 0)
    beams = beam_search(
        Decoding(torch_backend, context, index),
        prompts=torch.arange(len(prompts)),
        widths=(width,) * len(SIZES),
        k=k,
        dead=dead,
    )
    for user, prompt in enumerate(prompts):
        want = oracle.all_scores(prefix + prompt)
        gone = set(excluded.row(user).tolist())
        alive = [
            s
            for s in range(trie.num_sids)
            if set(trie.items[trie.first_item[s] : trie.first_item[s + 1]].tolist()) - gone
        ]
        found = beams.score[user] > -torch.inf
        sids = beams.sid[user][found].tolist()
        assert set(sids) <= set(alive), "an excluded item was returned"
        assert len(set(sids)) == len(sids)
        np.testing.assert_allclose(
            beams.score[user][found].numpy(), want[sids], rtol=0, atol=TOLERANCE
        )
        kth, pruned = float(beams.score[user][-1]), float(beams.pruned[user])
        if kth > pruned or pruned == -np.inf:
            best = sorted(alive, key=lambda s: (-want[s], s))[:k]
            np.testing.assert_allclose(want[sids], want[best], rtol=0, atol=TOLERANCE)


def test_some_narrow_beams_are_not_certified(model_folder, torch_backend):
    """The certificate is not a formality: on a random model a narrow beam misses the best items."""
    _, _, index, prefix, prompts, _ = make_case(2, "full_vocab", model_folder)
    context = torch_backend.prefill(prompts_of(prompts, prefix), 0)
    beams = beam_search(
        Decoding(torch_backend, context, index), prompts=torch.arange(4), widths=(1, 1, 1), k=3
    )
    assert (beams.score[:, -1] <= beams.pruned).any()


def test_beams_and_scoring_share_one_prefill_and_agree(model_folder, torch_backend):
    rng, trie, index, prefix, prompts, _ = make_case(4, "full_vocab", model_folder)
    context = torch_backend.prefill(prompts_of(prompts, prefix), 0)
    everything = Ragged.from_lists([range(trie.num_items)] * len(prompts))
    tree = build_token_tree(trie, everything)
    scores = score_items(Decoding(torch_backend, context, index), tree, max_rows=1000)
    beams = beam_search(
        Decoding(torch_backend, context, index),
        prompts=torch.arange(len(prompts)),
        widths=(8, 8, 8),
        k=5,
    )
    table = scores.view(len(prompts), trie.num_items)
    for user in range(len(prompts)):
        for sid, score in zip(beams.sid[user].tolist(), beams.score[user].tolist(), strict=True):
            if score > -np.inf:
                item = int(trie.items[trie.first_item[sid]])
                assert abs(float(table[user, item]) - score) <= TOLERANCE


def test_soft_vectors_stand_in_for_embeddings(model_folder, torch_backend):
    from schemas.requests import Ragged as R

    rng, trie, index, prefix, prompts, oracle = make_case(4, "full_vocab", model_folder)
    vectors = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    packed = prompts_of([[3, 0, 5], [3, 0, 5]], prefix)
    packed = type(packed)(
        token_ids=packed.token_ids,
        offsets=packed.offsets,
        static_prefix=packed.static_prefix,
        soft_positions=np.asarray([1, 4]),
        soft_vectors=vectors,
    )
    candidates = R.from_lists([range(trie.num_items)] * 2)
    tree = build_token_tree(trie, candidates)
    context = torch_backend.prefill(packed, tree.num_rows)
    got = score_items(Decoding(torch_backend, context, index), tree, max_rows=1000).view(2, -1)
    for user in range(2):
        want = [
            oracle.score([*prefix, 3, 0, 5], int(s), {len(prefix) + 1: vectors[user]})
            for s in trie.sid_of_item
        ]
        np.testing.assert_allclose(got[user].numpy(), want, rtol=0, atol=TOLERANCE)
    assert (got[0] - got[1]).abs().max() > 1e-3, "same tokens, different vectors"
