"""Bootstrap intervals: what they are about, and what they do not depend on."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import bootstrap

from pipelines.evaluation.resampling import Means, chunks, draw


def estimates(values, *, resamples=2000, seed=0, parts=1):
    means = Means(values.shape[1], resamples)
    for number, part in enumerate(np.array_split(np.arange(len(values)), parts)):
        means.add(values[part], draw(len(part), resamples, [seed, number]))
    return means.estimates()


def test_a_mean_and_its_interval_agree_with_scipys_bootstrap():
    values = np.random.default_rng(1).beta(0.4, 2.0, (700, 1))
    found = estimates(values, parts=7)[0]
    theirs = bootstrap(
        (values[:, 0],), np.mean, n_resamples=2000, method="percentile", random_state=2
    ).confidence_interval
    assert found.value == pytest.approx(values.mean(), abs=1e-12)
    width = theirs.high - theirs.low
    assert found.low == pytest.approx(theirs.low, abs=width / 8)
    assert found.high == pytest.approx(theirs.high, abs=width / 8)


def test_a_seed_gives_the_same_interval_and_another_seed_another():
    values = np.random.default_rng(1).random((50, 2))
    assert estimates(values, seed=4) == estimates(values, seed=4)
    assert estimates(values, seed=4) != estimates(values, seed=5)


def test_users_without_a_metric_do_not_count_in_it():
    values = np.asarray([[1.0], [np.nan], [3.0], [np.nan]])
    assert estimates(values)[0].value == pytest.approx(2.0)
    nobody = estimates(np.full((4, 1), np.nan))[0]
    assert (nobody.value, nobody.low, nobody.high) == (None, None, None)


def test_without_resamples_there_is_no_interval():
    found = estimates(np.ones((3, 1)), resamples=0)[0]
    assert (found.value, found.low, found.high) == (1.0, None, None)


def test_a_difference_is_paired():
    """Users differ a lot and the methods hardly: the difference is sure, the means are not."""
    base = np.random.default_rng(1).random(400)
    values = np.stack([base + 0.01, base], axis=1)
    means = Means(2, 500)
    means.add(values, draw(400, 500, [0]))
    better = means.differences(slice(0, 1), slice(1, 2))[0]
    assert better.value == pytest.approx(0.01)
    assert better.low == pytest.approx(0.01)
    alone = means.estimates()[0]
    assert alone.high - alone.low > 0.03


def test_every_user_is_in_one_chunk():
    parts = chunks(10_000, 5000)
    assert len(parts) > 1
    assert np.concatenate([np.arange(10_000)[part] for part in parts]).tolist() == list(
        range(10_000)
    )
