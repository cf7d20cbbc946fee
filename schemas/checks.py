"""One check of a machine: what `nightshelf doctor` prints a line about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """What was looked at, whether it is right, what was found, and what to do when it is not."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
