"""How time and memory grow: users through the whole pipeline, and a large catalog under a beam.

The pipeline runs as a user would run it, in a process of its own, with the fake backend, so that
what is seen is the pipeline. The catalog part builds and saves a trie, and runs beams over it with
a tiny model. stdout: a line per figure, then one JSON document.

    python benchmarks/sizes.py
    python benchmarks/sizes.py --users 20000 200000 1000000 --items 1000000
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if Path(p).resolve() != _HERE)]

import numpy as np  # noqa: E402 - after this folder has left the front of the path
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import yaml  # noqa: E402

CANDIDATES, HISTORY, VECTOR, CODES, PER_FILE = 100, 20, 64, 64, 50_000


def write_tables(folder: Path, num_users: int, num_items: int = 50_000) -> Path:
    """Random users, candidates and catalog, and a configuration over them."""
    rng = np.random.default_rng(0)
    items = pa.array([f"item{i:07d}" for i in range(num_items)])
    codes = pa.array(rng.integers(0, CODES, num_items * 3).astype(np.int32))
    sids = pa.FixedSizeListArray.from_arrays(codes, 3)
    pq.write_table(pa.table({"item_id": items, "sid": sids}), folder / "catalog.parquet")

    def lists(rows: int, size: int) -> pa.Array:
        offsets = np.arange(0, rows * size + 1, size, dtype=np.int32)
        chosen = items.take(pa.array(rng.integers(0, num_items, rows * size)))
        return pa.ListArray.from_arrays(pa.array(offsets), chosen)

    for name in ("users", "candidates"):
        (folder / name).mkdir()
    for first in range(0, num_users, PER_FILE):
        rows = min(PER_FILE, num_users - first)
        ids = [f"user{i:09d}" for i in range(first, first + rows)]
        flat = pa.array(rng.normal(size=rows * VECTOR).astype(np.float32))
        vectors = pa.FixedSizeListArray.from_arrays(flat, VECTOR)
        users = {"user_id": ids, "embedding": vectors, "history": lists(rows, HISTORY)}
        pq.write_table(pa.table(users), folder / "users" / f"{first:09d}.parquet")
        candidates = {"user_id": ids, "item_ids": lists(rows, CANDIDATES)}
        pq.write_table(pa.table(candidates), folder / "candidates" / f"{first:09d}.parquet")
    config = {
        "surface": "home",
        "ds": "2026-01-01",
        "engine": {"backend": "fake"},
        "sid": {"sizes": [CODES] * 3, "tokens": [f"<{level}_{{code}}>" for level in "abc"]},
        "prompt": {"template": "{user_vector}{history}"},
        "inputs": {"users": "users", "catalog": "catalog.parquet", "candidates": "candidates"},
        "task": {"k": 20, "score": {}},
        "output": {"path": "out"},
        "run": {"workers": 0},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def measure_run(num_users: int) -> dict[str, Any]:
    """Seconds and peak memory of one run. Peaks of children only rise: measure small runs first."""
    with tempfile.TemporaryDirectory(prefix="nightshelf-sizes-") as folder:
        config = write_tables(Path(folder), num_users)
        command = [sys.executable, "-m", "jobs", "run", str(config), "--output", "json"]
        done = subprocess.run(command, cwd=_HERE.parent, capture_output=True, text=True, check=True)
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    return {
        "users": num_users,
        "seconds": summary["seconds"],
        "engine_seconds": summary["engine_seconds"],
        "users_per_s": summary["users_per_s"],
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
    }


def measure_catalog(num_items: int, levels: int = 4, codes: int = 256) -> dict[str, Any]:
    """Build and save a trie; then beams of 64 over it: the share of time outside the model."""
    from engine.sid_trie import build_trie

    rng = np.random.default_rng(0)
    table = rng.integers(0, codes, (num_items, levels)).astype(np.int32)
    with tempfile.TemporaryDirectory(prefix="nightshelf-sizes-") as folder:
        started = time.perf_counter()
        trie = build_trie(table)
        trie.save(folder)
        seconds = time.perf_counter() - started
        outside = _share_outside_the_model(Path(folder), trie, levels, codes)
    return {
        "items": num_items,
        "build_and_save_s": round(seconds, 2),
        "trie_mb": round(trie.num_bytes / 1e6, 1),
        "beam_share_outside_model": round(outside, 3),
    }


def _share_outside_the_model(folder: Path, trie: Any, levels: int, codes: int) -> float:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from engine.backend import PackedPrompts
    from engine.beam_search import beam_search
    from engine.device_trie import to_device
    from engine.torch_backend import TorchBackend
    from schemas.semantic_ids import BoundSidSpace, SidSpace

    config = Qwen3Config(
        vocab_size=levels * codes, hidden_size=128, intermediate_size=384, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    backend = TorchBackend(str(folder / "model"), "float32", torch.device("cpu"))
    space = SidSpace((codes,) * levels, tuple(f"<{lv}_{{code}}>" for lv in range(levels)))
    ids = np.arange(levels * codes).reshape(levels, codes)
    index = to_device(trie, BoundSidSpace(space, tuple(ids)), "full_vocab", torch.device("cpu"))
    users, length, widths = 64, 32, (64,) * (levels - 1)
    inside = 0.0

    def timed(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            started = time.perf_counter()
            out = method(*args, **kwargs)
            inside += time.perf_counter() - started
            return out

        return call

    for name in ("prefill", "extend", "log_probs"):
        setattr(backend, name, timed(getattr(backend, name)))
    shares = []
    for _ in range(5):
        inside, started = 0.0, time.perf_counter()
        prompts = PackedPrompts(
            token_ids=np.random.default_rng(1).integers(0, levels * codes, users * length),
            offsets=np.arange(users + 1) * length,
            static_prefix=np.empty(0, dtype=np.int64),
            soft_positions=np.empty(0, dtype=np.int64),
            soft_vectors=None,
        )
        context = backend.prefill(prompts, users * sum(widths))
        at = torch.arange(users)
        beam_search(backend, context, index, prompts=at, widths=widths, k=20)
        shares.append(1 - inside / (time.perf_counter() - started))
    return float(np.median(shares))


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, nargs="*", default=[20_000, 200_000])
    parser.add_argument("--items", type=int, default=1_000_000)
    args = parser.parse_args()
    runs = []
    for num_users in sorted(args.users):
        runs.append(measure_run(num_users))
        print(runs[-1], file=sys.stderr)
    catalog = measure_catalog(args.items)  # last: a child starts with the memory of its parent
    print(catalog, file=sys.stderr)
    print(json.dumps({"runs": runs, "catalog": catalog}))


if __name__ == "__main__":
    main()
