"""Baselines against a search through the whole catalog, user by user."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.trees.sid_trie import build_trie
from pipelines.catalog.build import Catalog
from pipelines.evaluation.baselines import pools, popular, random, reachable
from schemas.requests import CandidateSets, Eligibility, Ragged, UserBatch
from schemas.settings import TaskSettings

ITEMS = 14
WIDTH = 5
GENERATE = TaskSettings(generate={})
SCORE = TaskSettings(score={})
CATALOG = Catalog(
    pa.table({"item_id": [f"i{i:02d}" for i in range(ITEMS)]}),
    build_trie(np.arange(ITEMS, dtype=np.int32)[:, None]),
)

item_sets = st.lists(st.integers(0, ITEMS - 1), unique=True, max_size=ITEMS)


@st.composite
def batches(draw):
    """Users with exclusions, maybe eligibility, and maybe candidates of one kind or the other."""
    users = draw(st.integers(1, 5))
    excluded = [draw(item_sets) for _ in range(users)]
    eligibility = None
    if draw(st.booleans()):
        mask = draw(st.lists(st.booleans(), min_size=2 * ITEMS, max_size=2 * ITEMS))
        segment = draw(st.lists(st.integers(0, 1), min_size=users, max_size=users))
        eligibility = Eligibility(np.asarray(segment), np.asarray(mask).reshape(2, ITEMS))
    sets = [draw(item_sets) for _ in range(users)]
    kind = draw(st.sampled_from(["generate", "own", "shared"]))
    allowed = [set(range(ITEMS))] * users
    candidates = None
    if kind == "shared":
        of_user = np.asarray(
            draw(st.lists(st.integers(0, users - 1), min_size=users, max_size=users))
        )
        candidates = CandidateSets(
            Ragged.from_lists(sets), of_user, np.zeros(users, dtype=np.int64), shared=True
        )
        allowed = [set(sets[g]) for g in of_user]
    elif kind == "own":
        allowed = [set(s) for s in sets]
    for u in range(users):
        allowed[u] = allowed[u] - set(excluded[u])
        if eligibility is not None:
            allowed[u] &= set(np.flatnonzero(eligibility.eligible[eligibility.segment[u]]).tolist())
    if kind == "own":  # those are clean when they are read
        order = draw(st.randoms())
        lists = [order.sample(sorted(a), len(a)) for a in allowed]
        candidates = CandidateSets.own(Ragged.from_lists(lists))
    batch = UserBatch(
        num_users=users,
        candidates=candidates,
        excluded=Ragged.from_lists(excluded),
        eligibility=eligibility,
    )
    k = np.asarray(draw(st.lists(st.integers(1, WIDTH), min_size=users, max_size=users)))
    return batch, (GENERATE if kind == "generate" else SCORE), allowed, k


@given(batches(), st.permutations(range(ITEMS)), st.integers(0, 5))
def test_both_baselines_choose_among_what_a_user_could_have_got(found, order, seed):
    batch, task, allowed, k = found
    seen = []
    for pool in pools(batch, CATALOG, task, np.asarray(order)):
        best = popular(pool, k[pool.users], WIDTH)
        any_ = random(pool, k[pool.users], WIDTH, np.random.default_rng(seed))
        for row, user in enumerate(pool.users):
            wanted = [i for i in order if i in allowed[user]][: k[user]]
            assert best[row].tolist() == wanted + [-1] * (WIDTH - len(wanted))
            drawn = [i for i in any_[row].tolist() if i >= 0]
            assert len(set(drawn)) == len(drawn) == len(wanted)
            assert set(drawn) <= allowed[user]
            assert any_[row, len(drawn) :].tolist() == [-1] * (WIDTH - len(drawn))
            items = np.arange(ITEMS)
            could = reachable(pool, np.full(ITEMS, row), items, ITEMS)
            assert set(items[could].tolist()) == allowed[user]
        seen += pool.users.tolist()
    assert sorted(seen) == list(range(batch.num_users)), "every user is in one pool"


def test_random_lists_hold_every_item_at_every_place_about_equally_often():
    users = 6000
    excluded = Ragged.from_lists([[2, 5, 9]] * users)
    batch = UserBatch(num_users=users, excluded=excluded)
    (pool,) = pools(batch, CATALOG, GENERATE, np.arange(ITEMS))
    lists = random(pool, np.full(users, 4), WIDTH, np.random.default_rng(3))
    allowed = sorted(set(range(ITEMS)) - {2, 5, 9})
    for place in range(4):
        counts = Counter(lists[:, place].tolist())
        assert sorted(counts) == allowed
        expected = users / len(allowed)  # a standard deviation is 22
        assert all(abs(count - expected) < 110 for count in counts.values())
    assert (lists[:, 4] == -1).all()


@pytest.mark.parametrize("task", [GENERATE, SCORE])
def test_nobody_left_is_no_pool_of_anybody(task):
    batch = UserBatch(
        num_users=0,
        candidates=CandidateSets.own(Ragged.empty(0)),
        excluded=Ragged.empty(0),
    )
    assert sum(len(pool.users) for pool in pools(batch, CATALOG, task, np.arange(ITEMS))) == 0
