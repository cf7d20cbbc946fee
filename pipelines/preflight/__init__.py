"""Look at a configuration and its inputs before a run: all that is wrong, not the first of it.

Nothing is scored, and no model is loaded. What a run would check when it is planned is checked
here by the same functions, each on its own, so that one problem does not hide the next.
"""

from __future__ import annotations

from pathlib import Path

from pipelines.planning.overlaps import overlapping
from pipelines.planning.plan import unwritable
from pipelines.preflight.catalog import check_items
from pipelines.preflight.findings import Findings, Problem
from pipelines.preflight.model import check_engine
from pipelines.preflight.samples import check_samples
from pipelines.preflight.tables import TablesSeen, check_tables
from pipelines.publish import check_output
from schemas.config_problems import ConfigReport, inspect_config
from schemas.errors import ConfigError
from schemas.extras import missing_extra
from schemas.settings import RunConfig
from schemas.tables import IdType

__all__ = ["Findings", "Problem", "preflight"]


def preflight(
    path: str | Path, *, overrides: list[str] | None = None, ds: str | None = None
) -> Findings:
    """Everything that is wrong with a configuration file and the inputs it names.

    Args:
        path: the YAML file.
        overrides: `a.b=value` items.
        ds: partition date that wins over the file's.
    """
    findings = Findings(config_file=str(path))
    try:
        report = inspect_config(path, overrides=overrides, ds=ds)
    except ConfigError as err:
        findings.add_error(
            err, field=err.field or "file", remedy="Give a YAML file that can be read."
        )
        return findings
    findings.sources = report.sources
    for problem in report.problems:
        findings.add_error(problem)
    config = report.config
    if config is None:
        return findings
    if config.ds is None and not report.is_repaired("ds"):
        findings.add_error(
            ConfigError(
                "no partition date",
                expected="--ds YYYY-MM-DD, or ds in the file",
                do="Give one with --ds; a nightly job does.",
                field="ds",
            )
        )
    config = check_engine(report, config, findings)
    tables = check_tables(report, config, findings)
    item_ids = None
    if "catalog" in tables.tables:
        item_ids = check_items(config, tables.tables["catalog"], findings)
    check_samples(config, tables, item_ids, findings)
    _check_places(report, config, tables, findings)
    if missing := missing_extra("report", "the report"):
        findings.warn(
            Problem(
                kind="config",
                file=findings.config_file,
                field="report",
                message="the run will have no page",
                got=missing.got,
                remedy=missing.do or "",
            )
        )
    return findings


def _check_places(
    report: ConfigReport, config: RunConfig, tables: TablesSeen, findings: Findings
) -> None:
    """Where the run writes."""
    if report.is_repaired("output.path") or "{ds}" in config.output.path:
        return
    before = len(findings.problems)
    with findings.collecting(field="run.work_dir"):
        for problem in (*overlapping(config), *unwritable(config)):
            findings.add_error(problem)
    if len(findings.problems) == before and not report.is_repaired("output", "surface"):
        with findings.collecting(
            file=config.output.path,
            field="output.path",
            remedy="Publish to another place, or make the table there fit.",
        ):
            check_output(config, tables.type_of("users", "user_id"), _items(config, tables))


def _items(config: RunConfig, tables: TablesSeen) -> IdType | None:
    """The type of item ids; a run without a catalog has texts."""
    return tables.type_of("catalog", "item_id") if config.needs_items else "string"
