"""Train a small Qwen3 to name the next film: user vector + films watched -> semantic ID.

Reads  train.parquet, catalog.parquet, embeddings.npz
Writes model/      config.json, generation_config.json, model.safetensors, tokenizer.json
       projector/  projector.json, projector.safetensors

A training example is a user at a moment: the vector of the films watched so far, the latest of
those films, and the films that came next. The loss is on the codes of the films that came next,
each of which sees all before it. The vector is made from the films watched so far only: the
user's final vector already contains the answer.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import torch
from common import (
    CODES,
    EMBEDDING_DIM,
    HISTORY_ITEMS,
    LEVELS,
    SEED,
    Build,
    arguments,
    run_step,
    say,
    user_vector,
)
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

SPECIALS = ("<unk>", "<user>", "<hist>")
BEFORE, AFTER = "<user>", "<hist>"  # the template is "<user>{user_vector}<hist>{history}"
WIDTH = 128
PROJECTOR_WIDTH = 256

BATCH = 32
NEXT_ITEMS = 20  # films after the moment that one example learns from
LEARNING_RATE = 3e-3
WARMUP_STEPS = 30
WEIGHT_DECAY = 0.1
IGNORE = -100  # label of a position without loss


class Projector(nn.Module):
    """User vectors to soft tokens `[B, 1, WIDTH]`; the parameter names are the file format."""

    def __init__(self) -> None:
        """Two layers with random weights."""
        super().__init__()
        self.fc1 = nn.Linear(EMBEDDING_DIM, PROJECTOR_WIDTH)
        self.fc2 = nn.Linear(PROJECTOR_WIDTH, WIDTH)

    def forward(self, vectors: Tensor) -> Tensor:
        """Project `[B, EMBEDDING_DIM]`."""
        hidden = nn.functional.gelu(self.fc1(vectors))
        return self.fc2(hidden)[:, None]

    def save(self, folder: Path) -> None:
        """Write projector.json and projector.safetensors."""
        folder.mkdir(parents=True, exist_ok=True)
        description = {
            "kind": "mlp",
            "input_dim": EMBEDDING_DIM,
            "hidden_dim": PROJECTOR_WIDTH,
            "output_dim": WIDTH,
            "num_tokens": 1,
            "activation": "gelu",
        }
        (folder / "projector.json").write_text(json.dumps(description, indent=2) + "\n")
        save_file(self.state_dict(), folder / "projector.safetensors")


@dataclass(frozen=True)
class Batch:
    """Examples `[B, T]`: history and next films as tokens, labels, and the vectors `[B, D]`."""

    tokens: Tensor
    labels: Tensor
    vectors: Tensor


class Examples:
    """Draws users and moments; the same seed draws the same."""

    def __init__(self, build: Build, tokenizer: Tokenizer) -> None:
        """Read the watched films as rows of the catalog, and the catalog as tokens."""
        catalog = pl.read_parquet(build.table("catalog"))
        texts = ["".join(map(sid_token, range(len(LEVELS)), sid)) for sid in catalog["sid"]]
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        self.item_tokens = np.array([item.ids for item in encoded])
        with np.load(build.embeddings) as file:
            self.item_vectors = file["items"]
        row = pl.DataFrame({"item_id": catalog["item_id"], "row": range(catalog.height)})
        watched = pl.read_parquet(build.table("train")).join(
            row, on="item_id", how="left", maintain_order="left"
        )
        users = watched.group_by("user_id", maintain_order=True).agg("row")
        self.films = [np.array(rows) for rows in users["row"]]
        # Somebody with four times the films is drawn twice as often.
        weights = np.sqrt([len(rows) for rows in self.films])
        self.chances = weights / weights.sum()
        self.draw = np.random.default_rng(SEED)

    def batch(self) -> Batch:
        """A batch, padded at the end; padding has no loss, and nothing before it sees it."""
        length = (HISTORY_ITEMS + NEXT_ITEMS) * len(LEVELS)
        tokens = np.zeros((BATCH, length), dtype=np.int64)
        labels = np.full((BATCH, length), IGNORE, dtype=np.int64)
        vectors = np.zeros((BATCH, EMBEDDING_DIM), dtype=np.float32)
        users = self.draw.choice(len(self.films), BATCH, p=self.chances)
        for example, user in enumerate(users):
            films = self.films[user]
            moment = int(self.draw.integers(1, len(films)))
            first = max(0, moment - HISTORY_ITEMS)
            row = self.item_tokens[films[first : moment + NEXT_ITEMS]].ravel()
            start = (moment - first) * len(LEVELS)
            tokens[example, : len(row)] = row
            labels[example, start : len(row)] = row[start:]
            vectors[example] = user_vector(self.item_vectors[films[:moment]])
        return Batch(*map(torch.from_numpy, (tokens, labels, vectors)))


def main() -> None:
    """Run the step."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=260, help="default: %(default)s")
    args = parser.parse_args()
    build = Build(args.build)
    torch.set_num_threads(2)  # the thread count is part of what makes two builds equal
    torch.manual_seed(SEED)

    tokenizer = make_tokenizer()
    model, projector = make_model(tokenizer.get_vocab_size()), Projector()
    loss = train(model, projector, tokenizer, Examples(build, tokenizer), args.steps)

    logging.disable_progress_bar()
    model.save_pretrained(build.model)
    tokenizer.save(str(build.model / "tokenizer.json"))
    projector.save(build.projector)
    say(f"train: {args.steps} steps, {loss:.2f} nats per code over the last 50")


def sid_token(level: int, code: int) -> str:
    """The text of a code's token."""
    return f"<{LEVELS[level]}_{code}>"


def make_tokenizer() -> Tokenizer:
    """A vocabulary of the special tokens and the codes, nothing else.

    The codes are added tokens, so that `<a_1><b_2>` splits into two without a space between.
    To give codes to a pretrained model, add them to its own tokenizer in the same way.
    """
    tokenizer = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    codes = [sid_token(level, code) for level in range(len(LEVELS)) for code in range(CODES)]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in codes])
    return tokenizer


def make_model(vocab_size: int) -> Qwen3ForCausalLM:
    """A Qwen3 of three layers with random weights."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def train(
    model: Qwen3ForCausalLM,
    projector: Projector,
    tokenizer: Tokenizer,
    examples: Examples,
    steps: int,
) -> float:
    """Train both in place; the mean loss of the last 50 steps comes back."""
    parameters = [*model.parameters(), *projector.parameters()]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
    )
    static = torch.tensor([[tokenizer.token_to_id(BEFORE), tokenizer.token_to_id(AFTER)]])
    embed = model.get_input_embeddings()
    model.train()
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        batch = examples.batch()
        around = embed(static.expand(BATCH, 2))
        # <user> soft-token <hist> film film film …
        inputs = torch.cat(
            [around[:, :1], projector(batch.vectors), around[:, 1:], embed(batch.tokens[:, :-1])], 1
        )
        hidden = model.model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        # The state at <hist> and after each token predicts the token that follows.
        hidden = hidden[:, 2:]
        learned = batch.labels != IGNORE
        logits = model.lm_head(hidden[learned])
        loss = nn.functional.cross_entropy(logits, batch.labels[learned])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-50:]) / len(losses[-50:])


def learning_rate(step: int, steps: int) -> float:
    """A short warm-up, then half a cosine down to 2 %."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return LEARNING_RATE * warmup * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


if __name__ == "__main__":
    run_step(main)
