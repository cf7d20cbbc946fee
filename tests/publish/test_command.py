"""Whole runs into every table format, and what the commands say of them."""

from __future__ import annotations

import polars as pl
import pytest
import typer
from polars.testing import assert_frame_equal
from typer.testing import CliRunner

from jobs.cli.publish import rollback
from pipelines.publish import open_table
from schemas.config_file import load_config
from tests.factories import write_config, write_inputs

TASKS = [{"score": {}}, {"label": {"labels": ["y", "n"]}}, {"embed": {}}]


@pytest.mark.parametrize("task", TASKS, ids=["score", "label", "embed"])
def test_every_format_holds_the_same_rows(nightshelf, tmp_path, task):
    write_inputs(tmp_path)
    frames = []
    for form in ("parquet", "iceberg", "delta"):
        config = write_config(tmp_path, output__path=f"out-{form}", output__format=form,
                              task={"k": 5, **task})  # fmt: skip
        summary = nightshelf("run", config, "--output", "json").json
        assert nightshelf("run", config, "--output", "json").json["run_id"] == summary["run_id"]
        rows = pl.from_arrow(open_table(load_config(config)).read())
        frames.append(rows.drop("run_id", "ds", "surface", strict=False))
        assert len(rows) == summary["rows_published"]
        assert str(tmp_path / f"out-{form}") in summary["published"] or form == "iceberg"
    order = [c for c in ("user_id", "rank") if c in frames[0].columns]
    want, *others = (frame.sort(order) for frame in frames)
    if "embedding" in want.columns:
        want = want.with_columns(pl.col("embedding").cast(pl.List(pl.Float32)))
    for other in others:
        assert_frame_equal(other, want)


def test_the_life_of_a_partition(nightshelf, tmp_path, table_format):
    """Published, shown, replaced, rolled back."""
    app = typer.Typer()
    app.command()(rollback)
    app.command("unused")(lambda: None)
    write_inputs(tmp_path)
    config = write_config(tmp_path, output__format=table_format)
    first = nightshelf("run", config, "--output", "json").json
    second = nightshelf("run", config, "--set", "task.k=3", "--output", "json").json

    def states() -> dict[str, str]:
        runs = nightshelf("status", config, "--output", "json").json["runs"]
        return {run["run_id"]: run["status"] for run in runs}

    assert states() == {first["run_id"]: "replaced", second["run_id"]: "published"}
    shown = nightshelf("show", config, "--user", "u003", "--output", "json").json
    assert (shown["run_id"], len(shown["items"])) == (second["run_id"], 3)
    done = CliRunner().invoke(app, ["rollback", str(config)])
    assert done.exit_code == 0, done.output
    assert first["run_id"] in done.stdout
    assert states() == {first["run_id"]: "published", second["run_id"]: "withdrawn"}
    shown = nightshelf("show", config, "--user", "u003", "--output", "json").json
    assert len(shown["items"]) == 5
    assert "not in the users table" in nightshelf("show", config, "--user", "nobody", check=3).err
    missing = CliRunner().invoke(app, ["rollback", str(config), "--run", "nothing"])
    assert missing.exit_code == 2
    assert "never published here" in missing.stderr
