"""The checkpoint that every contender loads: a Qwen3 of real shape with random weights.

Layers may be cut; whatever prints a result says so. The vocabulary is that of Qwen3 and the
semantic-ID tokens behind it. A linear projector stands beside the model for `{user_vector}`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models
from transformers import Qwen3Config, Qwen3ForCausalLM

from schemas.semantic_ids import SidSpace

LEVELS = 3
PATTERNS = ("<a_{code}>", "<b_{code}>", "<c_{code}>")
VECTOR = 64  # numbers of a user vector
SOFT_TOKENS = 8  # soft tokens that a user vector becomes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of one member of the Qwen3 family (its config.json)."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int  # of the whole model
    text_vocab: int  # rows of its embedding; the SID tokens come behind them


SHAPES = {
    "qwen3-0.6b": ModelShape(
        hidden=1024, intermediate=3072, heads=16, kv_heads=8, head_dim=128, layers=28,
        text_vocab=151_936,
    ),
    "qwen3-1.7b": ModelShape(
        hidden=2048, intermediate=6144, heads=16, kv_heads=8, head_dim=128, layers=28,
        text_vocab=151_936,
    ),
    "tiny": ModelShape(
        hidden=32, intermediate=64, heads=4, kv_heads=2, head_dim=8, layers=2, text_vocab=64
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A saved model, its tokenizer and its projector; and what was written into them."""

    folder: str
    projector: str
    space: SidSpace
    shape: ModelShape
    name: str
    layers: int
    dtype: str
    vocab_size: int

    @property
    def label(self) -> str:
        """What it is, in words."""
        cut = f"{self.layers} of {self.shape.layers} layers"
        return f"{self.name} shape, {cut}, random weights, vocabulary {self.vocab_size:,}"

    @property
    def tokens(self) -> list[str]:
        """Text of every token, in order of the ids: placeholder words, then the SID tokens."""
        sids = [
            self.space.token(level, code)
            for level, size in enumerate(self.space.sizes)
            for code in range(size)
        ]
        return [f"w{i}" for i in range(self.shape.text_vocab)] + sids


def make_checkpoint(
    folder: Path, *, name: str, layers: int, codes: int, dtype: str, seed: int
) -> Checkpoint:
    """Write a checkpoint and a projector below `folder`."""
    shape = SHAPES[name]
    checkpoint = Checkpoint(
        folder=str(folder / "model"),
        projector=str(folder / "projector"),
        space=SidSpace((codes,) * LEVELS, PATTERNS),
        shape=shape,
        name=name,
        layers=layers,
        dtype=dtype,
        vocab_size=shape.text_vocab + LEVELS * codes,
    )
    torch.manual_seed(seed)
    _save_model(checkpoint)
    _save_tokenizer(checkpoint)
    _save_projector(checkpoint)
    return checkpoint


def _save_model(checkpoint: Checkpoint) -> None:
    shape = checkpoint.shape
    config = Qwen3Config(
        vocab_size=checkpoint.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=checkpoint.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).to(getattr(torch, checkpoint.dtype))
    model.save_pretrained(checkpoint.folder)


def _save_tokenizer(checkpoint: Checkpoint) -> None:
    texts, first = checkpoint.tokens, checkpoint.shape.text_vocab
    words = {text: i for i, text in enumerate(texts[:first])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts[first:]])
    folder = Path(checkpoint.folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    # Peers load it through transformers, which must not guess another tokenizer from the model.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "w0",
        "bos_token": "w1",
        "eos_token": "w2",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _save_projector(checkpoint: Checkpoint) -> None:
    folder = Path(checkpoint.projector)
    folder.mkdir()
    spec = {
        "kind": "linear",
        "input_dim": VECTOR,
        "output_dim": checkpoint.shape.hidden,
        "num_tokens": SOFT_TOKENS,
    }
    (folder / "projector.json").write_text(json.dumps(spec), encoding="utf-8")
    weight = torch.randn(SOFT_TOKENS * checkpoint.shape.hidden, VECTOR) * 0.02
    save_file({"weight": weight}, folder / "projector.safetensors")
