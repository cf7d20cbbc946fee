"""The report of a run: one page of HTML that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from pipelines.report.charts import draw_charts
from pipelines.report.examples import choose_examples
from pipelines.report.figures import measure
from pipelines.report.page import render
from pipelines.report.staged import open_staged
from pipelines.storage import files
from schemas.errors import StorageError
from schemas.runs import RunManifest, RunPlan

__all__ = ["report_path", "write_report"]


def report_path(plan: RunPlan) -> str:
    """Where a run's report is."""
    return files.join(plan.run_dir, "report.html")


def write_report(manifest: RunManifest, users: Sequence[str] = ()) -> RunManifest:
    """Write the page of a run that has ended, however it ended; the manifest that names the page.

    Args:
        manifest: of the run; its shards may be those that were done when it failed.
        users: ids to show besides those of `report.examples`.

    Raises:
        StorageError: staged files are gone or damaged, or the page cannot be written.
        ConfigError: an id of `users` cannot be one of this table.
    """
    path = report_path(manifest.plan)
    manifest = manifest.model_copy(update={"report": path})
    try:
        with open_staged(manifest) as staged:
            figures = measure(staged)
            examples = choose_examples(staged, users)
    except pl.exceptions.PanicException as err:  # no Exception: it would end a run that is done
        raise StorageError("polars broke on the staged files", got=str(err), where=path) from err
    charts = draw_charts(figures, manifest.plan.config.task.k)
    files.write_bytes(path, render(manifest, figures, charts, examples).encode())
    return manifest
