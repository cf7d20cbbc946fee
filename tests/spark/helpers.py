"""What the Spark tests share."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PARTITION = "out/ds=2026-11-28/surface=home"


@dataclass(frozen=True)
class Submitted:
    """A finished spark-submit."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out.strip().splitlines()[-1])

    @property
    def text(self) -> str:
        return self.out + self.err


def published_bytes(folder: Path) -> dict[str, bytes]:
    """The files of the partition, which must be finished."""
    assert (folder / PARTITION / "_SUCCESS").exists()
    return {p.name: p.read_bytes() for p in (folder / PARTITION).glob("*.parquet")}


def shard_bytes(folder: Path) -> dict[str, bytes]:
    """What prepare wrote: shards, and candidate sets."""
    found = [*folder.glob("runs/*/shards/*.parquet"), *folder.glob("runs/*/candidate_sets.parquet")]
    return {p.name: p.read_bytes() for p in found}


def clear(folder: Path) -> None:
    """Forget every run."""
    for name in ("out", "out.current", "runs"):
        shutil.rmtree(folder / name, ignore_errors=True)


def attempts(folder: Path) -> list[dict[str, Any]]:
    """Every attempt at a shard that any worker began."""
    return [json.loads(p.read_text()) for p in folder.glob("runs/*/attempts/*/shard-*/*.json")]


def receipts(folder: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in folder.glob("runs/*/receipts/*.json")}


def wait_for(condition: Callable[[], Any], what: str, process: Any, seconds: float = 600.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        assert process.poll() is None, f"ended before {what}: {process.communicate()}"
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds} s for {what}")
