"""Best-first search finds what scoring everything finds: same SIDs, same bits, in every setting."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from engine.backends.fake.backend import FakeBackend
from engine.decoding import Decoding
from engine.generate.beam_search import search_by_beams
from engine.generate.search import search
from engine.search.masks import SegmentMask
from engine.trees.device_trie import to_device
from engine.trees.exclusions import EligibleTrie, dead_nodes
from engine.trees.sid_trie import build_trie
from schemas.requests import Eligibility, Ragged
from schemas.settings import GenerateSettings, QuotaSettings
from tests.factories import bound_space, prompts_of, random_codes

CPU = torch.device("cpu")
NORMS = ("full_vocab", "sid_range", "level", "trie")
QUOTAS = (None, (1, 2), (2, 1))
CASES = list(itertools.product(NORMS, (False, True), QUOTAS))
EVERY = 100_000


class Peaked(FakeBackend):
    """The fake backend with sharper and coarser numbers: many ties, few likely paths."""

    def __init__(self, power: float, step: float) -> None:
        super().__init__()
        self.power, self.step = power, step

    def log_probs(self, context, rows, targets, norm):
        found = super().log_probs(context, rows, targets, norm)
        sharper = -((-found) ** self.power)
        return torch.where(found == 0, found, (sharper / self.step).round() * self.step)


class Work:
    """A random catalog, prompts, and what each prompt may not get."""

    def __init__(self, seed, norm, ragged, quota, backend):
        rng = np.random.default_rng(seed)
        self.trie = build_trie(random_codes(rng, int(rng.integers(5, 300)), ragged=ragged))
        settings = None if quota is None else QuotaSettings(level=quota[0], max_items=quota[1])
        self.index = to_device(self.trie, bound_space(), norm, CPU, settings)
        context = backend.prefill(prompts_of([[seed, user] for user in range(5)]), 0)
        self.decoding = Decoding(backend, context, self.index)
        items = self.trie.num_items
        excluded = Ragged.from_lists(
            np.flatnonzero(rng.random(items) < p).tolist() for p in (0, 0.1, 0.5, 1, 0)
        )
        eligible = rng.random((2, items)) < 0.7
        eligibility = Eligibility(np.asarray([0, 1, 0, 1, 0]), eligible)
        segments = EligibleTrie(self.trie, eligible)
        self.masks = {
            "dead": torch.from_numpy(dead_nodes(self.trie, excluded, eligibility, segments)),
            "segments": SegmentMask(
                torch.from_numpy(segments.alive), torch.from_numpy(eligibility.segment)
            ),
        }
        self.k = min(int(rng.integers(1, 12)), self.trie.num_sids)

    def best_first(self, **settings):
        settings = GenerateSettings(search="best_first", **settings)
        return search(self.decoding, settings, widths=(64, 64), k=self.k, **self.masks)

    def everything(self):
        settings = GenerateSettings(width=EVERY)
        return search_by_beams(
            self.decoding, settings, widths=(EVERY, EVERY), k=self.k, **self.masks
        )


def same(one, other):
    assert one.user.tolist() == other.user.tolist()
    assert one.sid.tolist() == other.sid.tolist()
    assert one.score.tolist() == other.score.tolist()


@pytest.mark.parametrize(("norm", "ragged", "quota"), CASES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [(1.0, 1e-6), (1.3, 0.5), (0.5, 1.0)])
def test_lists_are_those_of_scoring_everything(seed, norm, ragged, quota, shape):
    work = Work(seed, norm, ragged, quota, Peaked(*shape))
    found, failed, took = work.best_first(exact=True)
    want, _, all_nodes = work.everything()
    assert not failed.any()
    assert (found.pruned == -np.inf).all() and not took.stopped.any()
    same(found, want)
    assert (took.nodes <= work.trie.inner_nodes_at[1:].sum()).all()
