"""A large catalog: seconds and bytes of its trie, and what a beam step spends outside the model.

    python -m benchmarks.catalog                    # 1,000,000 items, 4 levels of 256 codes
    python -m benchmarks.catalog --items 100000 --width 128

The model is small on purpose (3 layers of width 128, random), so that what is around it shows. One
JSON document on stdout.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.backend import PackedPrompts
from engine.backends.torch.backend import TorchBackend
from engine.decoding import Decoding
from engine.generate.beam_search import beam_search
from engine.trees.device_trie import to_device
from engine.trees.sid_trie import SidTrie, build_trie
from schemas.semantic_ids import SidSpace

_TEXT, _PROMPT, _K = 100, 60, 20  # ids of plain tokens, tokens of a prompt, results


def measure(items: int, levels: int, codes: int, width: int, users: int) -> dict[str, Any]:
    """Build, save and load a trie of random SIDs, and search it."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="nightshelf-bench-") as folder:
        started = time.perf_counter()
        trie = build_trie(rng.integers(0, codes, (items, levels)).astype(np.int32))
        trie.save(folder)
        seconds = time.perf_counter() - started
        backend = _small_model(Path(folder) / "model", _TEXT + levels * codes)
        shares = [
            _share_outside(backend, SidTrie.load(folder), codes, width, users) for _ in range(4)
        ]
    return {
        "items": items,
        "sids": trie.num_sids,
        "trie_seconds": round(seconds, 3),
        "trie_bytes": trie.num_bytes,
        "width": width,
        "users": users,
        "share_outside_the_model": round(float(np.median(shares[1:])), 3),  # the first warms up
    }


def _small_model(folder: Path, vocabulary: int) -> TorchBackend:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=384, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return TorchBackend(str(folder), "float32", torch.device("cpu"))


def _share_outside(
    backend: TorchBackend, trie: SidTrie, codes: int, width: int, users: int
) -> float:
    """Of a prefill and a search, the share of the time that is not the backend's."""
    patterns = tuple(f"<{level}_{{code}}>" for level in range(trie.depth))
    space = SidSpace((codes,) * trie.depth, patterns)
    names = [space.token(level, code) for level in range(trie.depth) for code in range(codes)]
    tokens = {name: _TEXT + i for i, name in enumerate(names)}
    index = to_device(trie, space.bind(tokens.get), "full_vocab", torch.device("cpu"))
    timed = _Timed(backend)
    started = time.perf_counter()
    context = timed.prefill(_prompts(users), users * width * trie.depth)
    beam_search(
        Decoding(timed, context, index),
        prompts=torch.arange(users),
        widths=(width,) * trie.depth,
        k=_K,
    )
    return 1 - timed.seconds / (time.perf_counter() - started)


def _prompts(users: int) -> PackedPrompts:
    rng = np.random.default_rng(1)
    return PackedPrompts(
        token_ids=rng.integers(0, _TEXT, users * _PROMPT),
        offsets=np.arange(users + 1) * _PROMPT,
        static_prefix=np.empty(0, dtype=np.int64),
        soft_positions=np.empty(0, dtype=np.int64),
        soft_vectors=None,
    )


class _Timed:
    """The backend, with the time that is spent in it."""

    def __init__(self, backend: TorchBackend) -> None:
        self._backend = backend
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        return self._clocked(found) if callable(found) else found

    def _clocked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        return clocked


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    for name, default in (
        ("items", 1_000_000), ("levels", 4), ("codes", 256), ("width", 64), ("users", 64),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    args = parser.parse_args()
    print(json.dumps(measure(args.items, args.levels, args.codes, args.width, args.users)))


if __name__ == "__main__":
    main()
