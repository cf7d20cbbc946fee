"""Agreement of lists against slow definitions and scipy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau

from pipelines.evaluation.agreement import CommonItems

a_list = st.lists(st.integers(0, 12), min_size=1, max_size=9, unique=True)
some_lists = st.lists(st.tuples(a_list, a_list), min_size=1, max_size=5)


def common(pairs, scores=None) -> CommonItems:
    """The common items of pairs of lists; by default an item's score is minus its rank."""
    rows = [
        (u, a.index(item) + 1, b.index(item) + 1, item)
        for u, (a, b) in enumerate(pairs)
        for item in a
        if item in b
    ]
    user, rank_a, rank_b, item = np.asarray(rows, dtype=np.int64).reshape(-1, 4).T
    score = (lambda side, rank: -rank.astype(np.float64)) if scores is None else scores
    return CommonItems(
        length_a=np.asarray([len(a) for a, _ in pairs]),
        length_b=np.asarray([len(b) for _, b in pairs]),
        user=user,
        rank_a=rank_a,
        rank_b=rank_b,
        score_a=score("a", rank_a),
        score_b=score("b", rank_b),
    )


def slow_rbo(a: list[int], b: list[int], p: float) -> float:
    """The infinite sum (1 - p) p^(d-1) A_d, its first 3000 terms.

    Beyond the end of the shorter list each of its missing places is taken to agree as the places it
    has do; beyond both lists the agreement stays what it was.
    """
    short, long = sorted((a, b), key=len)
    total, agreement = 0.0, 0.0
    at_end = len(set(short) & set(long[: len(short)])) / len(short)
    for depth in range(1, 3001):
        if depth <= len(long):
            seen = len(set(short[:depth]) & set(long[:depth]))
            assumed = max(0, depth - len(short)) * at_end
            agreement = (seen + assumed) / depth
        total += (1 - p) * p ** (depth - 1) * agreement
    return total


@given(some_lists, st.floats(0.3, 0.97))
def test_rank_biased_overlap_is_the_infinite_sum(pairs, p):
    expected = [slow_rbo(a, b, p) for a, b in pairs]
    assert common(pairs).rbo(p) == pytest.approx(expected, abs=1e-12)


def test_rank_biased_overlap_by_hand():
    # Agreement 0, 1/2, 2/3 and 2/3 ever after, halved at each depth.
    found = common([([1, 2, 3], [2, 4, 1])]).rbo(0.5)[0]
    by_hand = 0.5 * (0 + 0.5 * (1 / 2) + 0.25 * (2 / 3)) + 0.125 * (2 / 3)
    assert found == pytest.approx(by_hand, abs=1e-12)


@given(some_lists, st.integers(1, 9))
def test_overlap_is_what_the_first_k_share(pairs, k):
    expected = [len(set(a[:k]) & set(b[:k])) / max(len(a[:k]), len(b[:k])) for a, b in pairs]
    assert common(pairs).overlap(k) == pytest.approx(expected, abs=1e-12)


@given(some_lists, st.integers(1, 4), st.integers(1, 4))
def test_tau_is_scipys_with_ties_on_both_sides(pairs, tie_a, tie_b):
    ties = {"a": tie_a, "b": tie_b}
    found = common(pairs, lambda side, rank: -(rank // ties[side]).astype(np.float64))
    for user, tau in enumerate(found.tau()):
        mine = found.user == user
        a, b = found.score_a[mine], found.score_b[mine]
        tied = len(a) < 2 or len(set(a)) == 1 or len(set(b)) == 1
        assert np.isnan(tau) if tied else tau == pytest.approx(kendalltau(a, b)[0], abs=1e-12)


def test_tau_of_users_with_very_different_numbers_of_common_items():
    rng = np.random.default_rng(0)
    pairs = [
        (rng.permutation(n).tolist(), rng.permutation(n).tolist()) for n in (3, 700, 2, 1, 2300, 40)
    ]
    expected = [
        np.nan if len(a) < 2 else kendalltau([a.index(i) for i in a], [b.index(i) for i in a])[0]
        for a, b in pairs
    ]
    assert common(pairs).tau() == pytest.approx(expected, abs=1e-12, nan_ok=True)


@given(some_lists)
def test_lists_agree_fully_with_themselves(pairs):
    same = common([(a, a) for a, _ in pairs])
    assert same.rbo(0.9) == pytest.approx(1.0, abs=1e-12)
    assert (same.overlap(5) == 1).all()
    assert same.same_list().all()
    assert np.nan_to_num(same.tau(), nan=1.0) == pytest.approx(1.0, abs=1e-12)


def test_the_same_items_in_another_order_or_a_longer_list_are_not_the_same_list():
    pairs = [([1, 2], [2, 1]), ([1, 2], [1, 2, 3]), ([1, 2], [1, 2])]
    assert common(pairs).same_list().tolist() == [False, False, True]
