"""What a report measures, against the plain definitions."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from pipelines.report.distributions import in_bars, of_integers, of_numbers, of_shares
from pipelines.report.exposure import gini, top_share


def test_gini_is_the_mean_difference_over_twice_the_mean():
    rng = np.random.default_rng(0)
    counts = np.sort(rng.geometric(0.05, 300) - 1)
    differences = np.abs(counts[:, None] - counts[None, :]).mean()
    assert gini(counts) == pytest.approx(differences / (2 * counts.mean()), abs=1e-12)
    assert gini(np.array([5, 5, 5, 5])) == 0
    assert gini(np.array([0, 0, 0, 8])) == pytest.approx(0.75)
    assert gini(np.array([0, 0])) is None


@pytest.mark.parametrize(("num", "most"), [(1, 1), (99, 1), (100, 1), (101, 2), (1000, 10)])
def test_the_top_percent_is_at_least_one_item(num, most):
    counts = np.arange(num) + 1
    assert top_share(counts) == pytest.approx(counts[-most:].sum() / counts.sum())
    assert top_share(np.zeros(num, dtype=np.int64)) is None


@pytest.mark.parametrize("seed", range(4))
def test_a_distribution_of_numbers_counts_every_value(seed):
    rng = np.random.default_rng(seed)
    values = -rng.gamma(2.0, 3.0, 5000)
    values[0] = -400.0  # an outlier takes no room: it is in the first bar
    frame = pl.LazyFrame({"x": [*values.tolist(), None]})
    found = of_numbers(frame, "x")
    assert found.total == 5000
    assert len(found.counts) <= 40
    assert found.edges[0] > -60
    edges = np.asarray(found.edges)
    want = np.histogram(np.clip(values, edges[0], None), edges)[0]
    assert np.abs(want - found.counts).sum() <= 10  # values on an edge, to a rounding
    for name, share in (("p5", 0.05), ("p50", 0.5), ("p95", 0.95)):
        assert getattr(found, name) == pytest.approx(np.quantile(values, share), abs=400 / 4000)
    assert (found.low, found.high) == (values.min(), values.max())
    same = in_bars(frame.drop_nulls(), "x", found.edges)
    assert np.abs(np.asarray(same) - found.counts).sum() <= 10
    assert sum(in_bars(pl.LazyFrame({"x": [-1e9, 1e9]}), "x", found.edges)) == 2


def test_one_value_and_none_have_a_distribution_or_not():
    one = of_numbers(pl.LazyFrame({"x": [2.5, 2.5]}), "x")
    assert (one.total, one.p5, one.p50, one.p95) == (2, 2.5, 2.5, 2.5)
    assert of_numbers(pl.LazyFrame({"x": pl.Series([None], dtype=pl.Float32)}), "x") is None
    assert of_integers(np.array([], dtype=np.int64), np.array([], dtype=np.int64)) is None
    assert of_shares(np.array([]), 10) is None


def test_whole_numbers_keep_their_counts_and_quantiles():
    values = np.random.default_rng(1).integers(3, 200, 1000)
    number, counts = np.unique(values, return_counts=True)
    order = np.random.default_rng(2).permutation(len(number))  # groups come in any order
    found = of_integers(number[order], counts[order])
    assert found.total == 1000
    edges = np.asarray(found.edges)
    assert list(found.counts) == np.histogram(values, edges)[0].tolist()
    assert found.p50 == np.quantile(values, 0.5, method="inverted_cdf")


def test_shares_fall_around_their_steps():
    found = of_shares(np.array([0.0, 0.2, 0.2, 1.0, 0.41]), 5)
    assert found.counts == (1, 2, 1, 0, 0, 1)
    assert found.p50 == 0.2
