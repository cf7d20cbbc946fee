"""Properties of scoring and generation together, over random catalogs, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.decoding import Decoding
from engine.generate.beam_search import search_by_beams as search
from engine.scoring.items import score_in_parts
from engine.search.masks import SegmentMask
from engine.trees.device_trie import to_device
from engine.trees.exclusions import EligibleTrie, dead_nodes
from engine.trees.sid_trie import EndCodes, build_trie
from schemas.requests import Eligibility, Ragged
from schemas.semantic_ids import SidSpace
from schemas.settings import GenerateSettings
from tests.engine.oracle import Oracle
from tests.factories import SIZES, TOKENS, bound_space, prompts_of, random_codes, random_prompts

CPU = torch.device("cpu")
TOLERANCE = 1e-5


def ending_space():
    """The usual space with token 63 as its end."""
    ids = dict(zip(bound_space().space.sizes, (20, 25, 29), strict=True))
    space = SidSpace(SIZES, TOKENS, "<end>")
    table = {"<end>": 63}
    for level, size in enumerate(SIZES):
        for code in range(size):
            table[space.token(level, code)] = ids[size] + code
    return space.bind(table.get)


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    return {
        "seed": draw(st.integers(0, 1 << 20)),
        "items": draw(st.integers(1, 25)),
        "kind": draw(st.sampled_from(["full", "ragged", "ends", "all end"])),
        "norm": draw(st.sampled_from(["full_vocab", "sid_range", "level", "trie"])),
        "widths": tuple(draw(st.lists(st.integers(1, 12), min_size=3, max_size=3))),
        "k": draw(st.integers(1, 8)),
        "exact": draw(st.booleans()),
        "segments": draw(st.booleans()),
        "soft": draw(st.booleans()),
    }


class Together:
    """One random case: catalog, prompts with vectors, exclusions, eligibility."""

    def __init__(self, case, folder):
        rng = np.random.default_rng(case["seed"])
        ends = "end" in case["kind"]
        self.space = ending_space() if ends else bound_space()
        codes = random_codes(rng, case["items"], ragged=case["kind"] == "ragged")
        end = None
        if ends:
            length = rng.integers(1, 4, len(codes))
            codes[np.arange(3) >= length[:, None]] = -1
            end = EndCodes(self.space.space.end_codes, every=case["kind"] == "all end")
        self.trie = build_trie(codes, end=end)
        self.index = to_device(self.trie, self.space, case["norm"], CPU)
        self.oracle = Oracle(folder, self.trie, self.space, case["norm"])
        self.prefix = rng.integers(0, 20, rng.integers(0, 4)).tolist()
        self.prompts = random_prompts(rng, 3)
        self.soft: list[dict[int, torch.Tensor]] = [{} for _ in self.prompts]
        packed = prompts_of(self.prompts, self.prefix)
        if case["soft"]:
            vectors = torch.from_numpy(rng.normal(size=(3, 32)).astype(np.float32))
            self.soft = [{len(self.prefix): vector} for vector in vectors]
            packed = type(packed)(
                token_ids=packed.token_ids,
                offsets=packed.offsets,
                static_prefix=packed.static_prefix,
                soft_positions=packed.offsets[:-1],
                soft_vectors=vectors,
            )
        self.packed = packed
        few = [rng.integers(0, case["items"], rng.integers(0, 4)) for _ in self.prompts]
        self.excluded = Ragged.from_lists(few)
        self.eligibility = None
        if case["segments"]:
            mask = rng.random((2, case["items"])) < 0.6
            self.eligibility = Eligibility(np.asarray([0, 1, 0]), mask)

    def allowed(self, user):
        """Sids that have an item this user may get."""
        items = set(range(self.trie.num_items)) - set(self.excluded.row(user).tolist())
        if self.eligibility is not None:
            mask = self.eligibility.eligible[self.eligibility.segment[user]]
            items &= set(np.flatnonzero(mask).tolist())
        return sorted({int(self.trie.sid_of_item[i]) for i in items})

    def table(self):
        """Scores of every sid by the oracle `[users, S]`."""
        return [
            self.oracle.all_scores(self.prefix + prompt, soft=soft)
            for prompt, soft in zip(self.prompts, self.soft, strict=True)
        ]

    def dead(self):
        eligible = segments = None
        if self.eligibility is not None:
            eligible = EligibleTrie(self.trie, self.eligibility.eligible)
            alive = torch.from_numpy(eligible.alive)
            segments = SegmentMask(alive, torch.from_numpy(self.eligibility.segment))
        dead = dead_nodes(self.trie, self.excluded, self.eligibility, eligible)
        return torch.from_numpy(dead), segments


@given(case=cases())
@settings(max_examples=40, deadline=None)
def test_scores_and_beams_are_the_models_and_nothing_is_invented(model_folder, torch_backend, case):
    it = Together(case, model_folder)
    context = torch_backend.prefill(it.packed, 0)
    everything = Ragged.from_lists([range(it.trie.num_items)] * 3)
    scores, _ = score_in_parts(Decoding(torch_backend, context, it.index), everything, 9)
    want = it.table()
    of_item = it.trie.sid_of_item
    mine = scores.view(3, -1).numpy()
    np.testing.assert_allclose(mine, np.stack(want)[:, of_item], rtol=0, atol=TOLERANCE)

    dead, segments = it.dead()
    k = min(case["k"], it.trie.num_sids)
    widths = (*case["widths"], case["widths"][-1])
    generous = GenerateSettings(width=1, exact=case["exact"], max_width=4096)
    beams, failed, _ = search(
        Decoding(torch_backend, context, it.index),
        generous,
        widths=widths,
        k=k,
        dead=dead if len(dead) else None,
        segments=segments,
    )
    assert not failed.any()
    first_item = it.trie.items[it.trie.first_item[:-1]]
    for user in range(3):
        sids = beams.sid[beams.user == user].tolist()
        got = beams.score[beams.user == user]
        allowed = it.allowed(user)
        assert len(set(sids)) == len(sids), "a duplicate"
        assert set(sids) <= set(allowed), "excluded, not eligible, or invented"
        assert (got == mine[user, first_item[sids]]).all(), "a beam and a candidate, bit for bit"
        kth = got[k - 1] if len(got) == k else -np.inf
        certified = kth > beams.pruned[user] or beams.pruned[user] == -np.inf
        assert certified or not case["exact"], "exact mode certifies everyone"
        if certified:
            best = sorted((want[user][s] for s in allowed), reverse=True)[:k]
            np.testing.assert_allclose(got, best, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("norm", ["full_vocab", "sid_range", "level", "trie"])
def test_an_end_token_shares_the_probability_with_the_longer_ids(norm, model_folder, torch_backend):
    """`<a_0>` and `<a_0><b_1>`: the short one is closed, and together they are at most 1."""
    space = ending_space()
    codes = np.asarray([[0, -1, -1], [0, 1, -1], [2, 3, 5]], dtype=np.int32)
    trie = build_trie(codes, end=EndCodes(space.space.end_codes, every=False))
    index = to_device(trie, space, norm, CPU)
    context = torch_backend.prefill(prompts_of([[1, 2, 3]]), 0)
    candidates = Ragged.from_lists([[0, 1, 2]])
    scores, rows = score_in_parts(Decoding(torch_backend, context, index), candidates, 100)
    oracle = Oracle(model_folder, trie, space, norm)
    want = [oracle.score([1, 2, 3], int(sid)) for sid in trie.sid_of_item]
    np.testing.assert_allclose(scores.numpy(), want, rtol=0, atol=TOLERANCE)
    assert [oracle.tokens(int(s))[-1] == 63 for s in trie.sid_of_item] == [True, False, False]
    total = float(scores.exp().sum())
    assert total <= 1 + 1e-6
    if norm == "trie":
        assert total == pytest.approx(1, abs=1e-5)
