from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.packing.packs import PackingBudget, pack_users

sizes = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), max_size=60)


def pack(users, max_rows, max_users):
    prompt = np.asarray([u[0] for u in users], dtype=np.int64)
    other = np.asarray([u[1] for u in users], dtype=np.int64)
    return [p.tolist() for p in pack_users(prompt, other, PackingBudget(max_rows, max_users))]


@given(sizes, st.integers(1, 200), st.integers(1, 20))
@settings(deadline=None)
def test_every_user_is_in_one_pack_and_packs_keep_the_budget(users, max_rows, max_users):
    packs = pack(users, max_rows, max_users)
    assert sorted(u for p in packs for u in p) == list(range(len(users)))
    for p in packs:
        assert 1 <= len(p) <= max_users
        assert len(p) == 1 or sum(sum(users[u]) for u in p) <= max_rows


@given(sizes, st.integers(1, 200), st.integers(1, 20))
@settings(deadline=None)
def test_packing_depends_on_nothing_but_its_input(users, max_rows, max_users):
    assert pack(users, max_rows, max_users) == pack(users, max_rows, max_users)
    flat = [users[u][0] for p in pack(users, max_rows, max_users) for u in p]
    assert flat == sorted(flat), "prompts of a pack are of about one length"


def test_exact_packs_of_a_named_case():
    assert pack([(3, 0), (1, 1), (2, 0), (9, 9)], 5, 10) == [[1, 2], [0], [3]]
    assert pack([(1, 0)] * 5, 100, 2) == [[0, 1], [2, 3], [4]]
    assert pack([], 5, 5) == []
