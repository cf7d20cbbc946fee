"""The result of one check of a machine, a package or a model: what `nightshelf doctor` lists."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One thing looked at. `detail` is what was found; `remedy` what to do when it is not ok."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
