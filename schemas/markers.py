"""Small records beside a run's plan and manifest: what launched it, and that it was published."""

from __future__ import annotations

from typing import ClassVar

from schemas.records import Stored


class Launch(Stored):
    """What ran a run's shards last."""

    NAME: ClassVar[str] = "a run's launch.json"

    launcher: str


class Marker(Stored):
    """Says that a run was published, and when."""

    NAME: ClassVar[str] = "a run's published.json"

    ds: str
    surface: str
    table: str | None = None  # none in markers of the first releases
    task: str | None = None
    published_at: float


class ManifestHead(Stored):
    """What `status` asks of a manifest: enough to say how a run ended, whatever else is in it."""

    NAME: ClassVar[str] = "a run's manifest"

    status: str
