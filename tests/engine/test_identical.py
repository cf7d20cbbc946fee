from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.packing import identical
from engine.packing.identical import first_of_its_kind
from schemas.requests import BatchResult, ItemScores, Ragged, SidBeams

ROWS = st.lists(
    st.tuples(st.lists(st.integers(-1, 2), max_size=3), st.sampled_from([0.0, -0.0, 1.5])),
    max_size=12,
)


def by_definition(rows):
    """-0.0 and 0.0 are different bits."""
    keys = [(tuple(tokens), np.float32(x).tobytes()) for tokens, x in rows]
    return [keys.index(key) for key in keys]


def parts_of(rows):
    tokens = Ragged.from_lists(tokens for tokens, _ in rows)
    vectors = np.asarray([[x, 2.0] for _, x in rows], dtype=np.float32).reshape(-1, 2)
    return [tokens, vectors]


@given(ROWS)
@settings(max_examples=100, deadline=None)
def test_a_row_points_at_the_first_that_equals_it(rows):
    assert first_of_its_kind(parts_of(rows), len(rows)).tolist() == by_definition(rows)


@given(ROWS)
@settings(max_examples=60, deadline=None)
def test_rows_of_one_hash_are_still_told_apart(rows):
    """With a hash that knows nothing, no two different rows are taken for one another."""
    real = identical._hash
    identical._hash = lambda lists: np.zeros(lists.num_rows, dtype=np.uint64)
    try:
        got = first_of_its_kind(parts_of(rows), len(rows)).tolist()
    finally:
        identical._hash = real
    want = by_definition(rows)
    assert all(g in (w, i) for i, (g, w) in enumerate(zip(got, want, strict=True)))


def test_a_result_is_given_to_everyone_it_belongs_to():
    scored = ItemScores(
        user=np.asarray([0, 0, 1]),
        item=np.asarray([5, 6, 7]),
        score=np.asarray([-1, -2, -3], dtype=np.float32),
    )
    beams = SidBeams(
        user=np.asarray([1]),
        sid=np.asarray([4]),
        score=np.asarray([-9], dtype=np.float32),
        pruned=np.asarray([-1, -2], dtype=np.float32),
        legal_mass=np.asarray([0.5, 0.25], dtype=np.float32),
        width=np.asarray([8, 16]),
    )
    result = BatchResult(
        num_users=2,
        scored=scored,
        generated=beams,
        failed=np.asarray([False, True]),
        rows=np.asarray([10, 20]),
        rows_naive=np.asarray([100, 200]),
    )
    got = result.spread(np.asarray([1, 0, 1, 0]))
    assert got.scored.user.tolist() == [0, 1, 1, 2, 3, 3]
    assert got.scored.item.tolist() == [7, 5, 6, 7, 5, 6]
    assert got.generated.user.tolist() == [0, 2]
    assert got.generated.width.tolist() == [16, 8, 16, 8]
    assert got.failed.tolist() == [True, False, True, False]
    assert got.rows.tolist() == [20, 10, 0, 0], "forwarded once"
    assert got.rows_naive.tolist() == [200, 100, 200, 100]
