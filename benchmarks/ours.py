"""The engine on the workload, the passes it made, and the matmuls that those passes cannot avoid.

Legend: U users, C candidates of a user, K results.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from benchmarks.workload import Workload
from engine.backend import (
    Backend,
    BackendFacts,
    Context,
    NodeBatch,
    Norm,
    PackedPrompts,
    Targets,
)
from engine.worker import Engine
from schemas.requests import BatchResult, Ints

# Of one matmul with the head, so that [rows, vocabulary] is never held: small for a CPU's cache.
_HEAD_COLUMNS = {"cpu": 2048, "cuda": 16_384}


@dataclass(slots=True)
class Passes:
    """Rows of each pass through the layers, and of each read through the head."""

    body: list[int] = field(default_factory=list)
    head: list[int] = field(default_factory=list)


class Watched:
    """A backend that notes how many rows each call has, and otherwise is the one it holds."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.passes = Passes()

    @property
    def facts(self) -> BackendFacts:
        """Sizes, precision and device."""
        return self._backend.facts

    def prefill(self, prompts: PackedPrompts, max_nodes: int) -> Context:
        """Note the prompt tokens."""
        self.passes.body.append(len(prompts.token_ids))
        return self._backend.prefill(prompts, max_nodes)

    def extend(self, context: Context, nodes: NodeBatch) -> None:
        """Note the nodes."""
        self.passes.body.append(len(nodes.token))
        self._backend.extend(context, nodes)

    def log_probs(self, context: Context, rows: Tensor, targets: Targets, norm: Norm) -> Tensor:
        """Note the rows read."""
        self.passes.head.append(len(rows))
        return self._backend.log_probs(context, rows, targets, norm)

    def close(self) -> None:
        """Free the device."""
        self._backend.close()


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call of the engine said, and the rows it took."""

    scores: NDArray[np.float32]  # [U, C] or [U, K]
    sids: Ints | None  # [U, K] when generating; -1: no result
    rows: int  # rows forwarded
    rows_naive: int  # rows if every candidate and every beam sent the prompt again
    passes: Passes


class Ours:
    """One task of the engine, from prompts to scores."""

    def __init__(self, work: Workload, backend: Backend, task: str) -> None:
        self._work = work
        self._watched = Watched(backend)
        self._engine = Engine(work.config(task), work.trie, self._watched)
        self._users = work.users
        self._generates = task == "generate"

    def __call__(self) -> Answer:
        """Build the prompts, pack the users, run every pack."""
        shape = self._work.shape
        self._watched.passes = Passes()
        columns = shape.k if self._generates else shape.candidates
        scores = np.full((shape.users, columns), -np.inf, dtype=np.float32)
        sids = np.full((shape.users, columns), -1, dtype=np.int64)
        rows = naive = 0
        prepared = self._engine.prepare(self._users)
        for pack in prepared.packs:
            result = self._engine.run(prepared, pack)
            self._take(result, pack, scores, sids)
            rows += int(result.rows.sum())
            naive += int(result.rows_naive.sum())
        return Answer(scores, sids if self._generates else None, rows, naive, self._watched.passes)

    def _take(
        self, result: BatchResult, pack: Ints, scores: NDArray[np.float32], sids: Ints
    ) -> None:
        if result.scored is not None and not self._generates:
            scores[pack] = result.scored.score.reshape(len(pack), -1)  # candidates keep their order
        if result.generated is not None:
            beams = result.generated
            first = np.searchsorted(beams.user, beams.user)
            place = np.arange(len(beams.user)) - first
            scores[pack[beams.user], place] = beams.score
            sids[pack[beams.user], place] = beams.sid


class BareMatmuls:
    """The linear layers at the row counts of `Passes`, on random rows, and nothing else.

    No attention, norm, rotary embedding, softmax or host work: the least time that the distinct
    rows can take on this machine with these matmuls.
    """

    def __init__(self, model: PreTrainedModel, passes: Passes) -> None:
        head: nn.Linear = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._head = head
        self._layers = [m for m in model.base_model.modules() if isinstance(m, nn.Linear)]
        self._passes = passes
        widths = {layer.in_features for layer in [*self._layers, head]}
        most = max(passes.body + passes.head)
        self._rows = {width: torch.randn(most, width).to(head.weight) for width in widths}

    @torch.inference_mode()
    def __call__(self) -> None:
        """Multiply."""
        for rows in self._passes.body:
            for layer in self._layers:
                functional.linear(self._rows[layer.in_features][:rows], layer.weight)
        for rows in self._passes.head:
            hidden = self._rows[self._head.in_features][:rows]
            step = _HEAD_COLUMNS[hidden.device.type]
            for begin in range(0, self._head.out_features, step):
                functional.linear(hidden, self._head.weight[begin : begin + step])
