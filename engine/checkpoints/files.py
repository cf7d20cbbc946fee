"""A checkpoint read without torch: whether its files are whole and of the sizes that config.json
says, and how many ids the tokenizer, config.json, the embedding and the head know.

A safetensors file starts with the length of a JSON header (8 bytes, little-endian) and the header:
name, dtype, shape and place of every tensor. Nothing else of the file is read here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from tokenizers import Tokenizer as FastTokenizer

from engine.checkpoints.architecture import (
    SCORED,
    declared_vocab_size,
    no_config,
    read_config,
    refusals,
    text_config,
)
from schemas.errors import EngineError, quoted

_EMBEDDING = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_HEAD = ("lm_head.weight", "embed_out.weight")
_LARGEST_HEADER = 100 << 20
_MOST_NAMED = 10_000  # missing tensors that are counted: config.json may name layers without end
_INDEX = "model.safetensors.index.json"
LAYER = re.compile(r"(?:model\.|transformer\.|gpt_neox\.)(?:decoder\.)?(?:layers|h)\.(\d+)\.")


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


def checkpoint_problems(folder: str, *, own_forward: bool) -> Iterator[EngineError]:
    """Why a backend cannot load a checkpoint, or would not score it as its library does, as far as
    config.json and the headers of the weights tell. Nothing for a folder that is not there.

    Args:
        own_forward: the backend computes attention and head itself (`BackendSpec.own_forward`).
    """
    root = Path(folder)
    if not root.is_dir():
        return
    found = list(lacking(folder))
    yield from found
    if not (root / "config.json").is_file():
        return
    try:
        raw = read_config(folder)
    except EngineError as err:
        yield err
        return
    yield from refusals(folder, raw, own_forward=own_forward)
    if found:
        return
    yield from _tokenizer_problems(root, text_config(raw).get("vocab_size"))
    problems = list(weight_problems(root))
    yield from problems
    if not problems and own_forward:
        yield from _size_problems(root, raw)


def lacking(folder: str) -> Iterator[EngineError]:
    """What a folder lacks to be a checkpoint that any backend can load, each as its error."""
    root = Path(folder)
    if not (root / "config.json").is_file():
        yield no_config(folder)
    if root.is_dir() and not list(root.glob("*.safetensors")) and not list(root.glob(_INDEX)):
        yield EngineError(
            "the model has no safetensors weights",
            expected="*.safetensors (pickled weights are not loaded)",
            got=", ".join(sorted(path.name for path in root.iterdir())[:10]) or "an empty folder",
            where=folder,
            do="Save the model with save_pretrained(folder).",
            field="engine.model",
        )


def _tokenizer_problems(root: Path, vocab: object) -> Iterator[EngineError]:
    """Ids that a text may become, and that the model has no embedding for."""
    try:
        known = FastTokenizer.from_file(str(root / "tokenizer.json")).get_vocab()
    except Exception:  # the library's own; whoever reads the tokenizer says it
        return
    largest = max(known.values(), default=-1)
    if isinstance(vocab, int) and largest >= vocab:
        yield EngineError(
            "the tokenizer has ids beyond the model's vocabulary",
            expected=f"ids below {vocab} (vocab_size in config.json)",
            got=f"ids up to {largest}",
            where=str(root),
            do="Resize the model's embeddings to the tokenizer (resize_token_embeddings) and save "
            "the checkpoint again; new rows must be trained.",
            field="engine.model",
        )


def weight_problems(root: Path) -> Iterator[EngineError]:
    """Files of weights that are named and not there, that cannot be read, or that are cut short."""
    index = root / _INDEX
    named: set[str] = set()
    if index.is_file() and not (root / "model.safetensors").is_file():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
            yield _unreadable(index, f"{type(err).__name__}: {err}")
            return
    absent = sorted(name for name in named if not (root / name).is_file())
    if absent:
        yield EngineError(
            "files of the model's weights are missing",
            expected=f"the {len(named)} files that {_INDEX} names",
            got=f"{len(absent)} missing, first {quoted(absent[0])}",
            where=str(root),
            do="Copy or download the checkpoint again.",
            field="engine.model",
        )
    for path in weight_files(root):
        try:
            with path.open("rb") as handle:
                tensors, start = safetensors_header(handle)
            end = start + max((t["data_offsets"][1] for t in tensors.values()), default=0)
            size = path.stat().st_size
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as err:
            yield _unreadable(path, str(err))
            continue
        if size != end:
            yield _unreadable(path, f"{size:,} bytes, where its header says {end:,}")


def _unreadable(path: Path, why: str) -> EngineError:
    return EngineError(
        "the model cannot be loaded: a file of its weights cannot be read",
        got=quoted(why),
        where=str(path),
        do="Copy or download the checkpoint again.",
        field="engine.model",
    )


def weight_files(root: Path) -> list[Path]:
    """The files that are loaded; adapters that lie beside them are not."""
    return [p for p in sorted(root.glob("*.safetensors")) if not p.name.startswith("adapter")]


def loaded_files(root: Path) -> list[Path]:
    """The files that the library loads: one, or those of the index, whatever else lies there."""
    if (root / "model.safetensors").is_file():
        return [root / "model.safetensors"]
    try:
        index = json.loads((root / _INDEX).read_text(encoding="utf-8"))
        return [root / name for name in sorted(set(index["weight_map"].values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return weight_files(root)


def _size_problems(root: Path, raw: dict[str, Any]) -> Iterator[EngineError]:
    """Tensors that are not of the sizes in config.json."""
    text = text_config(raw)
    if raw.get("quantization_config") is not None:
        return
    shapes: dict[str, tuple[int, ...]] = {}
    for path in loaded_files(root):
        with path.open("rb") as handle:
            shapes |= {n: tuple(t["shape"]) for n, t in safetensors_header(handle)[0].items()}
    vocab = text.get("vocab_size")
    wrong = [
        name
        for name, shape in sorted(shapes.items())
        if name.endswith(_EMBEDDING + _HEAD) and len(shape) == 2 and shape[0] != vocab
    ]
    if wrong and isinstance(vocab, int):
        shape = shapes[wrong[0]]
        yield EngineError(
            f"the checkpoint's tensor {wrong[0]!r} has another size than config.json says",
            expected=str((vocab, *shape[1:])),
            got=f"{shape}; {len(wrong)} such tensors",
            where=str(root),
            do="Save model and config together, after resizing the embeddings.",
            field="engine.model",
        )
    lacks = list(islice(_missing_tensors(shapes, raw), _MOST_NAMED + 1))
    if lacks:
        many = f"more than {_MOST_NAMED:,}" if len(lacks) > _MOST_NAMED else str(len(lacks))
        yield EngineError(
            "the checkpoint lacks weights, which would be random",
            got=f"{many} missing, first {quoted(lacks[:3])}",
            where=str(root),
            do="Copy or download the checkpoint again, or save it with save_pretrained(folder).",
            field="engine.model",
        )


def _missing_tensors(shapes: Mapping[str, object], raw: Mapping[str, Any]) -> Iterator[str]:
    """Tensors that the others show to be missing: whole layers, those that other layers have (not
    of mixtures, whose layers differ by right), the head where it is not the embedding.
    """
    text = text_config(raw)
    layers = text.get("num_hidden_layers", text.get("n_layer"))
    by_layer: dict[int, set[str]] = {}
    begins: dict[int, str] = {}
    for name in shapes:
        if match := LAYER.match(name):
            at = int(match[1])
            by_layer.setdefault(at, set()).add(name[match.end() :])
            begins[at] = name[: match.start(1)]
    if by_layer and isinstance(layers, int):
        begin = next(iter(begins.values()))
        yield from (f"{begin}{at}.*" for at in range(layers) if at not in by_layer)
    mixed = any("expert" in key and value for key, value in text.items())
    if by_layer and not mixed and text.get("model_type") in SCORED:
        every = set().union(*by_layer.values())
        for at, found in sorted(by_layer.items()):
            yield from (f"{begins[at]}{at}.{name}" for name in sorted(every - found))
    heads = [name for name in shapes if name.endswith(_HEAD)]
    if raw.get("tie_word_embeddings") is False and by_layer and not heads:
        yield _HEAD[0]


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
        config=declared_vocab_size(str(root)),
        embedding=_rows_of(rows, _EMBEDDING),
        head=_rows_of(rows, _HEAD),
    )


def _first_dimensions(root: Path) -> dict[str, int]:
    """Rows of each matrix of the checkpoint; adapters that lie beside it do not count."""
    rows: dict[str, int] = {}
    for path in weight_files(root):
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
    for name, tensor in raw.items():
        if not isinstance(tensor, dict) or not all(
            isinstance(tensor.get(key), list) and all(isinstance(n, int) for n in tensor[key])
            for key in ("shape", "data_offsets")
        ):
            raise ValueError(f"not a safetensors file: tensor {name!r} has no shape or place")
    return raw, 8 + size
