"""Best-first search finds what scoring everything finds: same SIDs, same bits, in every setting."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.fake.backend import FakeBackend
from engine.decoding import Decoding
from engine.generate.beam_search import search_by_beams
from engine.generate.search import search
from engine.scoring.items import score_in_parts
from engine.scoring.ranking import rank_candidates
from engine.search.best_first import Bounds
from engine.search.masks import SegmentMask
from engine.trees.candidate_trees import kth_of_candidates
from engine.trees.device_trie import to_device
from engine.trees.exclusions import EligibleTrie, dead_nodes
from engine.trees.sid_trie import build_trie
from engine.trees.token_tree import build_token_tree
from schemas.requests import UNSCORED, Eligibility, ItemScores, Ragged
from schemas.settings import GenerateSettings, QuotaSettings
from tests.factories import bound_space, prompts_of, random_codes

CPU = torch.device("cpu")
NORMS = ("full_vocab", "sid_range", "level", "trie")
QUOTAS = (None, (1, 2), (2, 1))
SIZES = [(40, 12, 8), (5, 4, 6), (6, 5, 4, 3)]
SHAPES = [(1.0, 1e-6), (4.0, 0.5), (0.2, 0.25)]  # as random, peaked, flat; with ties
VOCABULARY = 1 << 20  # of the fake backend
CASES = list(itertools.product(NORMS, (False, True), QUOTAS))
EVERY = 100_000


class Peaked(FakeBackend):
    """The fake backend with sharper and coarser numbers: many ties, few likely paths."""

    def __init__(self, power: float, step: float) -> None:
        super().__init__()
        self.power, self.step = power, step

    def log_probs(self, context, rows, targets, norm):
        found = super().log_probs(context, rows, targets, norm)
        size = VOCABULARY if norm.kind == "full_vocab" else 1
        if norm.columns is not None:
            size = len(norm.columns.token_ids)
        sharper = (found + math.log(size)).clamp(max=0.0) * self.power
        return (sharper / self.step).round() * self.step


class Work:
    """A random catalog, prompts, and what each prompt may not get."""

    def __init__(self, seed, norm, ragged, quota, backend, *, items=None, k=None, only=None):
        rng = np.random.default_rng(seed)
        many = int(rng.integers(5, 300)) if items is None else items
        space = bound_space(sizes := SIZES[seed % len(SIZES)])
        self.trie = build_trie(random_codes(rng, many, sizes, ragged=ragged))
        limit = None if quota is None else QuotaSettings(level=quota[0], max_items=quota[1])
        self.index = to_device(self.trie, space, norm, CPU, limit)
        users = np.arange(5) if only is None else np.asarray([only])
        context = backend.prefill(prompts_of([[seed, int(user)] for user in users]), 0)
        self.decoding = Decoding(backend, context, self.index)
        items = self.trie.num_items
        excluded = Ragged.from_lists(
            np.flatnonzero(rng.random(items) < p).tolist() for p in (0, 0.1, 0.5, 1, 0)
        )
        excluded = excluded.take(users)
        self.many = [0, 1, 4] if only is None else [0]  # users with most of the catalog left
        eligible = rng.random((2, items)) < 0.7
        eligibility = Eligibility(np.asarray([0, 1, 0, 1, 0])[users], eligible)
        segments = EligibleTrie(self.trie, eligible)
        self.masks = {
            "dead": torch.from_numpy(dead_nodes(self.trie, excluded, eligibility, segments)),
            "segments": SegmentMask(
                torch.from_numpy(segments.alive), torch.from_numpy(eligibility.segment)
            ),
        }
        self.k = min(int(rng.integers(1, 12)) if k is None else k, self.trie.num_sids)

    def best_first(self, bounds=None, **given_settings):
        how = GenerateSettings(**{"search": "best_first", **given_settings})
        widths = (how.width,) * self.trie.depth
        return search(self.decoding, how, widths=widths, k=self.k, bounds=bounds, **self.masks)

    def by_beams(self, width):
        widths = (width,) * self.trie.depth
        how = GenerateSettings(width=min(width, 4096))
        return search_by_beams(self.decoding, how, widths=widths, k=self.k, **self.masks)

    def everything(self):
        return self.by_beams(EVERY)


def same_or_uncertified(found, want, k):
    for user in range(len(found.pruned)):
        mine, theirs = (one.score[one.user == user] for one in (found, want))
        kth = mine[-1] if len(mine) == k else -np.inf
        if kth > found.pruned[user] or found.pruned[user] == -np.inf:
            assert mine.tolist() == theirs.tolist()


def same(one, other):
    assert one.user.tolist() == other.user.tolist()
    assert one.sid.tolist() == other.sid.tolist()
    assert one.score.tolist() == other.score.tolist()


@pytest.mark.parametrize(("norm", "ragged", "quota"), CASES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
def test_lists_are_those_of_scoring_everything(seed, norm, ragged, quota, shape):
    work = Work(seed, norm, ragged, quota, Peaked(*shape))
    found, failed, took = work.best_first(exact=True)
    want, _, _ = work.everything()
    assert not failed.any() and not took.stopped.any()
    assert (found.pruned == -np.inf).all()
    same(found, want)
    assert (took.nodes <= work.trie.inner_nodes_at[1:].sum()).all()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.sampled_from(CASES),
    st.sampled_from(SHAPES),
    st.integers(1, 60),
    st.sampled_from(["auto", "best_first"]),
)
def test_with_any_budget_a_list_is_exact_or_says_that_it_may_not_be(
    seed, case, shape, budget, name
):
    work = Work(seed, *case, Peaked(*shape))
    found, failed, took = work.best_first(search=name, max_positions=budget, width=4)
    want, _, _ = work.everything()
    assert not failed.any()
    levels = work.trie.depth - 1
    assert (took.nodes <= max(budget, levels)).all()
    for user in range(work.decoding.num_prompts):
        mine, theirs = (one.score[one.user == user] for one in (found, want))
        assert len(mine) <= len(theirs) and (mine <= theirs[: len(mine)]).all()
        kth = mine[-1] if len(mine) == work.k else -np.inf
        if kth > found.pruned[user] or found.pruned[user] == -np.inf:
            assert mine.tolist() == theirs.tolist()
            sids = [one.sid[one.user == user].tolist() for one in (found, want)]
            assert sids[0] == sids[1]
        else:
            assert took.stopped[user]


def test_what_a_prompt_gets_does_not_hang_on_who_shares_its_pass():
    for budget in (None, 24):
        work = Work(3, "full_vocab", False, None, Peaked(1.0, 1e-6))
        found, _, took = work.best_first(search="best_first", max_positions=budget)
        for user in range(work.decoding.num_prompts):
            alone = Work(3, "full_vocab", False, None, Peaked(1.0, 1e-6), only=user)
            mine, _, took_alone = alone.best_first(search="best_first", max_positions=budget)
            assert found.sid[found.user == user].tolist() == mine.sid.tolist()
            assert took.nodes[user] == took_alone.nodes[0]


def test_a_flat_model_ends_as_the_beam_and_forwards_no_more():
    work = Work(0, "full_vocab", False, None, FakeBackend(), items=3000, k=10)
    found, _, took = work.best_first(search="auto", width=4)
    beams, _, by_beams = work.by_beams(width=4)
    assert took.stopped[work.many].all()
    assert (found.pruned[work.many] > -np.inf).all()
    assert took.nodes.max() <= 2 * 16 + 2 * 16  # two rounds, and two levels of at least as many
    best = [one.score[one.user == 0].sum() for one in (found, beams)]
    assert best[0] >= best[1] - 1e-4, "at least as good as the beam"


def test_a_full_frontier_is_remembered(monkeypatch):
    monkeypatch.setattr("engine.search.best_first._MOST_OPEN", 8)
    work = Work(3, "full_vocab", False, None, FakeBackend(), items=2000, k=10)
    found, _, _ = work.best_first(search="best_first", exact=True)
    assert (found.pruned > -np.inf).any()
    same_or_uncertified(found, work.everything()[0], work.k)


class Broken(Peaked):
    """NaN, or probability 0, for one token of the first level."""

    def __init__(self, value, token):
        super().__init__(4.0, 0.5)
        self.value, self.token = value, token

    def log_probs(self, context, rows, targets, norm):
        found = super().log_probs(context, rows, targets, norm)
        token = torch.from_numpy(targets.columns.token_ids)[targets.column]
        return torch.where(token == self.token, self.value, found)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_nan_fails_only_whom_it_could_have_changed(level):
    token = int(bound_space().token_ids[level][1])
    broken = Work(4, "full_vocab", False, None, Broken(torch.nan, token), items=250, k=3)
    whole = Work(4, "full_vocab", False, None, Peaked(4.0, 0.5), items=250, k=3)
    found, failed, _ = broken.best_first(exact=True)
    want, _, _ = whole.everything()
    if level == 0:
        assert failed.all()  # it stands at the prompt's end
    for user in np.flatnonzero(~failed):
        sids = want.sid[want.user == user]
        without = [sid for sid in sids if whole.trie.codes_of_sid[sid][level] != 1]
        assert found.sid[found.user == user].tolist()[: len(without)] == without


def test_probability_zero_makes_a_short_list_inexact_and_an_empty_one_fail():
    tokens = bound_space().token_ids[0]

    class Nothing(FakeBackend):
        def log_probs(self, context, rows, targets, norm):
            found = super().log_probs(context, rows, targets, norm)
            token = torch.from_numpy(targets.columns.token_ids)[targets.column]
            first = torch.isin(token, torch.from_numpy(tokens[self.least :]))
            return torch.where(first, -torch.inf, found)

    Nothing.least = 0
    _, failed, _ = Work(1, "full_vocab", False, None, Nothing(), items=40, k=4).best_first()
    assert failed[0] and failed[4]
    assert not failed[3], "everything is excluded: nothing eligible, and that is no failure"
    Nothing.least = 1
    work = Work(1, "full_vocab", False, None, Nothing(), items=40, k=38)
    found, failed, _ = work.best_first()
    assert not failed[0] and 0 < (found.user == 0).sum() < 38
    assert found.pruned[0] == UNSCORED


def test_each_user_is_searched_for_as_many_as_it_wants():
    work = Work(9, "full_vocab", False, (1, 3), Peaked(4.0, 0.5), items=300, k=12)
    want, _, took = work.everything()
    k_of = torch.tensor([1, 2, 12, 5, 3])
    found, failed, less = work.best_first(exact=True, bounds=Bounds(k_of=k_of))
    assert not failed.any() and less.nodes.sum() < took.nodes.sum()
    _, _, all_of_them = work.best_first(exact=True)
    assert (less.nodes <= all_of_them.nodes).all() and less.nodes[0] < all_of_them.nodes[0]
    for user, k in enumerate(k_of.tolist()):
        mine, theirs = (one.sid[one.user == user].tolist()[:k] for one in (found, want))
        assert mine == theirs


# --- ranking --------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from(CASES), st.sampled_from(SHAPES))
def test_the_best_candidates_are_those_of_scoring_all(seed, case, shape):
    work = Work(seed, *case, Peaked(*shape))
    rng = np.random.default_rng(seed)
    items = work.trie.num_items
    lists = Ragged.from_lists(
        rng.choice(items, size=int(rng.integers(0, items)), replace=False).tolist()
        for _ in range(work.decoding.num_prompts)
    )
    tree = build_token_tree(work.trie, lists)
    with work.decoding.temporary():
        scores, nodes = score_in_parts(work.decoding, lists, 1 << 20, tree=tree)
    found = rank_candidates(work.decoding, lists, tree, k=work.k, max_nodes=1 << 20)
    assert not found.failed.any()
    assert (found.work.nodes <= nodes).all()
    every = ItemScores(user=lists.row_ids, item=lists.values, score=scores.numpy())
    kth = kth_of_candidates(work.index, every, np.full(lists.num_rows, work.k))
    for user in range(lists.num_rows):
        mine = found.scored.user == user
        got = dict(zip(found.scored.item[mine], found.scored.score[mine], strict=True))
        theirs = every.user == user
        want = dict(zip(every.item[theirs], every.score[theirs], strict=True))
        assert {item: want[item] for item in got} == got, "to the bit"
        lacking = [score for item, score in want.items() if item not in got]
        if case[2] is None and lacking and got:
            assert max(lacking) <= min(got.values())
        sids = {int(work.trie.sid_of_item[item]) for item in got}
        assert len(sids) <= work.k
        if len(sids) == work.k:
            assert min(got.values()) == kth[user]
        else:
            assert kth[user] == -np.inf


def test_ranking_that_needs_too_much_memory_leaves_nothing_behind():
    work = Work(6, "full_vocab", False, None, FakeBackend(), items=300, k=5)
    lists = Ragged.from_lists([list(range(300))] * work.decoding.num_prompts)
    tree = build_token_tree(work.trie, lists)
    before = work.decoding.context.num_rows
    assert rank_candidates(work.decoding, lists, tree, k=5, max_nodes=100) is None
    assert work.decoding.context.num_rows == before


def test_candidates_before_a_search_spare_it_what_is_below_them():
    work = Work(9, "full_vocab", False, None, Peaked(4.0, 0.5), items=300, k=5)
    plain, _, took = work.best_first(exact=True)
    kth = np.full(work.decoding.num_prompts, -np.inf, dtype=np.float32)
    kth[0] = plain.score[plain.user == 0][2]
    found, failed, less = work.best_first(exact=True, bounds=Bounds(floor=torch.from_numpy(kth)))
    assert not failed.any() and less.nodes[0] <= took.nodes[0]
    mine, all_of_it = (one.sid[one.user == 0].tolist() for one in (found, plain))
    enough = plain.score[plain.user == 0] >= kth[0]
    assert mine[: enough.sum()] == all_of_it[: enough.sum()]
