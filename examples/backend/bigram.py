"""A backend of one's own: log p(token | the token before), from a table of counts.

    engine: {backend: "bigram:SPEC", options: {smoothing: 0.5}}     # with this folder on PYTHONPATH

No model, and no attention: a row is the last token it has seen. It is the smallest backend that
scores something learned (the counts of a text file, `engine.model`), and shows all that one needs:
a specification, settings, a context, and the six methods of `engine/backend.py`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from engine.backend import BackendFacts, NodeBatch, Norm, PackedPrompts, Targets
from engine.backends.spec import BackendSpec
from engine.score_norms import log_softmax_of_targets
from schemas.section import Section
from schemas.settings import EngineSettings, Pooling

_VOCAB = 4096


class BigramSettings(Section):
    """What `engine.options` may hold."""

    smoothing: float = Field(1.0, gt=0, le=1e6, description="Added to every count")


class BigramContext:
    """The last token that each row has seen."""

    def __init__(self, last: Tensor) -> None:
        self.last = last  # [rows] int64
        self.num_prompts = len(last)

    @property
    def num_rows(self) -> int:
        """B + nodes."""
        return len(self.last)

    def rewind(self, num_rows: int) -> None:
        """Forget the nodes from row `num_rows` on."""
        self.last = self.last[:num_rows]


class BigramBackend:
    """See engine/backend.py for the contract."""

    def __init__(self, settings: EngineSettings) -> None:
        options = BigramSettings.model_validate(settings.options)
        counts = torch.full((_VOCAB, _VOCAB), options.smoothing, dtype=torch.float64)
        if settings.model is not None:  # lines of token ids
            for line in Path(settings.model).read_text("utf-8").splitlines():
                ids = torch.tensor([int(word) for word in line.split()])
                counts.index_put_((ids[:-1], ids[1:]), torch.tensor(1.0).double(), accumulate=True)
        self._log_p = (counts / counts.sum(dim=1, keepdim=True)).log().float()

    @property
    def facts(self) -> BackendFacts:
        """Sizes, precision and device."""
        return BackendFacts(
            name="bigram",
            vocab_size=_VOCAB,
            hidden_size=0,  # soft tokens of any width; it does not look at them
            embedding_width=1,
            max_positions=1 << 30,
            dtype="float32",
            device=torch.device("cpu"),
        )

    def prefill(self, prompts: PackedPrompts, max_nodes: int) -> BigramContext:
        """The last token of each prompt."""
        return BigramContext(torch.from_numpy(prompts.token_ids[prompts.offsets[1:] - 1]))

    def extend(self, context: BigramContext, nodes: NodeBatch) -> None:
        """A node has seen its own token."""
        context.last = torch.cat([context.last, nodes.token])

    def log_probs(
        self, context: BigramContext, rows: Tensor, targets: Targets, norm: Norm
    ) -> Tensor:
        """log p of the targets behind the last tokens of the rows."""
        log_p = self._log_p[context.last[rows]]
        tokens = torch.from_numpy(targets.columns.token_ids)[targets.column]
        found = log_p[targets.row, tokens]
        if norm.kind == "trie":
            return log_softmax_of_targets(found, targets, len(rows))
        if norm.columns is not None:
            allowed = torch.from_numpy(np.asarray(norm.columns.token_ids))
            found = found - log_p[:, allowed].logsumexp(dim=1)[targets.row]
        return found.clamp(max=0.0)

    def embed(self, prompts: PackedPrompts, pooling: Pooling) -> Tensor:
        """One number per prompt: its length."""
        return torch.from_numpy(prompts.lengths)[:, None].float()

    def close(self) -> None:
        """Nothing to free."""


SPEC = BackendSpec(
    name="bigram",
    create=BigramBackend,
    settings=BigramSettings,
    native_beams=False,
    gpu="never",
    embedding_width=1,
)
