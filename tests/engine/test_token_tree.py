from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.trees.exclusions import dead_nodes
from engine.trees.sid_trie import build_trie
from engine.trees.token_tree import build_token_tree, candidate_parts, repeat_trees
from schemas.requests import Ragged
from tests.factories import random_codes


def make(seed, num_items, ragged, users=4):
    rng = np.random.default_rng(seed)
    trie = build_trie(random_codes(rng, num_items, ragged=ragged))
    sets = [
        rng.choice(num_items, rng.integers(0, num_items + 1), replace=False) for _ in range(users)
    ]
    return trie, Ragged.from_lists(sets)


def path_of(trie, node):
    path = []
    while node > 0:
        path.append(int(trie.code[node]))
        node = trie.parent[node]
    return tuple(reversed(path))


@given(st.integers(0, 10_000), st.integers(1, 50), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_shared_prefix_is_forwarded_once_and_a_last_token_never(seed, num_items, ragged):
    trie, candidates = make(seed, num_items, ragged)
    tree = build_token_tree(trie, candidates)
    for user in range(candidates.num_rows):
        sids = {path_of(trie, trie.node_of_sid[trie.sid_of_item[i]]) for i in candidates.row(user)}
        wanted = {sid[:n] for sid in sids for n in range(1, len(sid))}
        forwarded = [
            path_of(trie, node)
            for level in tree.levels
            for node in level.node[level.forwarded & (level.user == user)]
        ]
        assert len(forwarded) == len(set(forwarded)) == tree.rows_per_user[user]
        assert set(forwarded) == wanted


@given(st.integers(0, 10_000), st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_paths_that_are_prefixes_forward_what_is_read_behind_and_no_more(seed, num_items):
    """Texts: an item may be the beginning of another, and its own last token is then forwarded."""
    rng = np.random.default_rng(seed)
    length = rng.integers(1, 5, num_items)
    codes = rng.integers(0, 3, (num_items, 4)).astype(np.int32)
    codes[np.arange(4) >= length[:, None]] = -1
    trie = build_trie(codes, prefixes=True)
    candidates = Ragged.from_lists(
        rng.choice(num_items, rng.integers(0, num_items + 1), replace=False) for _ in range(3)
    )
    for leaves in (False, True):
        tree = build_token_tree(trie, candidates, forward_leaves=leaves)
        for user in range(3):
            paths = {tuple(codes[i][codes[i] >= 0].tolist()) for i in candidates.row(user)}
            wanted = {p[:n] for p in paths for n in range(1, len(p) + leaves)}
            forwarded = [
                path_of(trie, node)
                for level in tree.levels
                for node in level.node[level.forwarded & (level.user == user)]
            ]
            assert len(forwarded) == len(wanted) == tree.rows_per_user[user]
            assert set(forwarded) == wanted


@given(st.integers(0, 10_000), st.integers(1, 40), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_shared_tree_repeated_is_the_tree_of_each_user(seed, num_items, ragged, leaves):
    trie, sets = make(seed, num_items, ragged)
    of_user = np.random.default_rng(seed).integers(0, sets.num_rows, 6)
    want = build_token_tree(trie, sets.take(of_user), forward_leaves=leaves)
    got = repeat_trees(build_token_tree(trie, sets, forward_leaves=leaves), sets, of_user)
    for name in ("leaf_level", "leaf_position", "rows_per_user"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), name)
    for mine, theirs in zip(got.levels, want.levels, strict=True):
        for name in ("user", "node", "parent", "forward_index"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), name)


@given(st.integers(0, 10_000), st.integers(1, 40), st.booleans(), st.integers(1, 20))
@settings(max_examples=40, deadline=None)
def test_parts_hold_every_candidate_once_and_stay_small(seed, num_items, ragged, max_rows):
    trie, candidates = make(seed, num_items, ragged)
    parts = list(candidate_parts(trie, candidates, max_rows))
    every = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    assert sorted(every.tolist()) == list(range(len(candidates.values)))
    user = candidates.row_ids
    for part in parts:
        lists = Ragged.from_lengths(
            np.bincount(user[part], minlength=candidates.num_rows), candidates.values[part]
        )
        assert build_token_tree(trie, lists).num_rows <= max_rows or len(part) == 1


@given(st.integers(0, 10_000), st.integers(1, 50), st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_candidate_leads_back_to_its_user_through_its_own_prefixes(seed, num_items, ragged):
    trie, candidates = make(seed, num_items, ragged)
    tree = build_token_tree(trie, candidates)
    for place, (user, item) in enumerate(zip(candidates.row_ids, candidates.values, strict=True)):
        depth, at = int(tree.leaf_level[place]), int(tree.leaf_position[place])
        assert tree.levels[depth].node[at] == trie.node_of_sid[trie.sid_of_item[item]]
        while depth > 0:
            node, at = tree.levels[depth].node[at], int(tree.levels[depth].parent[at])
            depth -= 1
            assert tree.levels[depth].node[at] == trie.parent[node]
            assert tree.levels[depth].forwarded[at]
        assert tree.levels[0].parent[at] == user


@given(st.integers(0, 10_000), st.integers(1, 50), st.booleans())
@settings(max_examples=60, deadline=None)
def test_dead_nodes_are_those_without_an_item_that_is_left(seed, num_items, ragged):
    trie, excluded = make(seed, num_items, ragged)
    twice = [excluded.row(0).repeat(2), *(excluded.row(user) for user in (1, 2, 3))]
    excluded = Ragged.from_lists(twice)
    got = set(dead_nodes(trie, excluded).tolist())
    for user in range(excluded.num_rows):
        alive = set()
        for item in set(range(num_items)) - set(excluded.row(user).tolist()):
            node = int(trie.node_of_sid[trie.sid_of_item[item]])
            while node >= 0:
                alive.add(node)
                node = int(trie.parent[node])
        wanted = {user * trie.num_nodes + n for n in range(trie.num_nodes) if n not in alive}
        assert {k for k in got if k // trie.num_nodes == user} == wanted


def test_a_hundred_thousand_items_and_a_thousand_exclusions_stay_vectorised():
    """Not a timing test: a loop over users or items would take minutes here."""
    rng = np.random.default_rng(0)
    trie = build_trie(rng.integers(0, 256, (100_000, 3)).astype(np.int32))
    excluded = Ragged.from_lists(rng.integers(0, 100_000, 1000) for _ in range(64))
    assert len(dead_nodes(trie, excluded)) >= 64 * 900
