"""The work that all contenders do: a random model, a catalog, users with prompts and candidates.

The model has the shape of Qwen3-0.6B with fewer layers and a vocabulary grown by the SID tokens. A
prompt is a history: random SID tokens in level order. Codes are uniform, so that candidates share
as few prefixes as candidates can; a learned codebook shares more.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, models
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.sid_trie import SidTrie, build_trie
from schemas.requests import Ints, Ragged, UserBatch
from schemas.semantic_ids import BoundSidSpace, SidSpace
from schemas.settings import RunConfig

LEVELS = 3
PATTERNS = ("<a_{code}>", "<b_{code}>", "<c_{code}>")
TEXT_VOCAB = 151_936  # rows of Qwen3-0.6B's embedding; the SID tokens come behind them
FULL_LAYERS = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the work."""

    layers: int
    users: int
    candidates: int
    width: int
    k: int
    prompt_tokens: int
    items: int
    codes: int
    dtype: str
    device: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """U users with prompts of P tokens and C candidates each, over a catalog of S distinct SIDs."""

    shape: Shape
    folder: str  # the checkpoint
    trie: SidTrie
    space: BoundSidSpace
    prompt_codes: NDArray[np.int64]  # [U, P]
    candidates: Ints  # [U, C] items

    @property
    def prompts(self) -> torch.Tensor:
        """Token ids of the prompts `[U, P]`."""
        level = np.arange(self.shape.prompt_tokens) % LEVELS
        return torch.from_numpy(self.space.table[level, self.prompt_codes])

    def sid_tokens(self, sids: Ints) -> torch.Tensor:
        """Token ids of semantic IDs `[..., 3]`."""
        codes = self.trie.codes_of_sid[sids].astype(np.int64)
        return torch.from_numpy(self.space.table[np.arange(LEVELS), codes])

    @property
    def candidate_tokens(self) -> torch.Tensor:
        """Token ids of the candidates `[U, C, 3]`."""
        return self.sid_tokens(self.trie.sid_of_item[self.candidates].astype(np.int64))

    @property
    def users(self) -> UserBatch:
        """The same users as the engine takes them."""
        num_users, length = self.prompt_codes.shape
        return UserBatch(
            num_users=num_users,
            user_sids=Ragged.from_lengths(np.full(num_users, length), self.prompt_codes.ravel()),
            candidates=Ragged.from_lengths(
                np.full(num_users, self.shape.candidates), self.candidates.ravel()
            ),
        )

    def config(self, task: str) -> RunConfig:
        """The engine's settings for `score` or `generate`."""
        shape = self.shape
        return RunConfig.model_validate(
            {
                "surface": "benchmark",
                "engine": {
                    "backend": "torch",
                    "model": self.folder,
                    "dtype": shape.dtype,
                    "device": shape.device,
                },
                "sid": {"sizes": self.space.space.sizes, "tokens": PATTERNS},
                "prompt": {"template": "{user_sid}", "max_tokens": shape.prompt_tokens},
                "inputs": {"users": "unused", "catalog": "unused", "candidates": "unused"},
                "task": {
                    "k": shape.k,
                    task: {"width": shape.width} if task == "generate" else {},
                },
                "output": {"path": "unused"},
            }
        )


def make_workload(shape: Shape, folder: Path) -> Workload:
    """Write the checkpoint into `folder` and draw everything else."""
    rng = np.random.default_rng(shape.seed)
    space = SidSpace((shape.codes,) * LEVELS, PATTERNS)
    codes = rng.integers(0, shape.codes, (shape.items, LEVELS), dtype=np.int32)
    candidates = [
        rng.choice(shape.items, shape.candidates, replace=False) for _ in range(shape.users)
    ]
    tokenizer = save_tokenizer(space, folder)
    save_model(shape, folder)
    return Workload(
        shape=shape,
        folder=str(folder),
        trie=build_trie(codes),
        space=space.bind(tokenizer.token_to_id),
        prompt_codes=rng.integers(0, shape.codes, (shape.users, shape.prompt_tokens)),
        candidates=np.stack(candidates).astype(np.int64),
    )


def save_model(shape: Shape, folder: Path) -> None:
    """A Qwen3-0.6B with random weights and `shape.layers` layers."""
    torch.manual_seed(shape.seed)
    config = Qwen3Config(
        vocab_size=TEXT_VOCAB + LEVELS * shape.codes,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=shape.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(getattr(torch, shape.dtype)).save_pretrained(folder)


def save_tokenizer(space: SidSpace, folder: Path) -> Tokenizer:
    """Placeholder words up to `TEXT_VOCAB`, then the SID tokens."""
    words = {f"w{i}": i for i in range(TEXT_VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.add_tokens(
        [
            AddedToken(space.token(level, code), normalized=False)
            for level, size in enumerate(space.sizes)
            for code in range(size)
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer
