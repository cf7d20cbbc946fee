"""What tests are made of: tiny models, random catalogs, and input tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from tokenizers import AddedToken, Tokenizer, models
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.backend import PackedPrompts
from schemas.requests import Ragged
from schemas.semantic_ids import BoundSidSpace, SidSpace

SIZES = (5, 4, 6)
TOKENS = ("<a_{code}>", "<b_{code}>", "<c_{code}>")
TEXT_TOKENS = 20  # ids 0..19 are plain words


def sid_space(sizes: Sequence[int] = SIZES) -> SidSpace:
    letters = "abcdefgh"
    return SidSpace(tuple(sizes), tuple(f"<{letters[i]}_{{code}}>" for i in range(len(sizes))))


def bound_space(sizes: Sequence[int] = SIZES, first: int = TEXT_TOKENS) -> BoundSidSpace:
    space = sid_space(sizes)
    ids: dict[str, int] = {}
    for level, size in enumerate(space.sizes):
        for code in range(size):
            ids[space.token(level, code)] = first + len(ids)
    return space.bind(ids.get)


def random_codes(
    rng: np.random.Generator, num_items: int, sizes: Sequence[int] = SIZES, *, ragged: bool = False
) -> np.ndarray:
    """Codes of items, collisions likely; no SID is ever a prefix of another."""
    codes = np.stack([rng.integers(0, s, num_items) for s in sizes], axis=1).astype(np.int32)
    if ragged:
        # Under some first codes every SID ends early, so that no SID is a prefix of another.
        short = rng.random(sizes[0]) < 0.4
        codes[short[codes[:, 0]], len(sizes) - 1 :] = -1
        shorter = rng.random(sizes[0]) < 0.3
        codes[shorter[codes[:, 0]], 1:] = -1
    return codes


TINY_DECODER = {  # of any architecture: grouped-query attention, ids 0..63
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def tiny_model(
    folder: Path,
    *,
    vocab: int = 64,
    layers: int = 2,
    seed: int = 0,
    hidden: int = 32,
    head_dim: int = 8,
) -> str:
    """A random Qwen3 with grouped-query attention, saved as a checkpoint with a tokenizer."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # larger than the default, so that scores differ clearly
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def save_tokenizer(folder: Path, sizes: Sequence[int] = SIZES) -> None:
    """Words w0..w19, then the SID tokens: the ids of `bound_space`."""
    vocab = {f"w{i}": i for i in range(TEXT_TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    space = sid_space(sizes)
    tokenizer.add_tokens(
        [
            AddedToken(space.token(level, code), normalized=False)
            for level, size in enumerate(space.sizes)
            for code in range(size)
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def prompts_of(tokens: Sequence[Sequence[int]], static_prefix: Sequence[int] = ()) -> PackedPrompts:
    lists = Ragged.from_lists(tokens)
    return PackedPrompts(
        token_ids=lists.values,
        offsets=lists.offsets,
        static_prefix=np.asarray(static_prefix, dtype=np.int64),
        soft_positions=np.empty(0, dtype=np.int64),
        soft_vectors=None,
    )


def random_prompts(
    rng: np.random.Generator, num: int, longest: int = 9, vocab: int = TEXT_TOKENS
) -> list[list[int]]:
    return [rng.integers(0, vocab, rng.integers(1, longest + 1)).tolist() for _ in range(num)]


def write_inputs(
    folder: Path,
    *,
    num_users: int = 40,
    num_items: int = 60,
    seed: int = 0,
    vector_dim: int = 4,
    int_ids: bool = False,
) -> dict[str, pa.Table]:
    """Users, catalog, candidates and exclusions that are all right; returned to be broken."""
    rng = np.random.default_rng(seed)
    items = [i + 100 if int_ids else f"i{i:03d}" for i in range(num_items)]
    users = [u + 7 if int_ids else f"u{u:03d}" for u in range(num_users)]
    codes = random_codes(rng, num_items)

    def pick(most: int) -> list[Any]:
        return [items[i] for i in rng.choice(num_items, rng.integers(1, most), replace=False)]

    tables = {
        "users": pa.table(
            {
                "user_id": users,
                "embedding": pa.array(
                    rng.normal(size=(num_users, vector_dim)).astype(np.float32).tolist(),
                    pa.list_(pa.float32()),
                ),
                "history": [pick(8) for _ in users],
                "segment": [f"s{u % 3}" for u in range(num_users)],
            }
        ),
        "catalog": pa.table(
            {
                "item_id": items,
                "sid": pa.array(codes.tolist(), pa.list_(pa.int32())),
                "popularity": rng.integers(0, 50, num_items),
                "title": [f"Title {i}" for i in items],
            }
        ),
        "candidates": pa.table({"user_id": users, "item_ids": [pick(15) for _ in users]}),
        "exclusions": pa.table(
            {
                "user_id": np.repeat(np.asarray(users), 3).tolist(),
                "item_id": [items[i] for i in rng.integers(0, num_items, 3 * num_users)],
            }
        ),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        pq.write_table(table, folder / f"{name}.parquet")
    return tables


def write_config(folder: Path, **changes: Any) -> Path:
    """A configuration over `write_inputs`; `changes` replace keys, `a__b` for nested ones."""
    config: dict[str, Any] = {
        "surface": "home",
        "ds": "2026-11-28",
        "engine": {"backend": "fake"},
        "sid": {"sizes": list(SIZES), "tokens": list(TOKENS)},
        "prompt": {"template": "Hi {user_vector} saw {history}"},
        "inputs": {
            "users": "users.parquet",
            "catalog": "catalog.parquet",
            "candidates": "candidates.parquet",
            "exclusions": "exclusions.parquet",
        },
        "task": {"k": 5, "score": {}, "generate": {"width": 8}},
        "output": {"path": "out"},
        "run": {"shard_users": 10, "workers": 0},
    }
    for key, value in changes.items():
        *parents, leaf = key.split("__")
        node = config
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is None:
            node.pop(leaf, None)
        else:
            node[leaf] = value
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def hostile_packages(folder: Path) -> Path:
    """A folder of packages that have our names and that nobody may import."""
    for name in ("jobs", "schemas", "engine", "pipelines"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise ImportError('not ours: ' + __file__)")
    return folder
