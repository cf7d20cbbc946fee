"""Beams of an engine's own search: what is dropped, what is counted, and when they are used."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from engine.backends.fake.backend import FakeBackend
from engine.decoding import Decoding
from engine.generate.beam_search import beam_search
from engine.generate.native_beams import (
    match_catalog,
    search_natively,
    sids_of,
    uses_native_beams,
)
from engine.trees.device_trie import to_device
from engine.trees.sid_trie import build_trie
from pipelines.planning.engine_check import backend_problems
from schemas.errors import ConfigError, EngineError
from schemas.search_work import NativeBeams
from schemas.semantic_ids import TextTokens
from schemas.settings import GenerateSettings, RunConfig
from tests.cases.helpers import CPU, pack
from tests.engine.oracle import Oracle
from tests.factories import bound_space, prompts_of, random_codes

CODES = np.asarray([[0, 0, 1], [0, 1, 2], [4, 3, 5], [1, 0, 0], [1, 0, 0]], dtype=np.int32)


def index_of(codes=CODES):
    trie = build_trie(codes)
    return trie, to_device(trie, bound_space(), "full_vocab", CPU)


def uses_native(run, trie, backend):
    return uses_native_beams(run, run.task.generate, trie, backend)


@dataclass
class Given:
    """Beams as a test writes them."""

    tokens: np.ndarray
    length: np.ndarray
    score: np.ndarray
    failed: np.ndarray


def given(*prompts, failed=()):
    """Per prompt a list of (tokens, score); tokens may be of any length up to 3."""
    width = max(map(len, prompts))
    shape = (len(prompts), width)
    raw = Given(
        np.full((*shape, 3), -1, dtype=np.int64),
        np.zeros(shape, dtype=np.int64),
        np.full(shape, np.nan, dtype=np.float32),
        np.isin(np.arange(len(prompts)), failed),
    )
    for b, beams in enumerate(prompts):
        for w, (tokens, score) in enumerate(beams):
            raw.tokens[b, w, : len(tokens)] = tokens[:3]
            raw.length[b, w] = len(tokens)
            raw.score[b, w] = np.nan if score is None else score
    return raw


def tokens_of(codes):
    space = bound_space()
    return [int(t) for t in space.tokens(np.arange(len(codes)), np.asarray(codes))]


def test_beams_that_name_no_item_are_dropped_and_everything_is_counted():
    trie, index = index_of()
    a, b = tokens_of([0, 0, 1]), tokens_of([1, 0, 0])
    no_such = tokens_of([0, 0, 2])
    raw = given(
        [(b, -3.0), (a, -1.0), (no_such, -0.5), ([7, 8, 9], -0.1)],
        [([], None), (a, -np.inf), (b, None), (b[:2], -0.2)],
        [(a, -2.0), (a, -2.5), (b, -2.0), ([], None)],
        [([], None)] * 4,
        failed=[3],
    )
    valid, counts = match_catalog(raw, index)
    assert counts == NativeBeams(beams=12, incomplete=3, without_score=2, invalid=2, doubled=1)
    first, last = trie.sid_of_item[[0, 3]]
    assert list(zip(valid.prompt.tolist(), valid.sid.tolist(), strict=True)) == [
        (0, first),  # best first, in whatever order they came
        (0, last),
        (2, first),  # equal scores: by semantic ID
        (2, last),
    ]
    np.testing.assert_allclose(valid.score, [-1.0, -3.0, -2.0, -2.0])


@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_looked_up_as_the_trie_spells_them(seed):
    rng = np.random.default_rng(seed)
    codes = random_codes(rng, 40)
    trie, index = index_of(codes)
    known = {tuple(tokens_of(c)): int(s) for c, s in zip(codes, trie.sid_of_item, strict=True)}
    every = np.stack([rng.integers(0, 64, 500) for _ in range(3)], axis=1)
    near = np.asarray([tokens_of(c) for c in random_codes(rng, 300)])
    tokens = np.concatenate([every, near, np.asarray([tokens_of(c) for c in codes])])
    want = [known.get(tuple(row), -1) for row in tokens.tolist()]
    assert sids_of(trie, index, tokens).tolist() == want
    assert max(want) >= 0 > min(want)


PROMPTS = [[3, 1, 4], [15, 9]]
WIDTH = 30


class Found:
    """The TensorRT-LLM backend with its beams started, over a catalog that holds every second one
    of the beams it finds, and items it does not."""

    def __init__(self, backend, model, norm="full_vocab", packed=None):
        self.backend, self.packed = backend, packed or prompts_of(PROMPTS)
        backend.start_beams(width=WIDTH, steps=3, prompt_tokens=20)
        raw = backend.native_beams(backend.prefill(self.packed, 0)).tokens.reshape(-1, 3)
        other = np.random.default_rng(0).integers(0, 64, (40, 3))
        codes = np.unique(np.concatenate([raw[::2], other]), axis=0).astype(np.int32)
        self.trie = build_trie(codes)
        self.tokens = TextTokens(64, 3)
        self.index = to_device(self.trie, self.tokens, norm, CPU)
        self.oracle = Oracle(model, self.trie, self.tokens, norm)

    def __call__(self, packed=None, **changes):
        how = {"k": 10, "max_rows": 1000}
        how |= {name: changes.pop(name) for name in list(changes) if name in how}
        settings = GenerateSettings(**{"mode": "native", "width": WIDTH} | changes)
        context = self.backend.prefill(packed or self.packed, 0)
        return search_natively(Decoding(self.backend, context, self.index), settings, **how)

    def assert_right(self, beams, prompts=PROMPTS, soft=None):
        """Each SID once, best first, with the score that the model gives it."""
        pairs = list(zip(beams.user.tolist(), beams.sid.tolist(), strict=True))
        assert len(pairs) == len(set(pairs)) > len(prompts)
        want = [self.oracle.score(prompts[u], s, soft and soft[u]) for u, s in pairs]
        np.testing.assert_allclose(beams.score, want, rtol=0, atol=1e-5)
        for user in range(len(prompts)):
            assert (np.diff(beams.score[beams.user == user]) <= 1e-6).all()


def test_native_beams_are_items_with_their_own_scores(start, model_folder):
    find = Found(start(), model_folder)
    beams, failed, counts = find(compare_users=2)
    find.assert_right(beams)
    assert not failed.any()
    assert counts.beams == 2 * WIDTH
    assert counts.invalid > 0
    assert counts.beams == counts.invalid + len(beams.sid)
    assert (beams.pruned == np.inf).all()  # and so no list is called exact
    assert np.isnan(beams.legal_mass).all()
    # What both find has one score; the comparison counts what the constrained list has besides.
    context = find.backend.prefill(find.packed, 0)
    constrained = beam_search(
        Decoding(find.backend, context, find.index),
        prompts=torch.arange(2),
        widths=(WIDTH,) * 3,
        k=10,
    )
    common = sum(
        len(np.intersect1d(constrained.sid[u].numpy(), beams.sid[beams.user == u][:10]))
        for u in range(2)
    )
    assert (counts.compared, counts.in_common) == (20, common)
    assert common > 0


def test_rescoring_gives_the_norm_that_was_asked_for(start, model_folder):
    find = Found(start(), model_folder, "trie")
    find.assert_right(find(rescore=True)[0])


@pytest.mark.parametrize(
    ("fault", "field"),
    [
        ("beams_empty", "incomplete"),
        ("beams_infinite", "without_score"),
        ("beams_doubled", "doubled"),
    ],
)
def test_what_upstream_may_return_is_survived(start, double, model_folder, fault, field):
    """A18, and upstream's empty rows (TensorRT-LLM #19337), -inf beams and repeats."""
    find = Found(start(), model_folder)
    whole = find()[0]
    double.FAULTS.add(fault)
    beams, failed, counts = find()
    find.assert_right(beams)
    assert not failed.any()
    assert len(beams.sid) < len(whole.sid)
    lost = counts.incomplete + counts.without_score + counts.invalid + counts.doubled
    assert counts.beams == lost + len(beams.sid)
    assert counts.as_dict()[field] > 0


def test_a_request_that_is_refused_fails_its_user_alone(start, model_folder):
    find = Found(start(), model_folder)
    prompts = [PROMPTS[0], [5] * 60, PROMPTS[1]]  # the second is too long for the engine
    beams, failed, counts = find(prompts_of(prompts))
    assert failed.tolist() == [False, True, False]
    find.assert_right(beams, prompts)
    assert set(beams.user.tolist()) == {0, 2}
    assert counts.beams == 2 * WIDTH


def test_vectors_reach_the_beams_of_their_user(start, model_folder):
    """A27; and a beam may spell the placeholder's own id, which then is a token like others."""
    vectors = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    packed = pack([[3, 0, 5]] * 2, soft={(0, 1): vectors[0], (1, 1): vectors[1]})
    find = Found(start(), model_folder, packed=packed)
    beams, _, _ = find()
    find.assert_right(beams, [[3, 0, 5]] * 2, [{1: vectors[0]}, {1: vectors[1]}])


# -- when they are used --------------------------------------------------------------------------


def config(backend="trtllm", prompt_tokens=4096, exclusions=None, norm="full_vocab", **generate):
    return RunConfig.model_validate(
        {
            "surface": "home",
            "engine": {"backend": backend, "model": "m"},
            "sid": {"sizes": [5, 4, 6], "tokens": ["<a_{code}>", "<b_{code}>", "<c_{code}>"]},
            "prompt": {"template": "{history}", "max_tokens": prompt_tokens},
            "inputs": {"users": "u", "catalog": "c", "exclusions": exclusions},
            "task": {"score_norm": norm, "generate": {"width": 64, **generate}},
            "output": {"path": "o"},
        }
    )


@pytest.mark.parametrize(
    ("changes", "native_ones", "words"),
    [
        ({}, True, "2048 tokens and more"),
        ({"prompt_tokens": 512}, False, "below 2048"),
        ({"width": 1024}, False, "width is above"),
        ({"width": [64, 128]}, False, "width is a list"),
        ({"exact": True}, False, "certificate"),
        ({"exclusions": "e"}, False, "exclusions"),
        ({"norm": "trie"}, False, "needs rescore"),
        ({"norm": "trie", "rescore": True}, True, "2048 tokens and more"),
    ],
)
def test_auto_chooses_and_says_why(start, caplog, changes, native_ones, words):
    trie, _ = index_of()
    with caplog.at_level(logging.INFO):
        assert uses_native(config(mode="auto", **changes), trie, start()) is native_ones
    assert words in caplog.text


def test_native_is_refused_where_it_cannot_be(start):
    ragged = build_trie(np.asarray([[0, 1, -1], [1, 2, 3]], dtype=np.int32))
    with pytest.raises(EngineError, match="differ in length"):
        uses_native(config(mode="native"), ragged, start())
    for backend in ("torch", "fake"):
        problems = backend_problems(config(mode="native", backend=backend))
        assert "native needs an engine" in str(next(problems))
    trie, _ = index_of()
    assert not uses_native(config(mode="auto", backend="fake"), trie, FakeBackend())
    for wrong in (
        {"norm": "trie"},
        {"exact": True},
        {"width": [64, 128]},
    ):
        with pytest.raises((ConfigError, ValueError), match=r"native"):
            config(mode="native", **wrong)
    with pytest.raises(ValueError, match="rescore"):
        config(rescore=True)
