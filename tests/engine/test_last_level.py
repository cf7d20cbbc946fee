"""The last level of a beam search is read in parts, and only as far as it can matter: what comes
back is what a whole reading gives.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.backend import Targets
from engine.backends.fake.backend import FakeBackend
from engine.decoding import Decoding
from engine.generate.beam_search import beam_search
from engine.search.masks import SegmentMask
from engine.trees.device_trie import to_device
from engine.trees.sid_trie import build_trie
from schemas.settings import QuotaSettings
from tests.factories import bound_space, prompts_of, random_codes, random_prompts

CPU = torch.device("cpu")
SIZES = (16, 16, 8)
NUM_USERS = 9
NORMS = pytest.mark.parametrize("norm", ["full_vocab", "sid_range", "level", "trie"])


class Steep(FakeBackend):
    """Each token is likely or very unlikely, as with a trained model."""

    def log_probs(self, context, rows, targets, norm):
        got = super().log_probs(context, rows, targets, norm)
        if norm.kind == "trie":
            return got
        size = self.facts.vocab_size if norm.columns is None else len(norm.columns.token_ids)
        return (2 * (got + math.log(size))).clamp(max=0.0)  # of a uniform number in (0, 1)


class Search:
    """Beams of several users, read whole or in parts."""

    def __init__(self, monkeypatch, trie, norm="full_vocab", quota=None, sizes=SIZES):
        self.monkeypatch, self.trie = monkeypatch, trie
        self.index = to_device(trie, bound_space(sizes), norm, CPU, quota)
        rng = np.random.default_rng(3)
        self.prompts = random_prompts(rng, NUM_USERS, longest=12)

    def __call__(self, backend, *, least, k=4, width=64, users=None, **masks):
        self.monkeypatch.setattr("engine.generate.beam_search._LEAST_ROWS", {"cpu": least})
        context = backend.prefill(prompts_of(self.prompts), 0)
        users = torch.arange(NUM_USERS) if users is None else users
        widths = (width,) * self.trie.depth
        return beam_search(
            Decoding(backend, context, self.index), prompts=users, widths=widths, k=k, **masks
        )

    def both(self, backend, **how):
        """Read whole, and in the smallest parts."""
        return self(backend, least=1 << 20, **how), self(backend, least=1, **how)


def same(one, other):
    for name in ("sid", "score", "pruned", "legal_mass", "failed"):
        a, b = getattr(one, name), getattr(other, name)
        assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)), name


@NORMS
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("quota", [None, QuotaSettings(level=1, max_items=2)], ids=["", "quota"])
def test_parts_give_what_a_whole_reading_gives(monkeypatch, norm, ragged, quota):
    rng = np.random.default_rng(1)
    trie = build_trie(random_codes(rng, 900, SIZES, ragged=ragged))
    search = Search(monkeypatch, trie, norm, quota)
    alive = torch.from_numpy(rng.random((2, trie.num_nodes)) < 0.9)
    alive[:, 0] = True
    masks = {
        "dead": torch.arange(5, NUM_USERS * trie.num_nodes, 13),
        "segments": SegmentMask(alive, torch.arange(NUM_USERS) % 2),
    }
    for k in (1, 4, 20, 2000):
        whole, parts = search.both(Steep(), k=k, **masks)
        same(whole, parts)
        assert (parts.nodes <= whole.nodes).all()
    whole, parts = search.both(Steep(), **masks)
    assert parts.nodes.sum() < 0.8 * whole.nodes.sum(), "most prefixes cannot reach the results"


def test_the_model_gives_the_same_bits_in_parts(monkeypatch, torch_backend):
    trie = build_trie(random_codes(np.random.default_rng(1), 300))
    search = Search(monkeypatch, trie, "trie", sizes=(5, 4, 6))
    whole, parts = search.both(torch_backend, k=2)
    same(whole, parts)
    assert parts.nodes.sum() < whole.nodes.sum()


def test_a_users_parts_do_not_depend_on_who_is_searched_beside_it(monkeypatch):
    trie = build_trie(random_codes(np.random.default_rng(1), 900, SIZES))
    search = Search(monkeypatch, trie)
    together = search(Steep(), least=1)
    for user in range(NUM_USERS):
        alone = search(Steep(), least=1, users=torch.tensor([user]))
        assert torch.equal(alone.sid[0], together.sid[user])
        assert torch.equal(alone.score[0], together.score[user])
        assert alone.nodes[0] == together.nodes[user]


class Table(FakeBackend):
    """Log-probabilities by level, first code and code; what a test writes into them."""

    def __init__(self, index, first, second):
        super().__init__()
        self._first, self._second, self._index = first, second, index
        self._code = []

    def prefill(self, prompts, max_nodes):
        self._code = [-1] * prompts.num_prompts
        return super().prefill(prompts, max_nodes)

    def extend(self, context, nodes):
        tokens = self._index.token_ids[0].tolist()
        self._code += [tokens.index(t) if t in tokens else 0 for t in nodes.token.tolist()]
        super().extend(context, nodes)

    def log_probs(self, context, rows, targets: Targets, norm):
        code = torch.tensor(self._code)[rows[targets.row]]
        return torch.where(
            code < 0,
            self._first[targets.column.clamp(max=len(self._first) - 1)],
            self._second[code],
        )


def two_levels(monkeypatch, codes):
    """Items (a, 0) for some first codes a of 48."""
    trie = build_trie(np.asarray([[a, 0] for a in codes], dtype=np.int32))
    return Search(monkeypatch, trie, sizes=(48, 2))


def test_a_prefix_that_can_only_tie_is_read_because_the_smaller_id_wins(monkeypatch):
    search = two_levels(monkeypatch, range(40))
    first, second = torch.full((48,), -3.0), torch.zeros(48)
    first[20:36], second[20:36] = -1.0, -2.0  # a part of better prefixes, whose items score -3 too
    backend = Table(search.index, first, second)
    whole, parts = search.both(backend, k=5)
    same(whole, parts)
    assert (parts.score == -3).all() and parts.sid.tolist() == [[0, 1, 2, 3, 4]] * NUM_USERS


@pytest.mark.parametrize("score,fails", [(-2.0, True), (-5.0, False)])
def test_a_nan_fails_a_user_whose_results_it_could_have_changed(monkeypatch, score, fails):
    """Whatever the parts: a prefix that cannot reach the results is as if it were not there."""
    search = two_levels(monkeypatch, range(40))
    first, second = torch.full((48,), -1.0), torch.full((48,), -2.0)
    first[7], second[7] = score, torch.nan
    whole, parts = search.both(Table(search.index, first, second), k=3)
    same(whole, parts)
    assert parts.failed.tolist() == [fails] * NUM_USERS
    assert (parts.score == -3).all()


def test_an_engine_that_sends_prompts_again_reads_the_last_level_at_once(monkeypatch):
    class Resending(Steep):
        @property
        def facts(self):
            return replace(super().facts, stateless=True)

    trie = build_trie(random_codes(np.random.default_rng(1), 900, SIZES))
    search = Search(monkeypatch, trie)
    assert search(Resending(), least=1).nodes.sum() == search(Steep(), least=1 << 20).nodes.sum()
