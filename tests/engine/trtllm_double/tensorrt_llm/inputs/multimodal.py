"""Data of a request beside its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class MultimodalParams:
    """What the model's forward is given per request."""

    multimodal_data: dict[str, Any] | None = None
    multimodal_runtime: Any = None
