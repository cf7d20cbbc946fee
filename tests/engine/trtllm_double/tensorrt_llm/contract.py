"""Signatures as contract.json states them: what this double accepts is read from there."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "contract.json"


@cache
def load() -> dict[str, Any]:
    """The whole contract."""
    return json.loads(PATH.read_text(encoding="utf-8"))


def entry(name: str) -> dict[str, Any]:
    """The entry of a class or function."""
    return next(e for e in load()["entries"] if e.get("name") == name)


def constructor(name: str) -> dict[str, Any]:
    """Keyword -> default of a class; `__unread__` defaults are None."""
    return {
        p["name"]: None if p.get("default") == "__unread__" else p.get("default")
        for p in entry(name)["constructor"]
    }


def parameters(name: str, method: str) -> list[str]:
    """Names that a method takes."""
    found = next(m for m in entry(name)["methods"] if m["name"] == method)
    return [p["name"] for p in found["params"]]
