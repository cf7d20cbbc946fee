"""Runs that are ready to be published, made by hand: a plan, staged files, receipts."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from engine.tasks import columns_of
from pipelines.publish import open_table, publish_run
from pipelines.publish.rows import RunRows
from pipelines.shards.run_shard import receipt_path
from pipelines.storage import files
from schemas.counts import Counts
from schemas.runs import Published, RunPlan, Shard, ShardReceipt, StagedFile
from schemas.settings import RunConfig
from schemas.tables import embeddings_schema, recommendations_schema

FORMATS = ("parquet", "iceberg", "delta")
DS = "2026-11-28"
Run = tuple[RunPlan, list[ShardReceipt]]


def config_of(folder: Path, format: str, *, surface: str = "home", ds: str = DS,
              output: dict[str, Any] | None = None, task: dict[str, Any] | None = None,
              work_dir: str = "runs") -> RunConfig:  # fmt: skip
    return RunConfig.model_validate(
        {
            "surface": surface,
            "ds": ds,
            "engine": {"backend": "fake"},
            "sid": {"sizes": [5], "tokens": ["<a_{code}>"]},
            "prompt": {"template": "Hi {history}"},
            "inputs": {"users": "users", "catalog": "catalog", "candidates": "candidates"},
            "task": task or {"k": 5, "score": {}},
            "output": {"path": str(folder / "out"), "format": format, **(output or {})},
            "run": {"work_dir": str(folder / work_dir)},
        }
    )


def staged_run(config: RunConfig, name: str, *, users: int = 12, k: int = 3, shards: int = 3,
               int_ids: bool = False) -> Run:  # fmt: skip
    """A run whose rows are a function of its name. `users=0` leaves none."""
    run_id = f"{config.ds}-home-{name}"
    kind = "int64" if int_ids else "string"
    plan = RunPlan(
        run_id=run_id, ds=str(config.ds), surface=config.surface, config=config, inputs={},
        hashes={}, num_shards=shards, user_id_type=kind, item_id_type=kind,
        run_dir=files.join(config.run.work_dir, run_id),
    )  # fmt: skip
    files.write_json(f"{plan.run_dir}/plan.json", plan.model_dump(mode="json"))
    receipts = []
    for index in range(shards):
        mine = [u for u in range(users) if u % shards == index]
        table = rows_of(plan, mine, k)
        path = f"staged/shard-{index:05d}-{name}-recommendations.parquet"
        size = files.write_parquet(f"{plan.run_dir}/{path}", table, sorted_by="user_id")
        staged = StagedFile(
            path=path, rows=len(table), bytes=size,
            xxh3=files.hash_file(f"{plan.run_dir}/{path}"),
        )  # fmt: skip
        receipt = ShardReceipt(
            run_id=run_id, shard=index, attempt=name,
            files={"embeddings" if config.task.embed else "recommendations": staged},
            counts=Counts(users_in=len(mine), users_recommended=len(mine)),
            seconds=0, engine_seconds=0,
        )  # fmt: skip
        files.write_json(
            receipt_path(plan, Shard(index=index, path="")), receipt.model_dump(mode="json")
        )
        receipts.append(receipt)
    return plan, receipts


def user_ids(plan: RunPlan, users: list[int]) -> list[Any]:
    """Numbers, or texts that begin with zeros."""
    return [u if plan.user_id_type == "int64" else f"{u:03d}" for u in users]


def rows_of(plan: RunPlan, users: list[int], k: int) -> pa.Table:
    """Rows of these users, different in every run."""
    base = int(hashlib.sha1(plan.run_id.encode()).hexdigest()[:4], 16)
    if plan.config.task.embed is not None:
        vectors = [[float(base + u), float(u), 1.0, 0.5] for u in users]
        columns = [user_ids(plan, users), vectors, [plan.run_id] * len(users)]
        schema = embeddings_schema(plan.user_id_type, 4)
        return pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)],
                        schema=schema)  # fmt: skip
    labels = plan.config.task.label is not None
    schema = recommendations_schema(plan.user_id_type, plan.item_id_type, columns_of(plan.config))
    records = [
        {
            "user_id": user_ids(plan, [u])[0],
            "rank": rank,
            "item_id": user_ids(plan, [(base + u + rank) % 900])[0],
            "score": -rank - base / 1e5,
            "source": "label" if labels else "score",
            "exact": u % 2 == 0,
            "run_id": plan.run_id,
            "labels": [{"label": "yes", "score": -0.5}, {"label": "no", "score": -0.9}],
        }
        for u in users
        for rank in range(1, k + 1)
    ]
    return pa.Table.from_pylist(records, schema)


def publish(config: RunConfig, name: str, **more: Any) -> Published:
    return publish_run(*staged_run(config, name, **more))


def read(config: RunConfig) -> pl.DataFrame:
    """The partition as readers see it, without its partition columns, sorted."""
    frame = pl.from_arrow(open_table(config).read())
    assert isinstance(frame, pl.DataFrame)
    frame = frame.drop("ds", "surface", strict=False)
    return frame.sort("user_id", "rank") if "rank" in frame.columns else frame.sort("user_id")


def expected(run: Run) -> pl.DataFrame:
    """The staged rows of a run, sorted."""
    plan, receipts = run
    parts = [files.read_parquet(f"{plan.run_dir}/{r.result.path}") for r in receipts]
    frame = pl.from_arrow(pa.concat_tables(parts))
    assert isinstance(frame, pl.DataFrame)
    return frame.sort("user_id", "rank") if "rank" in frame.columns else frame.sort("user_id")


def save(run: Run, path: Path) -> None:
    """A run as a file, for another process."""
    plan, receipts = run
    path.write_text(
        json.dumps(
            {
                "plan": plan.model_dump(mode="json"),
                "receipts": [r.model_dump(mode="json") for r in receipts],
            }
        )
    )


def load(path: str | Path) -> Run:
    found = json.loads(Path(path).read_text())
    receipts = [ShardReceipt.model_validate(r) for r in found["receipts"]]
    return RunPlan.model_validate(found["plan"]), receipts


MEANWHILE: list[Run] = []  # runs that are published while another one is


class Interrupted(RunRows):
    """Rows of a run; the others are published between its first shard and its second."""

    __slots__ = ()

    def shards(self) -> Iterator[tuple[int, pa.Table]]:
        for number, shard in enumerate(super().shards()):
            while number == 1 and MEANWHILE:
                other = MEANWHILE.pop(0)
                if self.plan.config.output.format == "delta":
                    # delta-rs asks for rows from a thread of its own, where it cannot be called.
                    publish_elsewhere(other)
                else:
                    publish_run(*other)
            yield shard


def publish_while(run: Run, *others: Run) -> None:
    """Publish a run, and others in the middle of it."""
    plan, receipts = run
    MEANWHILE[:] = others
    open_table(plan.config).replace(Interrupted(plan=plan, receipts=tuple(receipts)))
    assert not MEANWHILE, "the others were never published"


def publish_elsewhere(*runs: Run) -> list[str]:
    """Publish runs at once, each in a process; what became of each."""
    paths = [f"{plan.run_dir}/run.json" for plan, _ in runs]
    for run, path in zip(runs, paths, strict=True):
        save(run, Path(path))
    done = subprocess.run(
        [sys.executable, "-m", "tests.publish.processes", "together", *paths],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
