from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.shards.profile import overlap, score_drift


def lists(**users):
    rows = [(user, item) for user, items in users.items() for item in items]
    return pl.DataFrame(rows, schema=["user_id", "item_id"], orient="row")


def test_overlap_is_the_share_of_the_longer_list_averaged_over_common_users():
    before = lists(a="xyz", b="xy", c="x", gone="q")
    now = lists(a="xyw", b="xyzw", c="v", new="q")
    value, users = overlap(before, now)
    assert users == 3
    assert value == pytest.approx((2 / 3 + 2 / 4 + 0) / 3)
    assert overlap(before, before) == (1.0, 4)
    assert overlap(before, lists(z="x")) == (0.0, 0), "nobody to compare is nothing in common"


@given(st.integers(0, 1000), st.floats(-2, 2), st.integers(30, 500))
@settings(max_examples=50, deadline=None)
def test_drift_is_zero_for_the_same_scores_and_never_negative(seed, shift, size):
    rng = np.random.default_rng(seed)
    before = pl.Series(rng.normal(size=size))
    now = pl.Series(rng.normal(loc=shift, size=size))
    assert score_drift(before, before) == pytest.approx(0)
    assert score_drift(before, now) >= 0


def test_drift_by_hand():
    """Ten bins of a tenth each; afterwards half of the scores are in the first and half in the
    last: 2 (0.5 - 0.1) ln 5 + 8 (0.0001 - 0.1) ln 0.001."""
    before = pl.Series(np.arange(1000, dtype=np.float64))
    now = pl.Series(np.repeat([0.0, 999.0], 500))
    want = 2 * 0.4 * np.log(5) + 8 * (0.0001 - 0.1) * np.log(0.001)
    assert score_drift(before, now) == pytest.approx(want, rel=1e-6)


def test_drift_of_one_value_is_seen():
    same = pl.Series(np.full(100, -3.0))
    assert score_drift(same, same) == pytest.approx(0)
    assert score_drift(same, pl.Series(np.full(100, -2.0))) > 1
