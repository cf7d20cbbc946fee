"""Every call that came in, for the contract test; and faults that a test asks for.

Faults: `multi_item_refused`, `multi_item_wrong` (items see each other), `delimiter_shift` (rows are
one further on), `beams_empty`, `beams_infinite`, `beams_doubled`, `dies` (encode raises after the
first calls). Also by the environment: TRTLLM_DOUBLE_FAULTS=one,two.
"""

from __future__ import annotations

import os
from typing import Any

CALLS: list[tuple[str, dict[str, Any]]] = []
FAULTS: set[str] = set(filter(None, os.environ.get("TRTLLM_DOUBLE_FAULTS", "").split(",")))


def record(name: str, **kwargs: Any) -> None:
    """Note a call."""
    CALLS.append((name, kwargs))
