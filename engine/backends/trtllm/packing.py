"""Which encode calls read which rows: prompts with chains of tree nodes behind them, packed.

A multi-item prompt is `prefix D item D item D … D`. Every item stands right behind the prefix for
the model: its positions begin there, and it sees the prefix and itself. A *chain* is the path from
a prompt to one of its nodes; chains of one prompt are its items, so that the prompt is forwarded
once for all of them, and nodes on the way of a longer chain are read from it. The row of a node is
its own token's position (for the end of a chain that is the last item token, never the delimiter
behind it), and the row of a prompt end is the last token of the prefix.

Source: multi-item scoring in TensorRT-LLM (PR #14693) over FlashInfer's mask.

Legend: B prompts, r rows read, c chains, D longest chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from engine.backends.trtllm.context import TrtllmContext
from schemas.requests import Ints

DELIMITER = 0  # any token of the vocabulary: no item sees it
LONGEST_ITEM = 65535  # FlashInfer counts an item's tokens in 16 bits


@dataclass(frozen=True, slots=True)
class CallBudget:
    """Limits of one encode call: tokens of all prompts, tokens of one, and prompts."""

    max_tokens: int
    max_sequence: int
    max_prompts: int


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt of a call, and the context rows that are read in it."""

    prompt: int
    tokens: Ints
    part_lens: list[int] | None  # [prefix, item, item, …]; None: a plain prompt
    rows: Ints  # [r]
    positions: Ints  # [r] in `tokens`


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Prompts of one encode call; all are multi-item or none is."""

    requests: tuple[Request, ...]

    @property
    def rows(self) -> Ints:
        """The context rows that are read, request after request `[r]`."""
        return np.concatenate([request.rows for request in self.requests])


def plan_calls(
    context: TrtllmContext, rows: Ints, budget: CallBudget, *, multi_item: bool
) -> list[Call]:
    """Calls that read every one of `rows` `[r]` (distinct) exactly once."""
    chains = _Chains(context, rows)
    length = context.prompts.lengths
    requests = []
    for prompt, mine in _by_prompt(chains.prompt):
        room = min(budget.max_sequence, budget.max_tokens) - int(length[prompt]) - 1
        for part in _fill(mine, chains.length, room if multi_item else 0):
            build = chains.multi_item if multi_item else chains.single
            requests.append(build(prompt, part))
    plain = [chains.plain(int(prompt)) for prompt in np.flatnonzero(chains.ends)]
    return [*_calls(plain, budget), *_calls(requests, budget)]


class _Chains:
    """The paths to those of the nodes that lie on no other's path: together they hold all nodes
    that are read. A row that several of them hold is read from the first.

    prompt `[c]` ascending, nodes `[c, D]` root first and -1 behind the end, length `[c]`; ends
    `[B]` prompts whose end is still to be read: the first request of a prompt takes it along.
    """

    def __init__(self, context: TrtllmContext, rows: Ints) -> None:
        self._context = context
        num = context.num_prompts
        wanted = rows[rows >= num] - num
        self.ends = np.zeros(num, dtype=bool)
        self.ends[rows[rows < num]] = True
        paths, depth = _paths(context, wanted)
        last = _on_no_others_path(paths, depth, wanted, len(context.token))
        order = last[np.argsort(context.prompt[wanted[last]], kind="stable")]
        self.prompt = context.prompt[wanted[order]]
        self.nodes, self.length = paths[order], depth[order]
        self._read_from = np.full(len(context.token), -1, dtype=np.int64)  # node -> its chain
        chain, place = np.nonzero(self.nodes[::-1] >= 0)  # the first chain is written last
        self._read_from[self.nodes[::-1][chain, place]] = len(order) - 1 - chain
        asked = np.zeros(len(context.token), dtype=bool)
        asked[wanted] = True
        self._read_from[~asked] = -1

    def multi_item(self, prompt: int, mine: Ints) -> Request:
        """The prompt with the chains `mine` as its items."""
        prefix, length = self._context.prompts.row(prompt), self.length[mine]
        items = np.full((len(mine), int(length.max()) + 1), -1, dtype=np.int64)
        nodes = self.nodes[mine, : items.shape[1] - 1]
        items[:, :-1] = np.where(nodes >= 0, self._context.token[nodes], -1)
        items[np.arange(len(mine)), length] = DELIMITER
        tokens = np.concatenate([prefix, [DELIMITER], items[items >= 0]])
        begin = len(prefix) + 1 + np.concatenate([[0], np.cumsum(length + 1)[:-1]])
        rows, positions = self._reads(prompt, mine, begin)
        return Request(prompt, tokens, [len(prefix), *length.tolist()], rows, positions)

    def single(self, prompt: int, mine: Ints) -> Request:
        """The prompt with one chain behind it, as any causal model reads it."""
        prefix = self._context.prompts.row(prompt)
        chain = self.nodes[mine[0], : int(self.length[mine[0]])]
        tokens = np.concatenate([prefix, self._context.token[chain]])
        rows, positions = self._reads(prompt, mine, np.asarray([len(prefix)]))
        return Request(prompt, tokens, None, rows, positions)

    def plain(self, prompt: int) -> Request:
        """A prompt alone, read at its end."""
        none = np.empty(0, dtype=np.int64)
        rows, positions = self._reads(prompt, none, none)
        return Request(prompt, self._context.prompts.row(prompt), None, rows, positions)

    def _reads(self, prompt: int, mine: Ints, begin: Ints) -> tuple[Ints, Ints]:
        """Rows read in a request whose chain `mine[i]` begins at `begin[i]`, and their positions:
        each node's own token, and the prompt's last token for its end."""
        nodes = self.nodes[mine]
        here = (nodes >= 0) & (self._read_from[np.maximum(nodes, 0)] == mine[:, None])
        chain, place = np.nonzero(here)
        rows, positions = self._context.num_prompts + nodes[here], begin[chain] + place
        if self.ends[prompt]:
            self.ends[prompt] = False
            end = len(self._context.prompts.row(prompt)) - 1
            rows, positions = np.append(rows, prompt), np.append(positions, end)
        return rows, positions


def _paths(context: TrtllmContext, nodes: Ints) -> tuple[Ints, Ints]:
    """The nodes on the way to each of `nodes` `[n, D]`, root first, and their depths `[n]`."""
    depth = context.depth[nodes]
    paths = np.full((len(nodes), int(depth.max(initial=0))), -1, dtype=np.int64)
    here = nodes
    for step in range(paths.shape[1]):
        live = depth - 1 - step >= 0
        paths[live, (depth - 1 - step)[live]] = here[live]
        here = np.where(live, context.parent[np.maximum(here, 0)], -1)
    return paths, depth


def _on_no_others_path(paths: Ints, depth: Ints, nodes: Ints, num_nodes: int) -> Ints:
    """Which of the paths end at a node that no other goes through."""
    inner = paths.copy()
    inner[np.arange(len(nodes)), depth - 1] = -1
    passed = np.zeros(num_nodes, dtype=bool)
    passed[inner[inner >= 0]] = True
    return np.flatnonzero(~passed[nodes]).astype(np.int64)


def _by_prompt(prompt: Ints) -> Iterator[tuple[int, Ints]]:
    """Runs of equal prompts: the prompt, and the places of its chains."""
    bounds = np.flatnonzero(np.diff(prompt)) + 1
    for part in np.split(np.arange(len(prompt), dtype=np.int64), bounds):
        if len(part):
            yield int(prompt[part[0]]), part


def _fill(chains: Ints, length: Ints, room: int) -> Iterator[Ints]:
    """Parts of the chains that take at most `room` tokens, delimiters included; at least one."""
    ends = np.cumsum(length[chains] + 1)
    begin = 0
    while begin < len(chains):
        before = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, before + room, side="right"))
        end = max(end, begin + 1)
        yield chains[begin:end]
        begin = end


def _calls(requests: Iterable[Request], budget: CallBudget) -> Iterator[Call]:
    """Requests in order, as many in a call as fit."""
    some: list[Request] = []
    tokens = 0
    for request in requests:
        size = len(request.tokens)
        if some and (tokens + size > budget.max_tokens or len(some) == budget.max_prompts):
            yield Call(tuple(some))
            some, tokens = [], 0
        some.append(request)
        tokens += size
    if some:
        yield Call(tuple(some))
