"""`surfaces.yaml`, read as strictly as the YAML of a run: every problem at once, and a wrong entry
takes no other one away.

No DAG and nothing of airflow is made here. `nightshelf_precompute` makes DAGs of the entries that
are right, `nightshelf_problems` says what is wrong with the others.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping as AnyMapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import date, datetime, time, timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

_HERE = Path(__file__).resolve().parent
if str(_HERE) not in sys.path:  # Airflow adds a bundle's root only, and this may be a folder in it
    sys.path.append(str(_HERE))

from nightshelf_settings import (  # noqa: E402  # found only now
    CHECKS,
    Mapping,
    about,
    load,
    words,
)

_LONGEST_NAME = 200  # Airflow's ids have up to 250 characters
_YEARS_AHEAD = 3  # in which a time that the clock skips is looked for


@dataclass(frozen=True, kw_only=True)
class Surface:
    """One entry of `surfaces.yaml` over its defaults."""

    name: str
    folder: Path  # of surfaces.yaml: relative paths start there
    config: str
    schedule: dict[str, Any] | None = None  # {cron, timezone, run_offset}, {assets, …}, or by hand
    ready: list[str] = field(default_factory=list)  # files that must be there before a run starts
    ready_timeout_hours: float = 6
    ready_every_s: float = 60
    command: list[str] = field(default_factory=lambda: ["nightshelf"])
    env: dict[str, Any] = field(default_factory=dict)
    launcher: str = "local"
    spark: dict[str, Any] = field(default_factory=dict)  # arguments of SparkSubmitOperator
    spark_steps: list[str] = field(default_factory=lambda: ["score"])
    start_date: date = date(2026, 1, 1)
    max_active_runs: int = 1
    pool: str = "gpu"  # of the score task
    pool_slots: int = 1
    queue: str | None = None  # of the score task, where an executor has queues
    retries: int = 3
    retry_delay_s: float = 60
    max_retry_delay_s: float = 1800
    timeout_hours: float = 12  # of one task
    deadline_hours: float | None = None
    tags: list[str] = field(default_factory=list)

    @property
    def dag_id(self) -> str:
        """The surface's name, as far as Airflow allows it in an id."""
        return "nightshelf_" + re.sub(r"[^A-Za-z0-9_.-]", "_", self.name)


def surfaces_file() -> Path:
    """`NIGHTSHELF_SURFACES`, or `surfaces.yaml` beside this file or one folder up."""
    if named := os.environ.get("NIGHTSHELF_SURFACES"):
        return Path(named)
    beside = _HERE / "surfaces.yaml"
    return beside if beside.exists() else _HERE.parent / "surfaces.yaml"


def read_surfaces(path: Path) -> list[Surface]:
    """The entries of a file that are right.

    Raises:
        OSError, yaml.YAMLError: there is no such file, or it is no YAML.
    """
    return surfaces_and_problems(path)[0]


def surfaces_and_problems(path: Path) -> tuple[list[Surface], list[str]]:
    """The entries that are right, and every problem of the file and of the others.

    Raises: as `read_surfaces`.
    """
    raw = load(path)
    problems: list[str] = []
    if not isinstance(raw, Mapping):
        return [], [f"{path}: expected the keys defaults and surfaces, got {words(raw)}"]
    known = ("defaults", "surfaces")
    problems += [f"{path}: {_unknown(key, known)}" for key in raw if key not in known]
    problems += [f"{path}: {key} stands twice, {where}" for key, where in raw.doubled]
    if "surfaces" not in raw:
        problems.append(f"{path}: the key surfaces is missing")
    defaults, entries = raw.get("defaults"), raw.get("surfaces")
    for key, value in (("defaults", defaults), ("surfaces", entries)):
        if value is not None and not isinstance(value, Mapping):
            problems.append(f"{path}: {key}: expected a mapping, got {words(value)}")
    defaults = defaults if isinstance(defaults, Mapping) else Mapping()
    entries = entries if isinstance(entries, Mapping) else Mapping()
    inherited = [f"{key} stands twice in defaults, {where}" for key, where in defaults.doubled]
    doubled = dict(entries.doubled)
    found: list[Surface] = []
    for name, own in entries.items():
        surface, wrong = _surface(name, path, defaults, own)
        wrong = inherited + wrong
        if name in doubled:
            wrong.insert(0, f"the surface stands twice, {doubled[name]}")
        problems += [f"{path}: {name}: {one}" for one in wrong]
        if surface is not None and not wrong:
            found.append(surface)
    return _of_their_own(path, found, problems), problems


def _of_their_own(path: Path, found: list[Surface], problems: list[str]) -> list[Surface]:
    """Surfaces whose DAGs have names of their own; of others, none."""
    by_id: dict[str, list[str]] = {}
    for surface in found:
        by_id.setdefault(surface.dag_id.casefold(), []).append(surface.name)
    for names in by_id.values():
        if len(names) > 1:
            said = " and ".join(repr(name) for name in names)
            problems.append(
                f"{path}: {said} would be one DAG: names must differ in more than capitals and "
                "signs that Airflow does not allow in an id"
            )
    return [surface for surface in found if len(by_id[surface.dag_id.casefold()]) == 1]


def _surface(
    name: Any, path: Path, defaults: Mapping, own: Any
) -> tuple[Surface | None, list[str]]:
    if not isinstance(name, str) or not name.strip():
        return None, [f"a surface's name is text, not {words(name)}; write it in quotes"]
    if len(name) > _LONGEST_NAME:
        return None, [f"a surface's name has at most {_LONGEST_NAME} characters, not {len(name)}"]
    if own is not None and not isinstance(own, Mapping):
        return None, [f"expected a mapping, got {words(own)}"]
    own = own if own is not None else Mapping()
    settings = {**defaults, **own}
    known = [f.name for f in fields(Surface) if f.name not in ("name", "folder")]
    wrong = [f"{key} stands twice, {where}" for key, where in own.doubled]
    wrong += [_unknown(key, known) for key in settings if key not in known]
    required = [f.name for f in fields(Surface) if f.name in known and _has_no_default(f)]
    wrong += [f"{key} is missing" for key in required if key not in settings]
    for key in known:
        if key in settings:
            wrong += [about(key, why) for why in CHECKS[key](settings[key])]
    if wrong:
        return None, wrong
    if "start_date" in settings:  # YAML reads a date in quotes as text
        settings["start_date"] = date.fromisoformat(str(settings["start_date"]))
    surface = Surface(name=name, folder=path.parent, **settings)
    return surface, _together(surface)


def _together(surface: Surface) -> list[str]:
    """What is wrong with settings that are right one by one."""
    wrong = []
    if surface.launcher == "spark" and "application" not in surface.spark:
        wrong.append("spark.application is missing")
    schedule = surface.schedule or {}
    offset = schedule.get("run_offset", -1)
    if "cron" in schedule and days_of(schedule) is None and offset < 0:
        # Airflow counts ticks back from where a skipped one was moved to: it would meet it again.
        skipped = _skipped(schedule["cron"], schedule.get("timezone", "UTC"), surface.start_date)
        if skipped:
            wrong.append(
                f"schedule.cron: the clock of {schedule['timezone']} skips {skipped}: choose "
                "another time of day, or a daily cron"
            )
    return wrong


def days_of(schedule: AnyMapping[str, Any]) -> int | None:
    """Days from a daily run to its partition; None for any other schedule."""
    said = str(schedule.get("cron", "")).split()
    daily = all(word.isdigit() for word in said[:2]) and said[2:] == ["*", "*", "*"]
    if daily or said in (["@daily"], ["@midnight"]):
        return int(schedule.get("run_offset", -1))
    return None


def time_of(schedule: AnyMapping[str, Any]) -> time:
    """The time of day of a daily schedule; midnight for any other one."""
    said = str(schedule.get("cron", "")).split()
    if days_of(schedule) is None or len(said) < len(("minute", "hour")):
        return time()
    return time(hour=int(said[1]), minute=int(said[0]))


def _skipped(cron: str, timezone: str, first: date) -> str | None:
    """A tick that a change of clocks skips, where the hours and minutes are lists of numbers."""
    minutes, hours, *_ = cron.split() if " " in cron else ("0", "0")
    if not re.fullmatch(r"[\d,]+", minutes + hours):
        return None
    zone = ZoneInfo(timezone)
    last_start = date(date.max.year - _YEARS_AHEAD - 1, 1, 1)
    day = datetime.combine(min(max(first, date.today()), last_start), datetime.min.time())
    for _ in range(366 * _YEARS_AHEAD):
        day += timedelta(days=1)
        for hour in hours.split(","):
            for minute in minutes.split(","):
                naive = day.replace(hour=int(hour), minute=int(minute))
                aware = naive.replace(tzinfo=zone)
                there = datetime.fromtimestamp(aware.timestamp(), zone).replace(tzinfo=None)
                if there != naive:
                    return f"{naive:%Y-%m-%d %H:%M}"
    return None


def _has_no_default(one: Any) -> bool:
    return one.default is MISSING and one.default_factory is MISSING


def _unknown(key: Any, known: Any) -> str:
    close = get_close_matches(str(key), known, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown {[key]}; known are {sorted(known)}{hint}"
