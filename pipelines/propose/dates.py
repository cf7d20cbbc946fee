"""The partition date in the user's paths, and folders that hold a part for each day."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from pipelines.storage import files

_DATE = re.compile(r"(?<![0-9])(\d{4}-\d{2}-\d{2})(?![0-9])")
_DAY = re.compile(r"[A-Za-z_]*=?\d{4}-\d{2}-\d{2}")  # ds=2026-11-28, dt=…, or the date alone


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the user's things are."""

    users: str
    catalog: str
    candidates: str | None = None
    exclusions: str | None = None
    model: str | None = None
    projector: str | None = None
    surface: str = "home"

    @property
    def tables(self) -> dict[str, str]:
        """The paths of the tables that are given."""
        paths = {
            "users": self.users,
            "catalog": self.catalog,
            "candidates": self.candidates,
            "exclusions": self.exclusions,
        }
        return {name: path for name, path in paths.items() if path is not None}


def date_of(sources: Sources) -> str | None:
    """The date in the paths, which becomes `{ds}` in each that has it: that of the users where they
    have one, else the latest of the others. None where no path has a date.
    """
    dates = {name: found[-1] for name, path in sources.tables.items()
             if (found := _DATE.findall(path))}  # fmt: skip
    return dates.get("users") or max(dates.values(), default=None)


def latest_day(sources: Sources) -> tuple[Sources, tuple[str, ...]]:
    """The sources with each folder of days replaced by its latest one, and the tables it was done
    for: a run reads the table of one day, and the union of all would hold every user many times.
    """
    changed: dict[str, str] = {}
    for name, path in sources.tables.items():
        days = [part for part in files.list_names(path) if _DAY.fullmatch(part)]
        if days:
            changed[name] = files.join(path, max(days))
    return replace(sources, **changed), tuple(changed)
