"""CASES A, B and C that TensorRT-LLM's users met, over its double."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.decoding import Decoding
from engine.generate.beam_search import beam_search
from engine.generate.native_beams import search_natively
from schemas.errors import ShardFailedError
from schemas.settings import GenerateSettings
from tests.cases.helpers import index_of, pack, score, search
from tests.engine.oracle import Oracle
from tests.factories import bound_space, prompts_of, random_codes, random_prompts


def test_a_warm_engine_scores_as_a_cold_one(start):
    """A2, sglang #26618: indices of items went wrong after a hit in the prefix cache."""
    _, index = index_of(random_codes(np.random.default_rng(0), 60))
    shared = np.random.default_rng(1).integers(0, 20, 64).tolist()
    packed = pack([[3, 1], [7]], prefix=shared)
    items = [list(range(40)), list(range(20, 60))]
    warm = start()
    first, second = (score(warm, index, packed, items) for _ in range(2))
    assert np.array_equal(first, second)
    assert np.array_equal(first, score(start(), index, packed, items))


def test_company_changes_scores_by_less_than_the_tolerance(start):
    """A10, vllm #11778, ct2 #1079: batch size changed scores; A11: repeats did."""
    _, index = index_of(random_codes(np.random.default_rng(0), 60))
    prompts = random_prompts(np.random.default_rng(2), 64, longest=12)
    items = [list(range(i % 50, i % 50 + 10)) for i in range(64)]
    backend = start(max_num_tokens=256)
    together = score(backend, index, prompts_of(prompts), items)
    assert np.array_equal(together, score(backend, index, prompts_of(prompts), items))
    for size in (1, 7):
        parts = [
            score(backend, index, prompts_of(prompts[i : i + size]), items[i : i + size])
            for i in range(0, 64, size)
        ]
        np.testing.assert_allclose(np.concatenate(parts), together, rtol=0, atol=1e-5)


def test_constrained_beams_name_items_and_open_ones_mostly_do_not(start, model_folder):
    """A21, B9, B10, TensorRT-LLM #7368: beams outside the catalog, answered with success."""
    sizes = (16, 14, 12)  # with 20 words, most of the vocabulary of 64
    codes = random_codes(np.random.default_rng(3), 1000, sizes)
    trie, index = index_of(codes, sizes=sizes)
    backend = start()
    packed = prompts_of([[3, 1, 4], [1, 5]])
    beams = search(backend, index, packed, width=50, k=50)
    assert (beams.score > -torch.inf).all()
    oracle = Oracle(model_folder, trie, bound_space(sizes), "full_vocab")
    for user, prompt in enumerate([[3, 1, 4], [1, 5]]):
        assert len(set(beams.sid[user].tolist())) == 50
        want = [oracle.score(prompt, sid) for sid in beams.sid[user].tolist()]
        np.testing.assert_allclose(beams.score[user], want, rtol=0, atol=1e-5)
    backend.start_beams(width=50, steps=3, prompt_tokens=8)
    context = backend.prefill(packed, 0)
    settings = GenerateSettings(mode="native", width=50)
    found, _, counts = search_natively(
        Decoding(backend, context, index), settings, k=50, max_rows=1000
    )
    assert counts.invalid > counts.beams // 2
    assert counts.beams == counts.invalid + len(found.sid)


def test_wide_native_beams_end_at_the_depth_of_the_items(start, double):
    """A26, TensorRT-LLM #13543 and #15621: never ended, or out of bounds, at width 128."""
    backend = start()
    backend.start_beams(width=128, steps=3, prompt_tokens=8)
    found = backend.native_beams(backend.prefill(prompts_of([[3, 1, 4]] * 3), 0))
    assert found.tokens.shape == (3, 128, 3)
    assert (found.length == 3).all()
    assert ((found.tokens >= 0) & (found.tokens < 64)).all()
    assert len({tuple(beam) for beam in found.tokens[0].tolist()}) == 128
    params = next(kwargs for name, kwargs in double.CALLS if name == "SamplingParams")
    assert params["ignore_eos"] is True  # whatever token ends a text


def test_more_beams_than_tokens_is_no_filler(start):
    """A18, TensorRT-LLM #19337: rows came back empty; none becomes a result."""
    _, index = index_of([[0, 0, 1], [1, 0, 0]])
    backend = start()
    backend.start_beams(width=100, steps=3, prompt_tokens=8)
    context = backend.prefill(prompts_of([[3, 1, 4]]), 0)
    settings = GenerateSettings(mode="native", width=100, rescore=True, compare_users=1)
    found, failed, counts = search_natively(
        Decoding(backend, context, index), settings, k=5, max_rows=1000
    )
    assert not failed.any()
    assert np.isfinite(found.score).all()
    assert counts.compared == 2  # all that the catalog has


def test_a_dead_engine_is_fatal_to_the_shard_at_once(start, double):
    """C3, C4: a dead engine was asked again and again by the same worker."""
    _, index = index_of(random_codes(np.random.default_rng(0), 60))
    backend = start()
    double.FAULTS.add("dies")
    context = backend.prefill(prompts_of([[1] * 70]), 0)
    with pytest.raises(ShardFailedError):
        beam_search(
            Decoding(backend, context, index), prompts=torch.arange(1), widths=(4,) * 3, k=4
        )
