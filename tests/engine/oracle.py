"""The oracle: float64, one full forward of the library's own model per (user, item).

No cache, no tree. Twenty lines anyone can check; every fast path is compared with it.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from engine.trees.sid_trie import SidTrie
from schemas.semantic_ids import ItemTokens


class Oracle:
    """Scores of semantic IDs by definition."""

    def __init__(self, folder: str, trie: SidTrie, space: ItemTokens, norm: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        self.trie, self.space, self.norm = trie, space, norm

    @torch.inference_mode()
    def score(
        self, prompt: list[int], sid: int, soft: dict[int, torch.Tensor] | None = None
    ) -> float:
        """Sum over levels of log p(token | prompt, tokens before); `soft` replaces embeddings."""
        codes = [int(c) for c in self.trie.codes_of_sid[sid] if c >= 0]
        tokens = self.tokens(sid)
        embedded = self.model.get_input_embeddings()(torch.tensor(prompt + tokens))
        for position, vector in (soft or {}).items():
            embedded[position] = vector.to(embedded)
        logits = self.model(inputs_embeds=embedded[None], use_cache=False).logits[0]
        total = 0.0
        for level, token in enumerate(tokens):
            row = logits[len(prompt) - 1 + level].double()
            allowed = self._softmax_set(codes[:level], level, len(row))
            total += float(row[token] - row[allowed].logsumexp(0))
        return total

    def _softmax_set(self, before: list[int], level: int, vocab: int) -> torch.Tensor:
        if self.norm == "full_vocab":
            return torch.arange(vocab)
        if self.norm == "sid_range":
            return torch.from_numpy(np.unique(np.concatenate(self.space.token_ids)))
        if self.norm == "level":
            return torch.from_numpy(self.space.token_ids[level])
        rows = self.trie.codes_of_sid
        below = rows[(rows[:, :level] == before).all(axis=1)][:, level]
        return torch.from_numpy(self.space.token_ids[level][np.unique(below[below >= 0])])

    def tokens(self, sid: int) -> list[int]:
        """Token ids of a SID or text."""
        codes = np.asarray([c for c in self.trie.codes_of_sid[sid] if c >= 0], dtype=np.int64)
        return [int(t) for t in self.space.tokens(np.arange(len(codes)), codes)]

    @torch.inference_mode()
    def labels(
        self, prompt: list[int], sid: int, suffix: list[int], labels: list[int], *, softmax: bool
    ) -> list[float]:
        """log p of labels behind prompt, item and suffix: one prompt of its own."""
        tokens = torch.tensor([prompt + self.tokens(sid) + suffix])
        row = self.model(input_ids=tokens, use_cache=False).logits[0, -1].double()
        chosen = row[torch.tensor(labels)]
        whole = chosen if softmax else row
        return [float(x) for x in chosen - whole.logsumexp(0)]

    @torch.inference_mode()
    def embed(self, prompt: list[int], pooling: str) -> np.ndarray:
        """The last hidden state, behind the final norm, of the last token or averaged."""
        tokens = torch.tensor([prompt])
        hidden = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
        return (hidden[-1] if pooling == "last" else hidden.mean(dim=0)).float().numpy()

    def all_scores(self, prompt: list[int], **kwargs: object) -> np.ndarray:
        """Scores of every SID of the catalog `[S]`."""
        return np.asarray([self.score(prompt, s, **kwargs) for s in range(self.trie.num_sids)])  # type: ignore[arg-type]
