"""The power goes at any moment of a run; the same command then publishes what it would have.

Thirty-six moments, drawn by a seed from all changes that a run makes to files: plans, catalogs,
shards, staged files, receipts, audits, published files, records, manifests.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from schemas.config_file import load_config
from tests.factories import write_config, write_inputs

ROOT = Path(__file__).parents[2]
FORMATS = ("parquet", "iceberg", "delta")
MOMENTS = 12  # of each format


def rows_of(folder: Path, table_format: str) -> pl.DataFrame:
    out = folder / "out"
    if table_format == "delta":
        frame = pl.read_delta(str(out))
    elif table_format == "iceberg":
        from pipelines.publish import open_table

        config = load_config(str(folder / "run.yaml"))
        frame = pl.from_arrow(open_table(config).read())
    else:
        assert (out / "ds=2026-11-28/surface=home/_SUCCESS").exists()
        frame = pl.read_parquet(out / "ds=2026-11-28/surface=home", hive_partitioning=False)
    names = ["user_id", "rank", "item_id", "score", "source", "exact", "run_id"]
    return frame.select(names).sort("user_id", "rank")


def run(folder: Path, kill_at: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.killer", str(folder), str(kill_at)]
    return subprocess.run(
        [*command, "run", str(folder / "run.yaml")], cwd=ROOT, capture_output=True, text=True
    )


@pytest.fixture(scope="module", params=FORMATS)
def undisturbed(request, tmp_path_factory):
    """A folder with inputs, the rows that must come out, and how many changes it takes."""
    folder = tmp_path_factory.mktemp(request.param)
    write_inputs(folder, num_users=24)
    write_config(folder, output__format=request.param, run__shard_users=8)
    done = run(folder, 0)
    assert done.returncode == 0, done.stderr
    rows = rows_of(folder, request.param)
    changes = int(done.stderr.strip().splitlines()[-1])
    for name in ("out", "out.current", "runs"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return request.param, folder, rows, changes


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_run_that_died_anywhere_publishes_what_it_would_have(nightshelf, undisturbed, moment):
    table_format, folder, want, changes = undisturbed
    assert changes > 2 * MOMENTS
    moments = random.Random(table_format).sample(range(1, changes + 1), MOMENTS)
    for name in ("out", "out.current", "runs"):
        shutil.rmtree(folder / name, ignore_errors=True)
    died = run(folder, moments[moment])
    assert died.returncode == -9, died.stderr
    nightshelf("run", folder / "run.yaml")
    assert_frame_equal(rows_of(folder, table_format), want)
