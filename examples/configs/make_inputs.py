"""Make tiny inputs for the configurations beside this file: tables, a random model, a projector.

    python examples/configs/make_inputs.py

The model is not trained: what it recommends means nothing. Its files, its tokens and the tables are
what a real run needs. `examples/movielens` trains one that recommends well.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

USERS, ITEMS, VECTOR = 50, 200, 8
SIZES = (8, 8, 8)  # codes of each level
SPECIAL = ("<user>", "<hist>", "<taste>", "<next>")  # tokens that a template may use
WIDTH = 32  # of the model
GENRES = ("ambient", "folk", "house", "jazz", "metal", "opera")
COUNTRIES = ("SE", "DE", "BR")
HERE = Path(__file__).resolve().parent


def make_tokenizer() -> Tokenizer:
    """Bytes, the words of the labels, special tokens, and a token for each code of each level."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("y", "e"), ("ye", "s"), ("n", "o")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    sids = [f"<{'abc'[lv]}_{code}>" for lv, size in enumerate(SIZES) for code in range(size)]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*SPECIAL, *sids)])
    return tokenizer


def make_model(folder: Path) -> None:
    """A random Qwen3 of two layers, as `save_pretrained` writes it, with its tokenizer."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def make_projector(folder: Path, *, num_tokens: int = 1) -> None:
    """A linear projector: user vectors to soft tokens as wide as the model."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = {
        "kind": "linear",
        "input_dim": VECTOR,
        "output_dim": WIDTH,
        "num_tokens": num_tokens,
    }
    (folder / "projector.json").write_text(json.dumps(spec))
    generator = torch.Generator().manual_seed(1)
    weight = 0.1 * torch.randn(num_tokens * WIDTH, VECTOR, generator=generator)
    save_file({"weight": weight}, folder / "projector.safetensors")


def make_tables(folder: Path) -> None:
    """Users, catalog, candidates for two surfaces, and exclusions."""
    rng = np.random.default_rng(0)
    users = [f"u{u:03d}" for u in range(USERS)]
    items = [f"i{i:03d}" for i in range(ITEMS)]

    def some(least: int, most: int) -> list[str]:
        return [items[i] for i in rng.choice(ITEMS, rng.integers(least, most), replace=False)]

    def codes(rows: int) -> np.ndarray:
        return np.stack([rng.integers(0, size, rows) for size in SIZES], axis=1)

    genre = rng.choice(GENRES, USERS)
    tables = {
        "users": {
            "user_id": users,
            "embedding": pa.array(
                rng.normal(size=(USERS, VECTOR)).astype(np.float32).tolist(),
                pa.list_(pa.float32(), VECTOR),
            ),
            "history": [some(1, 12) for _ in users],
            "user_sid": codes(USERS).tolist(),  # one semantic ID: the user's own
            "profile": [f"likes {g}" for g in genre],
            "country": rng.choice(COUNTRIES, USERS),
        },
        "catalog": {
            "item_id": items,
            "sid": pa.array(codes(ITEMS).tolist(), pa.list_(pa.int32())),
            "popularity": rng.zipf(1.6, ITEMS),
            "title": [f"{rng.choice(GENRES)} no. {i}" for i in range(ITEMS)],
            "markets": [sorted(rng.choice(COUNTRIES, 2, replace=False)) for _ in items],
            "adult": rng.random(ITEMS) < 0.1,
        },
        "candidates/home": {"user_id": users, "item_ids": [some(20, 40) for _ in users]},
        "candidates/email": {"user_id": users, "item_ids": [some(5, 10) for _ in users]},
        "exclusions": {"user_id": users * 2, "item_id": rng.choice(items, 2 * USERS)},
    }
    for name, columns in tables.items():
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path)


def make(build: Path) -> None:
    """Everything that the configurations name, below one folder."""
    make_tables(build)
    make_model(build / "model")
    make_projector(build / "projector")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--build", type=Path, default=HERE / "build", help="where to write")
    build = parser.parse_args().build
    make(build)
    print(f"wrote tables, model and projector to {build}")


if __name__ == "__main__":
    main()
