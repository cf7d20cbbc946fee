"""The catalog's semantic IDs as a CSR trie: NumPy arrays only, saved once per run, memory-mapped by
workers.

Nodes are numbered level by level, and inside a level in lexicographic order of their codes. Two
things follow that everything else relies on: the children of node v are the contiguous range
`first_child[v] : first_child[v + 1]`, and of two nodes of one level the smaller number is the
lexicographically smaller prefix. Node 0 is the root. A *sid* is the number of a leaf in
lexicographic order; items that share a semantic ID share a leaf.

Sources: CSR tries for constrained decoding, STATIC (arXiv 2602.22647); ours has no dense levels,
takes SIDs of different lengths, and never materialises a mask over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.errors import CatalogError

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class SidTrie:
    """A trie of V nodes and depth L over N items with S distinct SIDs."""

    level_start: Int64s  # [L + 2] nodes of depth d are level_start[d] : level_start[d + 1]
    first_child: Int32s  # [V + 1]
    parent: Int32s  # [V] -1 for the root
    code: Int32s  # [V] code inside its level's codebook; -1 for the root
    sid_of_node: Int32s  # [V] the leaf's sid, -1 for an inner node
    node_of_sid: Int32s  # [S]
    first_item: Int64s  # [S + 1] items of sid s are items[first_item[s] : first_item[s + 1]]
    items: Int32s  # [N] items by sid, inside a sid in catalog order
    sid_of_item: Int32s  # [N]

    @property
    def num_nodes(self) -> int:
        """V, the root included."""
        return len(self.parent)

    @property
    def num_sids(self) -> int:
        """S, distinct semantic IDs."""
        return len(self.node_of_sid)

    @property
    def num_items(self) -> int:
        """N, items of the catalog."""
        return len(self.items)

    @property
    def depth(self) -> int:
        """L, codes of the longest semantic ID."""
        return len(self.level_start) - 2

    @cached_property
    def num_children(self) -> Int32s:
        """Children of each node `[V]`."""
        return np.diff(self.first_child).astype(np.int32)

    @cached_property
    def inner_nodes_at(self) -> Int64s:
        """Nodes with children at each depth `[L + 1]`."""
        return np.asarray(
            [int((self.num_children[self.level(d)] > 0).sum()) for d in range(self.depth + 1)],
            dtype=np.int64,
        )

    def level(self, depth: int) -> slice:
        """The nodes of one depth."""
        return slice(int(self.level_start[depth]), int(self.level_start[depth + 1]))

    def most_children(self, depth: int, nodes: int) -> int:
        """The most children that `nodes` different nodes of this depth can have together.

        This bounds a beam's candidates before the beam is known, so that a beam step has a fixed
        shape.
        """
        counts = self.num_children[self.level(depth)]
        if nodes >= len(counts):
            return int(counts.sum())
        return int(np.partition(counts, len(counts) - nodes)[len(counts) - nodes :].sum())

    @cached_property
    def depth_of_node(self) -> Int32s:
        """Depth of each node `[V]`."""
        return np.repeat(
            np.arange(self.depth + 1, dtype=np.int32), np.diff(self.level_start)
        ).astype(np.int32)

    @cached_property
    def codes_of_sid(self) -> Int32s:
        """Codes of each sid `[S, L]`, -1 after its end."""
        out = np.full((self.num_sids, self.depth), -1, dtype=np.int32)
        current = self.node_of_sid.astype(np.int64)
        depth = self.depth_of_node[current]
        for _ in range(self.depth):
            live = np.flatnonzero(depth > 0)
            out[live, depth[live] - 1] = self.code[current[live]]
            current[live] = self.parent[current[live]]
            depth[live] -= 1
        return out

    def prefix_of_sid(self, level: int) -> Int64s:
        """The node of each sid's first `level` codes, or its leaf when it is shorter `[S]`."""
        return self.above(self.node_of_sid.astype(np.int64), level)

    def above(self, node: Int64s, level: int) -> Int64s:
        """The nodes at depth `level` that lead to these, or these where they are not deeper."""
        for _ in range(self.depth - level):
            node = np.where(self.depth_of_node[node] > level, self.parent[node], node)
        return node

    @property
    def num_bytes(self) -> int:
        """Size of the arrays."""
        return sum(getattr(self, f.name).nbytes for f in fields(self))

    def save(self, folder: str | Path) -> None:
        """Write each array as `<name>.npy`."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        for f in fields(self):
            np.save(path / f"{f.name}.npy", getattr(self, f.name), allow_pickle=False)

    @classmethod
    def load(cls, folder: str | Path) -> SidTrie:
        """Memory-map what `save` wrote: workers of one machine share one copy."""
        path = Path(folder)
        arrays = {f.name: np.load(path / f"{f.name}.npy", mmap_mode="r") for f in fields(cls)}
        return cls(**arrays)


@dataclass(frozen=True, slots=True)
class EndCodes:
    """Closes SIDs with one code more, so that one may be a prefix of another.

    `codes[l]` is that code at level l, for l up to the number of levels. `every`: closes all SIDs;
    else only those that are a prefix of another.
    """

    codes: tuple[int, ...]
    every: bool


def build_trie(
    codes: NDArray[np.int32],
    name: Callable[[int], str] = "catalog row {}".format,
    *,
    end: EndCodes | None = None,
    prefixes: bool = False,
) -> SidTrie:
    """Build the trie of a catalog.

    Args:
        codes: `[N, L]` codes of each item's SID; -1 fills the end of shorter ones.
        name: what to call the item of a row in a message.
        end: how the SID space ends a SID. A closed SID stands before the longer ones it begins.
        prefixes: an item's path may be a prefix of another's, and its node then has children.
            Right for scoring known items; a beam search could not tell where such an item ends.

    Raises:
        CatalogError: no items, an empty SID, a hole inside one, or one SID that is a prefix of
        another where there is no `end`.
    """
    num_items = len(codes)
    if num_items == 0:
        raise CatalogError("the catalog is empty", expected="at least one item with a semantic ID")
    _check_shape(codes, name)
    order = np.lexsort(codes.T[::-1]).astype(np.int64)  # stable: catalog order inside a SID
    ordered = codes[order]
    new = np.ones(num_items, dtype=bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    sid_of_ordered = np.cumsum(new) - 1
    distinct = ordered[new]  # [S, L]
    num_sids = len(distinct)
    if end is not None:
        distinct = _closed(distinct, end)

    nodes = _number_nodes(distinct)
    num_nodes = len(nodes.parent)
    children = np.bincount(nodes.parent[1:], minlength=num_nodes)
    first_child = np.ones(num_nodes + 1, dtype=np.int64)
    np.cumsum(children, out=first_child[1:])
    first_child[1:] += 1
    if not prefixes:
        _check_prefixes(children, nodes.of_sid, distinct, order, sid_of_ordered, name)

    sid_of_node = np.full(num_nodes, -1, dtype=np.int32)
    sid_of_node[nodes.of_sid] = np.arange(num_sids)
    sid_of_item = np.empty(num_items, dtype=np.int32)
    sid_of_item[order] = sid_of_ordered
    return SidTrie(
        level_start=nodes.level_start,
        first_child=first_child.astype(np.int32),
        parent=nodes.parent.astype(np.int32),
        code=nodes.code.astype(np.int32),
        sid_of_node=sid_of_node,
        node_of_sid=nodes.of_sid.astype(np.int32),
        first_item=np.append(np.flatnonzero(new), num_items).astype(np.int64),
        items=order.astype(np.int32),
        sid_of_item=sid_of_item,
    )


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The nodes of a trie, level by level, in the order of their codes; the root is the first."""

    level_start: NDArray[np.int64]  # [depth + 2]
    parent: NDArray[np.int64]  # [V] -1 for the root
    code: NDArray[np.int32]  # [V]
    of_sid: NDArray[np.int64]  # [S]


def _number_nodes(distinct: NDArray[np.int32]) -> _Nodes:
    """A SID's node at each depth is the number of its prefix among the distinct ones of that depth.

    Args:
        distinct: `[S, L]` codes in ascending order, -1 behind the end of shorter ones.
    """
    num_sids, depth = distinct.shape
    changed = np.zeros(num_sids, dtype=bool)
    changed[0] = True
    level_start = [0, 1]
    parents, codes = [np.array([-1])], [np.array([-1])]
    of_sid = np.zeros(num_sids, dtype=np.int64)
    above = np.zeros(num_sids, dtype=np.int64)  # this SID's node at the depth above
    for level in range(depth):
        column = distinct[:, level]
        live = column >= 0
        changed[1:] |= column[1:] != column[:-1]
        starts = changed & live
        number = np.cumsum(starts) - 1 + level_start[-1]
        parents.append(above[starts])
        codes.append(column[starts])
        level_start.append(level_start[-1] + int(starts.sum()))
        above = np.where(live, number, above)
        of_sid = np.where(live, number, of_sid)
    return _Nodes(
        np.asarray(level_start, dtype=np.int64),
        np.concatenate(parents),
        np.concatenate(codes),
        of_sid,
    )


def _closed(distinct: NDArray[np.int32], end: EndCodes) -> NDArray[np.int32]:
    """Distinct SIDs in order `[S, L]` with their ends, `[S, L + 1]`, or `[S, L]` if that holds all.

    In lexicographic order the SIDs that a SID begins follow right behind it.
    """
    num_sids, depth = distinct.shape
    length = (distinct >= 0).sum(axis=1)
    closed = np.full((num_sids, depth + 1), -1, dtype=np.int32)
    closed[:, :depth] = distinct
    before, after = distinct[:-1], distinct[1:]
    inside = np.arange(depth) < length[:-1, None]
    begins = np.zeros(num_sids, dtype=bool)
    begins[:-1] = ((before == after) | ~inside).all(axis=1)
    rows = np.arange(num_sids) if end.every else np.flatnonzero(begins)
    closed[rows, length[rows]] = np.asarray(end.codes, dtype=np.int32)[length[rows]]
    return closed if (closed[:, depth] >= 0).any() else closed[:, :depth]


def _check_shape(codes: NDArray[np.int32], name: Callable[[int], str]) -> None:
    live = codes >= 0
    empty = np.flatnonzero(~live[:, 0])
    if len(empty):
        raise CatalogError("an item has an empty semantic ID", got=name(int(empty[0])))
    holes = np.flatnonzero((live[:, 1:] & ~live[:, :-1]).any(axis=1))
    if len(holes):
        raise CatalogError("a semantic ID has a code after its end", got=name(int(holes[0])))


def _check_prefixes(
    children: Int64s,
    node_of_sid: Int64s,
    distinct: NDArray[np.int32],
    order: Int64s,
    sid_of_ordered: Int64s,
    name: Callable[[int], str],
) -> None:
    bad = np.flatnonzero(children[node_of_sid] > 0)
    if not len(bad):
        return
    sid = int(bad[0])
    length = int((distinct[sid] >= 0).sum())
    row = int(order[np.searchsorted(sid_of_ordered, sid)])
    longer = int(order[np.searchsorted(sid_of_ordered, sid + 1)])
    raise CatalogError(
        "a semantic ID is a prefix of another, so generation could never tell them apart",
        expected="no SID to be a prefix of another",
        got=f"{distinct[sid, :length].tolist()} ({name(row)}) before "
        f"{distinct[sid + 1][distinct[sid + 1] >= 0].tolist()} ({name(longer)}); "
        f"{len(bad)} such SIDs",
    )
