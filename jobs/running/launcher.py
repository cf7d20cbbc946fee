"""What a run asks of whoever launches its shards, and of whoever watches it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Protocol

from pipelines.inputs.prepare import prepare_run
from pipelines.planning.input_tables import tables_of_spark
from schemas.errors import NightshelfError
from schemas.runs import RunPlan, Shard
from schemas.settings import RunConfig


class Progress(Protocol):
    """What a launcher tells whoever watches."""

    def step(self, name: str) -> None:
        """A step of the run begins."""

    def start(self, users: int) -> None:
        """Scoring begins, with so many users to do."""

    def advance(self, users: int) -> None:
        """So many users more are done."""

    def note(self, message: str) -> None:
        """Something a person should know."""


class Launcher(ABC):
    """Where the work of a run is done. Its heart is `launch`; the others are the steps beside it
    that some launchers can share out too, and are done in this process otherwise.
    """

    name: ClassVar[str]  # as the manifest says it

    def locate(self, config: RunConfig) -> RunConfig:
        """The configuration with every input as files."""
        return config

    def problems(self, config: RunConfig) -> Iterator[NightshelfError]:
        """What would keep it from a run, and can be told before one, without copying a row."""
        yield from tables_of_spark(config)

    def prepare(self, plan: RunPlan, progress: Progress) -> None:
        """Write the catalog, the candidate sets and the shards; what is there already is kept."""
        prepare_run(plan)

    def published(self, plan: RunPlan, progress: Progress) -> None:  # noqa: B027  # nobody is told
        """The run's rows are visible now."""

    @abstractmethod
    def launch(self, plan: RunPlan, shards: list[Shard], progress: Progress) -> dict[int, str]:
        """Get every shard a receipt; the reasons of those that failed, by shard."""
