"""Sizes of a beam search that are known before it starts: what it forwards, and what it holds."""

from __future__ import annotations

from collections.abc import Iterator

from engine.trees.sid_trie import SidTrie


def nodes_per_prompt(trie: SidTrie, widths: tuple[int, ...]) -> int:
    """Nodes that one prompt's search forwards at most."""
    return sum(width for width, _ in _levels(trie, widths))


def most_slots(trie: SidTrie, widths: tuple[int, ...]) -> int:
    """Child slots of one prompt in the widest step: what its search takes in memory."""
    first = trie.most_children(0, 1)
    return max(first, *(slots for _, slots in _levels(trie, widths)), 1)


def _levels(trie: SidTrie, widths: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Beams that are kept after each level but the last, and the children they can have."""
    width = 1
    for depth in range(trie.depth):
        inner = int(trie.inner_nodes_at[depth + 1])
        if not inner:
            return
        width = min(widths[depth], inner, trie.most_children(depth, width))
        yield width, trie.most_children(depth + 1, width)
