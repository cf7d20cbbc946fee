"""Metrics against trec_eval's own code, and by hand where it has none."""

from __future__ import annotations

import math

import numpy as np
import pytest
import pytrec_eval
from hypothesis import given
from hypothesis import strategies as st

from pipelines.evaluation.metrics import UserTruth, metric_names, self_information, user_metrics
from schemas.requests import Ragged

ITEMS = 30
KS = (1, 3, 5, 10)


@st.composite
def judged_users(draw):
    """Lists, of any length up to 10, and weighted truths, some of whose items are unknown."""
    users = draw(st.integers(1, 6))
    lists, truths = [], []
    for _ in range(users):
        lists.append(draw(st.lists(st.integers(0, ITEMS - 1), max_size=10, unique=True)))
        weights = draw(
            st.dictionaries(st.integers(0, ITEMS - 1), st.integers(1, 5), min_size=1, max_size=20)
        )
        truths.append((weights, draw(st.integers(0, 3))))
    return lists, truths


def measured(lists, truths, ks=KS, information=None):
    """Our figures by name, `[U]` each."""
    rows = np.full((len(lists), max(ks)), -1, dtype=np.int64)
    for row, items in zip(rows, lists, strict=True):
        row[: len(items)] = items
    items = Ragged.from_lists([[*weights, *[-1] * unknown] for weights, unknown in truths])
    weights = [[*w.values(), *[1.0] * unknown] for w, unknown in truths]
    truth = UserTruth(items, np.asarray([x for one in weights for x in one], dtype=np.float64))
    values = user_metrics(rows, truth, ks, information, ITEMS)
    return dict(zip(metric_names(ks), values.T, strict=True))


def by_trec_eval(lists, truths, k):
    """trec_eval's figures of lists cut to k."""
    qrels = {
        str(u): {f"i{i}": w for i, w in weights.items()} | {f"?{n}": 1 for n in range(unknown)}
        for u, (weights, unknown) in enumerate(truths)
    }
    runs = {
        str(u): {f"i{item}": float(-place) for place, item in enumerate(items[:k])}
        for u, items in enumerate(lists)
    }
    names = {f"recall.{k}", f"ndcg_cut.{k}", f"map_cut.{k}", f"success.{k}", "recip_rank"}
    found = pytrec_eval.RelevanceEvaluator(qrels, names).evaluate(runs)
    none = dict.fromkeys((n.replace(".", "_") for n in names), 0.0)
    return [found.get(str(u), none) or none for u in range(len(lists))]


@given(judged_users())
def test_metrics_are_those_of_trec_eval(users):
    lists, truths = users
    ours = measured(lists, truths)
    names = {"recall": "recall_{}", "ndcg": "ndcg_cut_{}", "map": "map_cut_{}"}
    names |= {"hit_rate": "success_{}", "mrr": "recip_rank"}
    for k in KS:
        theirs = by_trec_eval(lists, truths, k)
        for mine, name in names.items():
            expected = [found[name.format(k)] for found in theirs]
            assert ours[f"{mine}@{k}"] == pytest.approx(expected, abs=1e-12), (mine, k)


@given(judged_users())
def test_the_capped_recall_divides_by_what_a_list_can_hold(users):
    lists, truths = users
    ours = measured(lists, truths)
    for k in KS:
        total = np.asarray([len(weights) + unknown for weights, unknown in truths])
        assert ours[f"recall_capped@{k}"] * np.minimum(total, k) == pytest.approx(
            ours[f"recall@{k}"] * total, abs=1e-12
        )
        assert (ours[f"recall_capped@{k}"] <= 1 + 1e-12).all()


def test_a_truth_longer_than_the_list_caps_only_one_of_the_recalls():
    found = measured([[0, 1, 2]], [(dict.fromkeys(range(10), 1), 0)], ks=(3,))
    assert found["recall@3"] == pytest.approx([0.3])
    assert found["recall_capped@3"] == pytest.approx([1.0])
    assert found["ndcg@3"] == pytest.approx([1.0])


def test_the_best_order_of_weighted_items_has_ndcg_one_and_no_other_has():
    weights = {4: 3, 7: 2, 9: 1}
    best = measured([[4, 7, 9]], [(weights, 0)], ks=(3,))["ndcg@3"][0]
    worse = measured([[9, 7, 4]], [(weights, 0)], ks=(3,))["ndcg@3"][0]
    by_hand = (1 + 2 / math.log2(3) + 3 / 2) / (3 + 2 / math.log2(3) + 1 / 2)
    assert best == pytest.approx(1.0, abs=1e-12)
    assert worse == pytest.approx(by_hand, abs=1e-12)


def test_novelty_is_the_mean_self_information_of_what_is_shown():
    popularity = np.zeros(ITEMS)
    popularity[:2] = (61, 7)
    bits = self_information(popularity)
    # 68 interactions and one more for each of 30 items: 62, 8 and 1 of 98.
    assert bits[:3] == pytest.approx([-math.log2(c / 98) for c in (62, 8, 1)], abs=1e-12)
    found = measured([[0, 1, 2], []], [({0: 1}, 0), ({0: 1}, 0)], ks=(2, 3), information=bits)
    assert found["novelty@2"][0] == pytest.approx(bits[:2].mean(), abs=1e-12)
    assert found["novelty@3"][0] == pytest.approx(bits[:3].mean(), abs=1e-12)
    assert np.isnan(found["novelty@3"][1]), "nothing is shown"
