"""The rows that the example configurations published when they were written down.

    python -m tests.e2e.golden_rows   # writes them again, after a change that means to move them

A backend without a model gives the same bits on every machine, so its rows are kept as a hash. A
model's last bits depend on the processor: its rows are kept themselves, and compared to 1e-5.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import polars as pl
import xxhash

EXAMPLES = Path(__file__).parents[2] / "examples" / "configs"
CONFIGS = sorted(path.name for path in EXAMPLES.glob("*.yaml"))
GOLDEN = Path(__file__).parent / "golden"
HASHES = GOLDEN / "fake.json"
OF_THE_RUN = ("run_id", "model_version", "created_at")  # differ from one run, or path, to the next


def make_example(folder: Path) -> Path:
    """A copy of the examples with their inputs."""
    spec = importlib.util.spec_from_file_location("make_inputs", EXAMPLES / "make_inputs.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.make(folder / "build")
    for name in CONFIGS:
        shutil.copy(EXAMPLES / name, folder)
    return folder


def rows_of(folder: Path) -> pl.DataFrame:
    """What is published below a folder, in one order, without what names the run."""
    rows = pl.read_parquet(folder, hive_partitioning=True)
    return rows.drop(c for c in OF_THE_RUN if c in rows.columns).sort("user_id", "rank")


def hash_of(rows: pl.DataFrame) -> str:
    """Of every value, its column and its type; floats by their bits."""
    said = xxhash.xxh3_128(repr(sorted((n, str(t)) for n, t in rows.schema.items())).encode())
    for name in sorted(rows.columns):
        column = rows[name]
        if column.dtype == pl.Float32:
            column = column.reinterpret(signed=True)
        said.update(json.dumps(column.to_list(), default=str).encode())
    return said.hexdigest()


def run_fake(run: Callable[..., object], folder: Path, name: str) -> pl.DataFrame:
    """The rows of a configuration under the backend without a model.

    Its numbers under `full_vocab` are computed in double precision, so that they round to the same
    floats on every machine; those of a softmax over labels are not.
    """
    out = folder / f"fake-{Path(name).stem}"
    labels = "softmax" in (folder / name).read_text()
    norm = "task.label.softmax=false" if labels else "task.score_norm=full_vocab"
    run("run", folder / name, "--set", "run.workers=0", "--set", f"output.path={out}",
        "--set", "engine.backend=fake", "--set", norm)  # fmt: skip
    return rows_of(out)


def _write() -> None:
    from typer.testing import CliRunner

    from jobs.cli.app import app

    def run(*args: object) -> None:
        done = CliRunner().invoke(app, [str(a) for a in args])
        assert done.exit_code == 0, done.output

    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as tmp:
        folder = make_example(Path(tmp))
        hashes = {}
        for name in CONFIGS:
            hashes[name] = hash_of(run_fake(run, folder, name))
            out = folder / f"out-{Path(name).stem}"
            run("run", folder / name, "--set", "run.workers=0", "--set", f"output.path={out}")
            rows_of(out).select("user_id", "rank", "item_id", "score").write_parquet(
                GOLDEN / f"{Path(name).stem}.parquet", compression="zstd"
            )
        HASHES.write_text(json.dumps(hashes, indent=2) + "\n")


if __name__ == "__main__":
    _write()
