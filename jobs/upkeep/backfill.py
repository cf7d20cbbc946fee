"""One run per day over a range of dates, each in a process of its own.

A day's run is the `run` command and nothing else: it resumes, it locks its partition, and a day
that fails takes no other with it.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from jobs.upkeep.run_states import all_runs
from pipelines.publish import open_table
from pipelines.shards.profile import table_key
from schemas.config_file import load_config
from schemas.errors import ConfigError, quoted
from schemas.settings import RunConfig


class Reprocess(StrEnum):
    """Which days are run though they have a run: none, those not published, or all."""

    none = "none"
    failed = "failed"
    all = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """One date of a backfill and what became of it."""

    ds: str
    state: str  # published, skipped, failed, planned
    before: str  # published, failed, refused, scoring, …, or "none": no run yet
    exit_code: int | None = None
    rows: int | None = None
    message: str = ""


def days_between(first: str, last: str, *, backwards: bool = False) -> list[str]:
    """Dates `first` to `last`, both included.

    Raises:
        ConfigError: not a date, or the last is before the first.
    """
    try:
        begin, end = dt.date.fromisoformat(first), dt.date.fromisoformat(last)
    except ValueError as err:
        raise ConfigError(
            "--from and --to must be dates", expected="YYYY-MM-DD", got=quoted(str(err))
        ) from None
    if end < begin:
        raise ConfigError("--to is before --from", got=f"{first} to {last}")
    days = [str(begin + dt.timedelta(days=n)) for n in range((end - begin).days + 1)]
    return days[::-1] if backwards else days


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillOptions:
    """How days are run."""

    overrides: list[str]
    reprocess: Reprocess  # which days that have a run are run again
    max_active: int  # days at once
    dry_run: bool
    launcher: str | None = None  # None: what the configuration says


def backfill(
    config_path: str, days: list[str], options: BackfillOptions, done: Callable[[Day], None]
) -> list[Day]:
    """Run the days that need it; `done` hears of each as it ends.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    settings = load_config(config_path, overrides=options.overrides, ds=days[0])
    if options.max_active > 1 and "PYSPARK_GATEWAY_PORT" in os.environ:
        raise ConfigError(
            "spark-submit runs one day at a time",
            expected="--max-active 1: a Spark driver has one application",
            got=str(options.max_active),
        )
    words = [word for one in options.overrides for word in ("--set", one)]
    words += ["--launcher", options.launcher] if options.launcher else []
    states = day_states(settings)

    def one(day: str) -> Day:
        before = states.get(day, "none")
        if not _needed(before, options.reprocess):
            result = Day(ds=day, before=before, state="skipped")
        elif options.dry_run:
            result = Day(ds=day, before=before, state="planned")
        else:
            result = _run_day(config_path, day, words, before)
        done(result)
        return result

    with ThreadPoolExecutor(max_workers=options.max_active) as pool:
        return list(pool.map(one, days))


def day_states(settings: RunConfig, ds: str = "") -> dict[str, str]:
    """What became of a day, for this surface; of every day, or one: whether its table has it, else
    the best state that any of its runs has reached.
    """
    states: dict[str, str] = {}
    for run in all_runs(settings.run.work_dir, ds):
        mine = (run.surface, run.table) == (settings.surface, table_key(settings))
        if mine and states.get(run.ds) != "published":
            states[run.ds] = run.status
    for day, _ in open_table(settings, ds=settings.ds or ds or "none").dates():
        if day.startswith(ds):
            states[day] = "published"
    return states


def _needed(state: str, reprocess: Reprocess) -> bool:
    if reprocess is Reprocess.all or state == "none":
        return True
    return reprocess is Reprocess.failed and state != "published"


def _run_day(config_path: str, day: str, options: list[str], before: str) -> Day:
    command = [sys.executable, *_nightshelf(), "run", config_path, "--ds", day, *options]
    done = subprocess.run(
        [*command, "--output", "json"], capture_output=True, text=True, check=False
    )
    answer = _last_json(done.stdout)
    if done.returncode == 0:
        return Day(
            ds=day,
            before=before,
            state="published",
            exit_code=0,
            rows=answer.get("rows_published"),
            message=str(answer.get("run_id", "")),
        )
    lines = done.stderr.strip().splitlines()
    message = answer.get("error", {}).get("message") or (lines[-1] if lines else "no message")
    return Day(ds=day, before=before, state="failed", exit_code=done.returncode, message=message)


def _nightshelf() -> list[str]:
    """The command as arguments of Python: by its path, which no other folder can stand before. In
    a zip there is none.
    """
    main = Path(__file__).parents[2] / "nightshelf" / "__main__.py"
    return [str(main)] if main.is_file() else ["-m", "nightshelf"]


def _last_json(text: str) -> dict[str, Any]:
    lines = text.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
