"""`task.embed`: the model's hidden state of each user's prompt, instead of a list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor

    from engine.backend import Backend, PackedPrompts


class Embed(Task):
    """Ends at the prefill: one vector per user."""

    name = "embed"

    def run(self, backend: Backend, prompts: PackedPrompts) -> Tensor:
        """Embeddings of the prompts `[B, hidden]` float32."""
        from torch.nn.functional import normalize

        settings = self.config.task.embed
        assert settings is not None, "the run embeds"
        out = backend.embed(prompts, settings.pooling)
        return normalize(out, dim=-1) if settings.normalize else out
