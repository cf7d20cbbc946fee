"""Held against the model's own library at start-up: a few random prompts behind a prefix they
share, each with a small tree, and the library's plain forward over every path.

Two questions are asked. Is this *architecture* what our attention and head compute? A float32 model
answers that, of the checkpoint's own weights: rounding leaves a difference of some 1e-6 of the
logits' size, another attention or head one of 1e-3 and more. And does the model that a run uses
compute it in its precision? bfloat16 rounds by some 1 % of the logits' size, whatever that size is,
so that only a gross fault can be told there.

Legend: B prompts, T tokens of the longest path, R rows read, C columns read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.backend import NodeBatch, Norm, PackedPrompts, Targets, TokenColumns
from engine.backends.torch.context import TorchContext
from schemas.requests import Ints

if TYPE_CHECKING:
    from engine.backends.torch.backend import TorchBackend

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}  # of the logits' size
_ROUNDING = 1e-5  # nats; where all tokens are as likely
_PREFIX, _LENGTHS = 2, (1, 6, 3, 4)  # tokens
_CHAIN = 3  # nodes below one another; a sibling of the first has none
_COLUMNS = 256  # tokens whose log-probabilities are compared


@dataclass(frozen=True, slots=True)
class Probe:
    """Prompts and their trees. Rows are prompt-major: the end, the chain, the sibling."""

    prefix: Ints  # [P]
    prompts: list[Ints]  # B
    chains: Ints  # [B, chain] tokens below one another
    siblings: Ints  # [B] tokens beside the first of the chain
    columns: Ints  # [C]

    @property
    def paths(self) -> tuple[Ints, Ints, Ints]:
        """Tokens `[2B, T]` of every path, padded at the end; path and position of each row `[R]`,
        its last token.
        """
        paths: list[Ints] = []
        path: list[int] = []
        position: list[int] = []
        for prompt, chain, sibling in zip(self.prompts, self.chains, self.siblings, strict=True):
            head = np.concatenate([self.prefix, prompt])
            path += [len(paths)] * (1 + len(chain)) + [len(paths) + 1]
            position += [*range(len(head) - 1, len(head) + len(chain)), len(head)]
            paths += [np.concatenate([head, chain]), np.append(head, sibling)]
        longest = max(len(one) for one in paths)
        tokens = np.stack([np.pad(one, (0, longest - len(one))) for one in paths])
        return tokens, np.asarray(path), np.asarray(position)


def make_probe(vocab_size: int, max_positions: int) -> Probe:
    """Tokens from anywhere in the vocabulary, the same ones each time."""
    noise = np.random.default_rng(0)
    room = max(1, max_positions - _PREFIX - _CHAIN)

    def some(*shape: int) -> Ints:
        return noise.integers(0, vocab_size, shape)

    return Probe(
        prefix=some(_PREFIX),
        prompts=[some(min(length, room)) for length in _LENGTHS],
        chains=some(len(_LENGTHS), _CHAIN),
        siblings=some(len(_LENGTHS)),
        columns=np.unique(np.linspace(0, vocab_size - 1, _COLUMNS, dtype=np.int64)),
    )


def read(backend: TorchBackend, probe: Probe) -> Tensor:
    """log p of the probe's columns at its rows `[R, C]`, by the backend's prefill and extend."""
    device, chain = backend.facts.device, probe.chains.shape[1]
    prompts = PackedPrompts(
        token_ids=np.concatenate(probe.prompts),
        offsets=np.cumsum([0, *(len(p) for p in probe.prompts)]),
        static_prefix=probe.prefix,
        soft_positions=np.empty(0, dtype=np.int64),
        soft_vectors=None,
    )
    count = len(probe.prompts)
    context = backend.prefill(prompts, max_nodes=count * (chain + 1))
    every = np.arange(count)
    # The chains but for their last nodes, then those and the siblings: parents of the same call
    # and of an earlier one.
    upper = np.stack([count + every * (chain - 1) + depth for depth in range(chain - 1)], axis=1)
    parents = np.concatenate([every[:, None], upper[:, :-1]], axis=1)
    _extend(backend, context, every, parents, probe.chains[:, :-1], range(1, chain), device)
    first = count + upper.size
    lower = first + 2 * every[:, None] + np.arange(2)
    parents = np.stack([upper[:, -1], every], axis=1)
    tokens = np.stack([probe.chains[:, -1], probe.siblings], axis=1)
    _extend(backend, context, every, parents, tokens, (chain, 1), device)
    rows = np.concatenate([every[:, None], upper, lower], axis=1).reshape(-1)
    columns = np.arange(len(probe.columns))
    targets = Targets(
        row=_put(np.repeat(np.arange(len(rows)), len(columns)), device),
        column=_put(np.tile(columns, len(rows)), device),
        columns=TokenColumns(probe.columns),
    )
    found = backend.log_probs(context, _put(rows, device), targets, Norm("full_vocab"))
    return found.view(len(rows), len(columns))


def _extend(
    backend: TorchBackend,
    context: TorchContext,
    prompts: Ints,
    parents: Ints,
    tokens: Ints,
    depths: Sequence[int],
    device: torch.device,
) -> None:
    """Append the same number of nodes to each prompt: parents and tokens `[B, n]`."""
    each = len(depths)
    slots = np.tile(np.arange(each), len(prompts))
    nodes = NodeBatch(
        prompt=_put(np.repeat(prompts, each), device),
        parent=_put(parents.reshape(-1), device),
        token=_put(tokens.reshape(-1), device),
        depth=_put(np.tile(np.asarray(depths), len(prompts)), device),
        slot=_put(slots, device),
        num_slots=each,
        max_depth=max(depths),
    )
    backend.extend(context, nodes)


def relative_errors(got: Tensor, want: Tensor) -> Tensor:
    """Of each row `[R]`: the difference of log-probabilities `[R, C]` in parts of the logits' size,
    both as the root of the mean square. Infinite where one of them is no number.
    """
    size = (want - want.mean(dim=1, keepdim=True)).square().mean(dim=1).sqrt()
    error = (got - want).square().mean(dim=1).sqrt()
    error = (error - _ROUNDING).clamp(min=0) / size.clamp(min=_ROUNDING)
    return error.nan_to_num(nan=torch.inf)


def largest_error(got: Tensor, want: Tensor, dtype: str) -> float:
    """How far the rows of a probe are from what the library says.

    In float32 the largest of all rows. In bfloat16 a single row may be far off by right
    (a mixture's router that chooses another expert): of each place in the tree the middle prompt,
    and of those the largest.
    """
    errors = relative_errors(got, want)
    if dtype != "float32":
        errors = errors.view(len(_LENGTHS), -1).median(dim=0).values
    return float(errors.max())


def _put(array: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)
