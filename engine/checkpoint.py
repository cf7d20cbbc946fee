"""Sizes of a checkpoint's vocabulary, read without torch: the tokenizer's ids, what config.json
says, and the rows of the embedding and of the head.

A safetensors file starts with the length of a JSON header (8 bytes, little-endian) and the header:
name, dtype, shape and place of every tensor. Nothing else of the file is read here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tokenizers import Tokenizer as FastTokenizer

from engine.tokenizer import _vocab_size
from schemas.errors import EngineError, quoted

_EMBEDDING = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_HEAD = ("lm_head.weight", "embed_out.weight")
_LARGEST_HEADER = 100 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularySizes:
    """How many token ids each part of a checkpoint knows; None where the part is not there."""

    tokenizer: int  # largest id + 1, added tokens included
    config: int | None  # vocab_size in config.json
    embedding: int | None  # rows of the input embedding
    head: int | None  # rows of the head; None too when it is tied to the embedding

    @property
    def smallest(self) -> int | None:
        """The first id that some part of the model does not have."""
        known = [size for size in (self.config, self.embedding, self.head) if size is not None]
        return min(known, default=None)


def lacking(folder: str) -> Iterator[EngineError]:
    """What a folder lacks to be a checkpoint that any backend can load, each as its error."""
    root = Path(folder)
    if not (root / "config.json").is_file():
        yield EngineError(
            "the model folder is not a checkpoint",
            expected="a config.json in it",
            where=folder,
            do="Save the model with save_pretrained(folder).",
            field="engine.model",
        )
    if root.is_dir() and not list(root.glob("*.safetensors")):
        yield EngineError(
            "the model has no safetensors weights",
            expected="*.safetensors (pickled weights are not loaded)",
            got=", ".join(sorted(path.name for path in root.iterdir())[:10]) or "an empty folder",
            where=folder,
            do="Save the model with save_pretrained(folder).",
            field="engine.model",
        )


def vocabulary_sizes(folder: str) -> VocabularySizes:
    """The vocabulary sizes of a checkpoint folder with a tokenizer.json.

    Raises:
        EngineError: config.json or a safetensors file is missing or damaged.
    """
    root = Path(folder)
    vocabulary = FastTokenizer.from_file(str(root / "tokenizer.json")).get_vocab()
    rows = _first_dimensions(root)
    return VocabularySizes(
        tokenizer=max(vocabulary.values(), default=-1) + 1,
        config=_vocab_size(root / "config.json"),
        embedding=_rows_of(rows, _EMBEDDING),
        head=_rows_of(rows, _HEAD),
    )


def _first_dimensions(root: Path) -> dict[str, int]:
    """Rows of each matrix of the checkpoint; adapters that lie beside it do not count."""
    rows: dict[str, int] = {}
    for path in sorted(root.glob("*.safetensors")):
        if path.name.startswith("adapter"):
            continue
        try:
            with path.open("rb") as handle:
                header, _ = safetensors_header(handle)
        except (OSError, ValueError) as err:
            raise EngineError(
                "a safetensors file cannot be read", got=quoted(str(err)), where=str(path)
            ) from err
        rows |= {name: t["shape"][0] for name, t in header.items() if len(t["shape"]) == 2}
    return rows


def _rows_of(rows: dict[str, int], endings: tuple[str, ...]) -> int | None:
    return next((rows[name] for name in sorted(rows) if name.endswith(endings)), None)


def safetensors_header(handle: BinaryIO) -> tuple[dict[str, dict[str, Any]], int]:
    """The tensors of a safetensors file (`dtype`, `shape`, `data_offsets`) and where data starts.

    Raises:
        ValueError: the bytes are not a safetensors header.
    """
    size = int.from_bytes(handle.read(8), "little")
    if not 2 <= size <= _LARGEST_HEADER:
        raise ValueError(f"not a safetensors file: a header of {size} bytes")
    raw = json.loads(handle.read(size))
    if not isinstance(raw, dict):
        raise ValueError("not a safetensors file: the header is not an object")
    raw.pop("__metadata__", None)
    return raw, 8 + size
