"""What a report says in numbers, besides those of the manifest: measured on the staged files.

Polars streams the files; what is kept is as large as the catalog, never as the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from pipelines.report.distributions import (
    Distribution,
    in_bars,
    of_integers,
    of_numbers,
    of_shares,
)
from pipelines.report.exposure import Exposure, measure_exposure
from pipelines.report.staged import Staged
from pipelines.shards.profile import load_sample, overlaps
from pipelines.storage import files
from schemas.runs import RunManifest

_SAMPLES = 3  # rows of the quarantine that are shown of each rule
_RULES = 50
_STEPS = 20  # of the overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Rows that were set aside for one reason, and a few of them."""

    table: str
    rule: str
    rows: int
    samples: tuple[dict[str, str | None], ...]  # key, message, payload, file


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The lists beside those of the run that was published before, over the users in both."""

    run_id: str
    users: int
    mean: float | None  # of the overlap
    overlap: Distribution | None
    scores: tuple[int, ...]  # of the other run, in the bars of this run's scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Everything that is measured; None where a task has no such thing."""

    scores: Distribution | None = None
    first_scores: tuple[int, ...] = ()  # of rank 1, in the bars of `scores`
    legal_mass: Distribution | None = None
    lengths: Distribution | None = None
    prompt_tokens: Distribution | None = None
    outcomes: tuple[tuple[str, str | None, int], ...] = ()  # status, reason, users
    exposure: Exposure | None = None
    before: Comparison | None = None
    rules: tuple[Rule, ...] = ()


def measure(staged: Staged) -> Figures:
    """Measure what the finished shards of a run left.

    Raises:
        StorageError: a file cannot be read.
    """
    manifest = staged.manifest
    outcomes = staged.scan("outcomes")
    if outcomes is None:
        return Figures()
    rows = staged.scan("recommendations")
    scores = None if rows is None else of_numbers(rows, "score")
    return Figures(
        scores=scores,
        first_scores=_first_scores(rows, scores),
        legal_mass=of_numbers(outcomes, "legal_mass"),
        lengths=None if rows is None else _whole_numbers(outcomes, "returned"),
        prompt_tokens=_whole_numbers(outcomes, "prompt_tokens"),
        outcomes=_outcomes(outcomes),
        exposure=None if rows is None else measure_exposure(manifest.plan, rows),
        before=_compare(manifest, scores),
        rules=_rules(staged),
    )


def _first_scores(rows: pl.LazyFrame | None, scores: Distribution | None) -> tuple[int, ...]:
    if rows is None or scores is None:
        return ()
    return in_bars(rows.filter(pl.col("rank") == 1), "score", scores.edges)


def _whole_numbers(outcomes: pl.LazyFrame, column: str) -> Distribution | None:
    found = outcomes.group_by(column).len().collect(engine="streaming")
    return of_integers(found[column].to_numpy(), found["len"].to_numpy().astype(np.int64))


def _outcomes(outcomes: pl.LazyFrame) -> tuple[tuple[str, str | None, int], ...]:
    """Users by what became of them and why, the most frequent first."""
    found = outcomes.group_by("status", "reason").len().collect(engine="streaming")
    return tuple(found.sort("len", "status", "reason", descending=[True, False, False]).rows())


def _compare(manifest: RunManifest, scores: Distribution | None) -> Comparison | None:
    """Beside the run that the audit compared with, as far as both kept a sample."""
    gates = manifest.audit.gates if manifest.audit else ()
    other = next((gate.against for gate in gates if gate.against is not None), None)
    if other is None:
        return None
    now = load_sample(manifest.plan.run_dir)
    before = load_sample(files.join(manifest.plan.config.run.work_dir, other))
    if now is None or before is None or now.schema != before.schema:
        return Comparison(run_id=other, users=0, mean=None, overlap=None, scores=())
    shares = overlaps(before, now)
    theirs = in_bars(before.lazy(), "score", scores.edges) if scores is not None else ()
    return Comparison(
        run_id=other,
        users=len(shares),
        mean=float(shares.to_numpy().mean()) if len(shares) else None,
        overlap=of_shares(shares.to_numpy(), min(manifest.plan.config.task.k, _STEPS)),
        scores=theirs,
    )


def _rules(staged: Staged) -> tuple[Rule, ...]:
    """The quarantine by table and rule, the most rows first."""
    rows = staged.scan("quarantine")
    if rows is None or not staged.manifest.counts.rows_quarantined:
        return ()
    found = rows.group_by("table", "rule").len().collect(engine="streaming")
    ordered = found.sort("len", "table", "rule", descending=[True, False, False])
    return tuple(
        Rule(table=table, rule=rule, rows=count, samples=_samples(rows, table, rule))
        for table, rule, count in ordered.head(_RULES).rows()
    )


def _samples(rows: pl.LazyFrame, table: str, rule: str) -> tuple[dict[str, str | None], ...]:
    mine = rows.filter((pl.col("table") == table) & (pl.col("rule") == rule)).head(_SAMPLES)
    columns = mine.select("key", "message", "payload", "file")
    return tuple(columns.collect(engine="streaming").to_dicts())
