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

from engine.trtllm_backend.context import TrtllmContext
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


@dataclass(frozen=True, slots=True, eq=False)
class _Chains:
    """Chains that together hold all nodes that are read, by prompt."""

    prompt: Ints  # [c]
    nodes: Ints  # [c, D] root first, -1 behind the end
    length: Ints  # [c]


def plan_calls(
    context: TrtllmContext, rows: Ints, budget: CallBudget, *, multi_item: bool
) -> list[Call]:
    """Calls that read every one of `rows` `[r]` (distinct) exactly once."""
    num = context.num_prompts
    chains = _chains(context, rows[rows >= num] - num)
    chain_of, place = _found_in(chains, len(context.token))
    ends = np.zeros(num, dtype=bool)
    ends[rows[rows < num]] = True
    wanted = np.zeros(len(context.token), dtype=bool)
    wanted[rows[rows >= num] - num] = True

    groups: list[tuple[int, Ints]] = []  # prompt, chains of one request
    for prompt, mine in _by_prompt(chains.prompt):
        if multi_item:
            room = min(budget.max_sequence, budget.max_tokens) - len(context.prompts.row(prompt))
            groups += [(prompt, part) for part in _fill(mine, chains.length, room - 1)]
        else:
            groups += [(prompt, mine[i : i + 1]) for i in range(len(mine))]
    requests = []
    for prompt, mine in groups:
        build = _multi_item if multi_item else _single
        request = build(context, chains, prompt, mine, wanted, chain_of, place, ends[prompt])
        ends[prompt] = False  # its first request reads the prompt's end too
        requests.append(request)
    plain = [_plain(context, int(prompt)) for prompt in np.flatnonzero(ends)]
    calls = [*_calls(plain, budget)]
    return calls + [*_calls(requests, budget)]


def _chains(context: TrtllmContext, nodes: Ints) -> _Chains:
    """The paths to those of the nodes that lie on no other's path, by prompt."""
    depth = context.depth[nodes]
    paths = np.full((len(nodes), int(depth.max(initial=0))), -1, dtype=np.int64)
    here = nodes
    for step in range(paths.shape[1]):
        live = depth - 1 - step >= 0
        paths[live, (depth - 1 - step)[live]] = here[live]
        here = np.where(live, context.parent[np.maximum(here, 0)], -1)
    on_the_way = np.zeros(len(context.token), dtype=bool)
    inner = paths.copy()
    inner[np.arange(len(nodes)), depth - 1] = -1
    on_the_way[inner[inner >= 0]] = True
    ends = np.flatnonzero(~on_the_way[nodes])
    order = ends[np.argsort(context.prompt[nodes[ends]], kind="stable")]
    return _Chains(context.prompt[nodes[order]], paths[order], depth[order])


def _found_in(chains: _Chains, num_nodes: int) -> tuple[Ints, Ints]:
    """For each node the first chain that holds it, and its place there; -1: none does."""
    chain_of = np.full(num_nodes, -1, dtype=np.int64)
    place = np.full(num_nodes, -1, dtype=np.int64)
    backwards = chains.nodes[::-1]
    chain, at = np.nonzero(backwards >= 0)
    node = backwards[chain, at]
    chain_of[node] = len(backwards) - 1 - chain  # the first chain is written last
    place[node] = at
    return chain_of, place


def _by_prompt(prompt: Ints) -> Iterator[tuple[int, Ints]]:
    """Runs of equal prompts: the prompt, and the places of its chains."""
    bounds = np.flatnonzero(np.diff(prompt)) + 1
    for part in np.split(np.arange(len(prompt), dtype=np.int64), bounds):
        if len(part):
            yield int(prompt[part[0]]), part


def _fill(chains: Ints, length: Ints, room: int) -> Iterator[Ints]:
    """Parts of the chains that take at most `room` tokens, delimiters included."""
    ends = np.cumsum(length[chains] + 1)
    begin = 0
    while begin < len(chains):
        before = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, before + room, side="right"))
        end = max(end, begin + 1)
        yield chains[begin:end]
        begin = end


def _multi_item(
    context: TrtllmContext,
    chains: _Chains,
    prompt: int,
    mine: Ints,
    wanted: np.ndarray,
    chain_of: Ints,
    place: Ints,
    read_end: bool,
) -> Request:
    """The prompt with all chains of `mine` as its items."""
    prefix = context.prompts.row(prompt)
    length = chains.length[mine]
    items = np.full((len(mine), int(length.max()) + 1), -1, dtype=np.int64)
    nodes = chains.nodes[mine, : items.shape[1] - 1]
    items[:, :-1] = np.where(nodes >= 0, context.token[nodes], -1)
    items[np.arange(len(mine)), length] = DELIMITER
    tokens = np.concatenate([prefix, [DELIMITER], items[items >= 0]])
    begin = len(prefix) + 1 + np.concatenate([[0], np.cumsum(length + 1)[:-1]])
    rows, positions = _reads(context, nodes, mine, begin, wanted, chain_of, place)
    if read_end:
        rows, positions = np.append(rows, prompt), np.append(positions, len(prefix) - 1)
    return Request(prompt, tokens, [len(prefix), *length.tolist()], rows, positions)


def _single(
    context: TrtllmContext,
    chains: _Chains,
    prompt: int,
    mine: Ints,
    wanted: np.ndarray,
    chain_of: Ints,
    place: Ints,
    read_end: bool,
) -> Request:
    """The prompt with one chain behind it, as any causal model reads it."""
    prefix = context.prompts.row(prompt)
    nodes = chains.nodes[mine, : int(chains.length[mine[0]])]
    tokens = np.concatenate([prefix, context.token[nodes[0]]])
    begin = np.asarray([len(prefix)])
    rows, positions = _reads(context, nodes, mine, begin, wanted, chain_of, place)
    if read_end:
        rows, positions = np.append(rows, prompt), np.append(positions, len(prefix) - 1)
    return Request(prompt, tokens, None, rows, positions)


def _reads(
    context: TrtllmContext,
    nodes: Ints,
    mine: Ints,
    begin: Ints,
    wanted: np.ndarray,
    chain_of: Ints,
    place: Ints,
) -> tuple[Ints, Ints]:
    """Rows that are read from these chains, and their positions; chain i begins at `begin[i]`."""
    at = np.maximum(nodes, 0)
    here = (nodes >= 0) & wanted[at] & (chain_of[at] == mine[:, None])
    chain, _ = np.nonzero(here)
    node = nodes[here]
    return context.num_prompts + node, begin[chain] + place[node]


def _plain(context: TrtllmContext, prompt: int) -> Request:
    """A prompt alone, read at its end."""
    tokens = context.prompts.row(prompt)
    return Request(prompt, tokens, None, np.asarray([prompt]), np.asarray([len(tokens) - 1]))


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
