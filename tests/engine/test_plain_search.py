"""The beam search does what the plain one says: lists, scores, what was dropped, certificates."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from engine.backend import NodeBatch, Targets
from engine.backends.fake.backend import FakeBackend
from engine.decoding import Decoding
from engine.generate.beam_search import search_by_beams as search
from engine.generate.bounds import nodes_per_prompt
from engine.generate.plain import plain_search
from engine.trees.device_trie import to_device
from engine.trees.exclusions import dead_nodes
from engine.trees.sid_trie import build_trie
from schemas.requests import Ragged
from schemas.settings import GenerateSettings, QuotaSettings
from tests.factories import bound_space, prompts_of, random_codes

CPU = torch.device("cpu")
CASES = list(
    itertools.product(
        ("full_vocab", "sid_range", "level", "trie"), (False, True), (None, (1, 2), (2, 1))
    )
)


class Work:
    """A random catalog, prompts, and what each prompt may not get."""

    def __init__(self, seed, norm, ragged, quota):
        rng = np.random.default_rng(seed)
        self.trie = build_trie(random_codes(rng, int(rng.integers(5, 90)), ragged=ragged))
        settings = None if quota is None else QuotaSettings(level=quota[0], max_items=quota[1])
        self.index = to_device(self.trie, bound_space(), norm, CPU, settings)
        self.quota, self.backend = quota, FakeBackend()
        self.prompts = [[seed, user] for user in range(4)]
        self.codes = [tuple(c for c in row if c >= 0) for row in self.trie.codes_of_sid.tolist()]
        excluded = [np.flatnonzero(rng.random(self.trie.num_items) < p) for p in (0, 0.1, 0.5, 1)]
        self.excluded = Ragged.from_lists([e.tolist() for e in excluded])
        self.widths = tuple(int(w) for w in rng.integers(1, 12, size=2))
        self.k = int(rng.integers(1, 9))

    def allowed(self, user):
        items = np.setdiff1d(np.arange(self.trie.num_items), self.excluded.row(user))
        return np.isin(np.arange(self.trie.num_sids), self.trie.sid_of_item[items])

    def log_prob(self, user):
        """log p of a code behind a prefix, read one at a time from a context of its own."""
        known: dict[tuple[int, ...], np.float32] = {}

        def of(prefix, code):
            if (*prefix, code) not in known:
                behind = [c for c in self.codes if c[: len(prefix)] == prefix != c]
                codes = sorted({c[len(prefix)] for c in behind})
                level = len(prefix)
                path = [int(bound_space().token_ids[d][c]) for d, c in enumerate(prefix)]
                context = self.backend.prefill(prompts_of([self.prompts[user]]), 0)
                decoding, row = Decoding(self.backend, context, self.index), 0
                for depth, token in enumerate(path):
                    row = append(decoding, row, token, depth + 1)
                ids = bound_space().token_ids[level].tolist()
                place = self.index.columns[level].token_ids.tolist()
                targets = Targets(
                    row=torch.zeros(len(codes), dtype=torch.int64),
                    column=torch.tensor([place.index(ids[c]) for c in codes]),
                    columns=self.index.columns[level],
                )
                found = decoding.log_probs(torch.tensor([row]), targets, self.index.norms[level])
                known.update({(*prefix, c): p for c, p in zip(codes, found.numpy(), strict=True)})
            return known[(*prefix, code)]

        return of


def append(decoding, row, token, depth):
    at = decoding.context.num_rows
    decoding.extend(
        NodeBatch(
            prompt=torch.tensor([0]), parent=torch.tensor([row]), token=torch.tensor([token]),
            depth=torch.tensor([depth]), slot=torch.tensor([0]), num_slots=1, max_depth=depth,
        )
    )  # fmt: skip
    return at


@pytest.mark.parametrize(("norm", "ragged", "quota"), CASES)
@pytest.mark.parametrize("seed", range(4))
def test_the_search_is_the_plain_one(seed, norm, ragged, quota):
    work = Work(seed, norm, ragged, quota)
    context = work.backend.prefill(prompts_of(work.prompts), 0)
    dead = torch.from_numpy(dead_nodes(work.trie, work.excluded))
    found, failed, took = search(
        Decoding(work.backend, context, work.index),
        GenerateSettings(width=max(work.widths)),
        widths=work.widths,
        k=min(work.k, work.trie.num_sids),
        dead=dead,
    )
    assert not failed.any()
    assert (took.nodes <= nodes_per_prompt(work.trie, work.widths)).all()
    for user in range(len(work.prompts)):
        want = plain_search(
            work.log_prob(user),
            work.codes,
            widths=work.widths,
            k=min(work.k, work.trie.num_sids),
            allowed=work.allowed(user),
            quota=quota,
        )
        mine = found.user == user
        assert found.sid[mine].tolist() == want.sids
        assert found.score[mine].tolist() == want.scores
        assert float(found.pruned[user]) == want.pruned


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("norm", ["full_vocab", "trie"])
@pytest.mark.parametrize("seed", range(6))
def test_what_the_plain_search_calls_exact_is_the_best_of_all(seed, norm, ragged):
    work = Work(seed, norm, ragged, None)
    allowed, log_prob = work.allowed(1), work.log_prob(1)
    found = plain_search(log_prob, work.codes, widths=work.widths, k=work.k, allowed=allowed)
    everything = (10_000, 10_000)
    whole = plain_search(log_prob, work.codes, widths=everything, k=work.k, allowed=allowed)
    assert whole.exact and whole.pruned == -math.inf
    if found.exact:
        assert (found.sids, found.scores) == (whole.sids, whole.scores)
    assert found.scores == [] or found.scores[0] <= whole.scores[0]
