from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.trees.sid_trie import EndCodes, SidTrie, build_trie
from schemas.errors import CatalogError
from tests.factories import random_codes


def sids(codes: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(c for c in row if c >= 0) for row in codes.tolist()]


@given(st.integers(0, 10_000), st.integers(1, 60), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_trie_holds_the_catalog_and_nothing_else(seed, num_items, ragged):
    codes = random_codes(np.random.default_rng(seed), num_items, ragged=ragged)
    trie, wanted = build_trie(codes), sids(codes)
    assert sids(trie.codes_of_sid) == sorted(set(wanted)), "sids are in order of their codes"
    assert [sids(trie.codes_of_sid)[s] for s in trie.sid_of_item] == wanted
    prefixes = {sid[:n] for sid in wanted for n in range(len(sid) + 1)}
    assert trie.num_nodes == len(prefixes)
    for sid in range(trie.num_sids):
        members = trie.items[trie.first_item[sid] : trie.first_item[sid + 1]]
        assert members.tolist() == np.flatnonzero(trie.sid_of_item == sid).tolist()


@given(st.integers(0, 10_000), st.integers(1, 60), st.booleans())
@settings(max_examples=60, deadline=None)
def test_children_are_contiguous_ordered_and_point_back(seed, num_items, ragged):
    trie = build_trie(random_codes(np.random.default_rng(seed), num_items, ragged=ragged))
    for node in range(trie.num_nodes):
        children = np.arange(trie.first_child[node], trie.first_child[node + 1])
        assert (trie.parent[children] == node).all()
        assert (np.diff(trie.code[children]) > 0).all()
        assert (trie.depth_of_node[children] == trie.depth_of_node[node] + 1).all()
        assert (len(children) == 0) == (trie.sid_of_node[node] >= 0)


def test_most_children_bounds_any_set_of_nodes_tightly():
    trie = build_trie(random_codes(np.random.default_rng(1), 50))
    counts = sorted(trie.num_children[trie.level(1)].tolist(), reverse=True)
    for nodes in range(1, len(counts) + 2):
        assert trie.most_children(1, nodes) == sum(counts[:nodes])


def test_saved_tries_are_memory_mapped_and_equal(tmp_path):
    trie = build_trie(random_codes(np.random.default_rng(2), 30, ragged=True))
    trie.save(tmp_path)
    loaded = SidTrie.load(tmp_path)
    for name in SidTrie.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(trie, name))
    assert isinstance(loaded.parent, np.memmap)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.empty((0, 3)), "the catalog is empty"),
        ([[1, 2, 3], [-1, -1, -1]], "empty semantic ID: got catalog row 1"),
        ([[1, -1, 3]], "a code after its end"),
        (
            [[1, 2, 3], [1, 2, -1]],
            r"\[1, 2\] \(catalog row 1\) before \[1, 2, 3\] \(catalog row 0\)",
        ),
    ],
    ids=["empty", "empty sid", "hole", "prefix"],
)
def test_catalogs_that_no_trie_can_hold_are_refused(rows, message):
    with pytest.raises(CatalogError, match=message):
        build_trie(np.asarray(rows, dtype=np.int32).reshape(-1, 3))


def test_a_million_items_of_four_levels_fit_in_100_megabytes():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1024, (1_000_000, 4)).astype(np.int32)
    trie = build_trie(codes)
    assert trie.num_items == 1_000_000
    assert trie.num_bytes <= 100e6


def ragged_with_prefixes(rng, num_items):
    length = rng.integers(1, 4, num_items)
    codes = rng.integers(0, 3, (num_items, 3)).astype(np.int32)
    codes[np.arange(3) >= length[:, None]] = -1
    return codes


@given(st.integers(0, 10_000), st.integers(1, 40), st.booleans())
@settings(max_examples=80, deadline=None)
def test_an_end_code_closes_prefixes_and_nothing_is_lost(seed, num_items, every):
    codes = ragged_with_prefixes(np.random.default_rng(seed), num_items)
    end = EndCodes((9, 9, 9, 0), every=every)
    trie = build_trie(codes, end=end)
    plain = [tuple(row[row >= 0].tolist()) for row in codes]
    closed = {}
    for sid in set(plain):
        begins = any(other[: len(sid)] == sid and other != sid for other in plain)
        closed[sid] = (*sid, end.codes[len(sid)]) if every or begins else sid
    got = [tuple(row[row >= 0].tolist()) for row in trie.codes_of_sid[trie.sid_of_item]]
    assert got == [closed[sid] for sid in plain]
    assert (trie.num_children[trie.node_of_sid] == 0).all()
    ordered = sorted(set(plain))  # a SID stands before those it begins
    mine = [closed[sid] for sid in ordered]
    assert [tuple(row[row >= 0].tolist()) for row in trie.codes_of_sid] == mine


def test_a_prefix_without_an_end_code_is_refused_and_allowed_for_known_items():
    codes = np.asarray([[1, -1], [1, 2]], dtype=np.int32)
    with pytest.raises(CatalogError, match="prefix of another"):
        build_trie(codes)
    trie = build_trie(codes, prefixes=True)
    assert trie.sid_of_item.tolist() == [0, 1]
    assert trie.num_children[trie.node_of_sid].tolist() == [1, 0]
