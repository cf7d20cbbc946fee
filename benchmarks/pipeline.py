"""The whole pipeline as a user runs it: `nightshelf run` in a process of its own.

*Overhead*: the seconds of a run that are not the engine's, as a share of the engine's. What every
run pays once (imports, loading and hashing the model, the catalog) is taken from a run of a few
users and reported apart as `start_s`. *Memory*: the peak of the process with ten times the users
over the peak without, with the fake backend, so that what is seen is the pipeline.

This module loads no torch and is itself run in a process of its own: a child's peak is never below
what its parent held when it started.

    python -m benchmarks.pipeline --memory-users 100000
    python -m benchmarks.pipeline --model FOLDER --codes 256 --users 256
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

_ROOT = Path(__file__).resolve().parents[1]
_LEVELS, _VECTOR, _PER_FILE, _K = 3, 64, 50_000, 20
_GROUP = 5000  # rows of a row group, in tables of any size: a reader holds some of them at once
_START_USERS = 4  # of the run whose time is taken for what every run pays once
_FEWER = 10  # the larger run of the memory has so many times the users of the smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """What a run reads."""

    users: int
    items: int = 10_000
    candidates: int = 100  # of a user
    history: int = 100  # items; three tokens each
    codes: int = 256


def write_tables(
    folder: Path, tables: Tables, engine: dict[str, Any], shard_users: int, workers: int = 0
) -> Path:
    """Random users, candidates and catalog below `folder`, and a configuration over them."""
    rng = np.random.default_rng(0)
    items = pa.array([f"item{i:07d}" for i in range(tables.items)])
    codes = pa.array(rng.integers(0, tables.codes, tables.items * _LEVELS).astype(np.int32))
    sids = pa.FixedSizeListArray.from_arrays(codes, _LEVELS)
    pq.write_table(pa.table({"item_id": items, "sid": sids}), folder / "catalog.parquet")

    def lists(rows: int, size: int) -> pa.Array:
        offsets = np.arange(0, rows * size + 1, size, dtype=np.int32)
        first = rng.integers(0, tables.items, rows)[:, None]
        chosen = (first + np.arange(size) * 7) % tables.items  # no item twice in a list
        return pa.ListArray.from_arrays(pa.array(offsets), items.take(pa.array(chosen.ravel())))

    for name in ("users", "candidates"):
        (folder / name).mkdir()
    for first in range(0, tables.users, _PER_FILE):
        rows = min(_PER_FILE, tables.users - first)
        ids = [f"user{i:09d}" for i in range(first, first + rows)]
        flat = pa.array(rng.normal(size=rows * _VECTOR).astype(np.float32))
        vectors = pa.FixedSizeListArray.from_arrays(flat, _VECTOR)
        users = {"user_id": ids, "embedding": vectors, "history": lists(rows, tables.history)}
        pq.write_table(pa.table(users), folder / "users" / f"{first:09d}.parquet", _GROUP)
        candidates = {"user_id": ids, "item_ids": lists(rows, tables.candidates)}
        pq.write_table(pa.table(candidates), folder / "candidates" / f"{first:09d}.parquet", _GROUP)
    soft = "{user_vector}" if engine["backend"] == "fake" else ""
    config = {
        "surface": "home",
        "ds": "2026-01-01",
        "engine": engine,
        "sid": {
            "sizes": [tables.codes] * _LEVELS,
            "tokens": [f"<{level}_{{code}}>" for level in "abc"],
        },
        "prompt": {"template": soft + "{history}", "history_max_items": tables.history},
        "inputs": {"users": "users", "catalog": "catalog.parquet", "candidates": "candidates"},
        "task": {"k": _K, "score": {}},
        "output": {"path": "out"},
        "run": {"workers": workers, "shard_users": shard_users},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def run_tables(
    tables: Tables, engine: dict[str, Any], shard_users: int, workers: int = 0
) -> dict[str, Any]:
    """The summary of `nightshelf run` over such tables, and the process's peak memory."""
    with tempfile.TemporaryDirectory(prefix="nightshelf-bench-") as folder:
        config = write_tables(Path(folder), tables, engine, shard_users, workers)
        command = [sys.executable, "-m", "jobs", "run", str(config), "--output", "json"]
        with (
            (Path(folder) / "stdout").open("w+") as out,
            (Path(folder) / "stderr").open("w+") as err,
        ):
            process = subprocess.Popen(command, cwd=_ROOT, stdout=out, stderr=err)
            _, status, usage = os.wait4(process.pid, 0)  # the usage of this child alone
            process.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            err.seek(0)
            said, why = out.read().strip(), err.read().strip()
    if process.returncode:
        raise RuntimeError(f"nightshelf run ended with {process.returncode}: {said or why}")
    summary = json.loads(said.splitlines()[-1])
    kib = usage.ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    figures = ("seconds", "engine_seconds", "users_per_s", "rows_forwarded")
    return {name: summary[name] for name in figures} | {
        "users": tables.users,
        "peak_rss_mib": kib / 1024,
    }


def measure_workers(
    model: str, users: int, workers: int, *, dtype: str, device: str, codes: int
) -> float:
    """Seconds of a run by so many workers, without what it pays once."""
    engine = {"backend": "torch", "model": model, "dtype": dtype, "device": device}
    shard = -(-users // (8 * workers))  # so many that the last ones leave nobody idle for long
    few, many = (
        run_tables(Tables(users=n, codes=codes), engine, shard, workers)
        for n in (_START_USERS, users)
    )
    return float(many["seconds"] - few["seconds"])


def measure_overhead(
    model: str, users: int, *, dtype: str, device: str, codes: int
) -> dict[str, Any]:
    """Seconds outside the engine as a share of the engine's, what is paid once taken off."""
    engine = {"backend": "torch", "model": model, "dtype": dtype, "device": device}
    few = run_tables(Tables(users=_START_USERS, codes=codes), engine, users)
    many = run_tables(Tables(users=users, codes=codes), engine, users)
    return overhead_of(few, many) | {
        "users_per_s_of_run": users / many["seconds"],
        "users_per_s_of_engine": users / many["engine_seconds"],
        "runs": [few, many],
    }


def overhead_of(few: dict[str, Any], many: dict[str, Any]) -> dict[str, float]:
    """From a run of a few users and one of many: `start_s`, and the `overhead` without it."""
    start = few["seconds"] - few["engine_seconds"]
    outside = many["seconds"] - many["engine_seconds"] - start
    return {"start_s": start, "overhead": max(0.0, outside) / many["engine_seconds"]}


def measure_memory(users: int) -> dict[str, Any]:
    """Peak memory with `users` over that with a tenth of them, in shards of a twentieth."""
    small, shard = max(1, users // _FEWER), max(1, users // _FEWER // 2)
    runs = [
        run_tables(Tables(users=n, items=50_000, history=20, codes=64), {"backend": "fake"}, shard)
        for n in (small, users)
    ]
    ratio = runs[1]["peak_rss_mib"] / runs[0]["peak_rss_mib"]
    return {"memory_ratio": ratio, "memory_users": [small, users], "memory_runs": runs}


def main() -> None:
    """Measure what was asked for; one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="checkpoint folder; without it no overhead is measured")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--codes", type=int, default=256, help="codes of each of its 3 levels")
    parser.add_argument("--users", type=int, default=256, help="users of the run with the model")
    parser.add_argument("--memory-users", type=int, default=100_000, help="0: not measured")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    if args.memory_users:
        found |= measure_memory(args.memory_users)
    if args.model:
        found |= measure_overhead(
            args.model, args.users, dtype=args.dtype, device=args.device, codes=args.codes
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
