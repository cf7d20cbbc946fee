"""A random model made as sure of its catalog as a trained one: peaked, and on legal paths.

A random model spreads its mass over the whole vocabulary, so that nothing can be said of a bound. A
trained one keeps nearly all of it on the catalog's paths. Here the log-probabilities that a backend
gives are multiplied by `alpha` and normalised over all children that a prefix has in the catalog.
The backend does all of its work, the whole head included; what is added is a softmax over few
numbers.

Legend: R rows read, M targets, V nodes of the trie.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.backend import NodeBatch, Norm, Targets
from engine.score_norms import log_softmax_of_targets
from engine.trees.device_trie import DeviceTrie


class Sharpened:
    """A backend over one catalog; `alpha` 1 leaves it as flat as it is."""

    def __init__(self, backend: Any, index: DeviceTrie, alpha: float) -> None:
        self._backend, self._index, self._alpha = backend, index, alpha
        self._nodes: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()  # trie node of each row
        trie = index.trie
        parent = index.put(trie.parent.clip(min=0).astype("int64"))
        self._codes = int(index.code.max()) + 1
        self._keys = parent * self._codes + index.code  # ascending, as nodes are
        self.perplexity: dict[int, list[float]] = {}  # by depth of the prefix

    @property
    def facts(self) -> Any:
        """Those of the backend."""
        return self._backend.facts

    def prefill(self, prompts: Any, max_nodes: int) -> Any:
        """A context of the backend, whose rows are at the root."""
        context = self._backend.prefill(prompts, max_nodes)
        self._nodes[context] = torch.zeros(prompts.num_prompts, dtype=torch.int64)
        return context

    def extend(self, context: Any, nodes: NodeBatch) -> None:
        """The backend's, remembering where in the trie each new row is."""
        known = self._nodes[context][: context.num_rows]
        every = torch.cat([known, torch.zeros_like(nodes.token)])
        column = self._column_of(nodes.token)
        for depth in range(1, nodes.max_depth + 1):  # a parent may be a node of this call
            here = (nodes.depth == depth).nonzero()[:, 0]
            child = self._child(every[nodes.parent[here]], column[here])
            every[len(known) + here] = child
        self._nodes[context] = every
        self._backend.extend(context, nodes)

    def log_probs(self, context: Any, rows: Tensor, targets: Targets, norm: Norm) -> Tensor:
        """Normalised over all children that each row's prefix has in the catalog."""
        index, node = self._index, self._nodes[context][rows]
        count = index.num_children[node]
        begin = count.cumsum(0) - count
        row = torch.repeat_interleave(torch.arange(len(rows)), count)
        child = torch.arange(len(row)) + (index.first_child[node] - begin)[row]
        every = Targets(row=row, column=index.code[child], columns=targets.columns)
        found = self._backend.log_probs(context, rows, every, norm)
        found = log_softmax_of_targets(self._alpha * found, every, len(rows))
        self._remember(found, row, index.depth[node])
        wanted = self._child(node[targets.row], targets.column)
        place = begin[targets.row] + wanted - index.first_child[node[targets.row]]
        return found[place.clamp(0, len(found) - 1)]  # padding may point anywhere

    def embed(self, *args: Any) -> Any:
        """The backend's."""
        return self._backend.embed(*args)

    def close(self) -> None:
        """The backend's."""
        self._backend.close()

    def _column_of(self, token: Tensor) -> Tensor:
        ids = torch.from_numpy(self._index.columns[0].token_ids)
        order = ids.argsort()
        return order[torch.searchsorted(ids[order], token)]

    def _child(self, node: Tensor, column: Tensor) -> Tensor:
        key = node * self._codes + column
        return torch.searchsorted(self._keys[1:], key).clamp(max=len(self._keys) - 2) + 1

    def _remember(self, log_prob: Tensor, row: Tensor, depth: Tensor) -> None:
        entropy = torch.zeros(len(depth)).index_add(0, row, -log_prob.exp() * log_prob)
        for level in depth.unique().tolist():
            self.perplexity.setdefault(level, []).append(
                float(entropy[depth == level].exp().mean())
            )

    def mean_perplexity(self) -> list[float]:
        """Effective number of children of a prefix, by its length."""
        return [round(_mean(self.perplexity[level]), 1) for level in sorted(self.perplexity)]


def _mean(numbers: Iterable[float]) -> float:
    values = list(numbers)
    return sum(values) / len(values)
