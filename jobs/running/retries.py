"""What becomes of a shard that failed: one rule for this process, its workers and executors.

An error says of itself whether another try may help (`retryable`). One that does not ends the run
at once, as what it is: the same input gives the same end wherever it is read. Others are tried
again, `run.max_attempts` times in all. Where the engine may be broken, which only an engine that
raised something of its own is, the next try has a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from schemas.errors import EngineError, NightshelfError, ShardFailedError, is_panic
from schemas.runs import Shard


class Next(Enum):
    """What to do after an attempt that failed."""

    again = "again"
    give_up = "give up"
    end_the_run = "end the run"


class _Notes(Protocol):
    def note(self, message: str) -> None:
        """Something a person should know."""


def next_step(error: NightshelfError, attempts: int, max_attempts: int) -> Next:
    """What to do about a shard after so many attempts, the last of which ended with this error."""
    if not error.retryable:
        return Next.end_the_run
    return Next.again if attempts < max_attempts else Next.give_up


def needs_new_engine(error: NightshelfError) -> bool:
    """Whether the engine may be in any state: something below it raised an error."""
    return isinstance(error, ShardFailedError | EngineError)


@contextmanager
def panics_are_failures(
    what: str, kind: type[NightshelfError] = ShardFailedError
) -> Iterator[None]:
    """Turn a panic of a library written in Rust into an error of ours: it is no `Exception`.

    Raises:
        NightshelfError: of this kind, for a panic.
    """
    try:
        yield
    except BaseException as err:
        if not is_panic(err):
            raise
        first = (str(err).splitlines() or [""])[0]
        raise kind(f"{what} failed", got=f"a library panicked: {first}") from err


@dataclass(slots=True)
class Attempts:
    """Attempts at the shards of one launch, and the reasons of those that are given up."""

    max_attempts: int
    progress: _Notes
    failed: dict[int, str] = field(default_factory=dict)
    _tries: dict[int, int] = field(default_factory=dict)

    def failed_once(self, shard: Shard, error: NightshelfError) -> bool:
        """An attempt at a shard failed; whether there is to be another.

        Raises:
            NightshelfError: the error itself, where no attempt could do better.
        """
        tries = self._tries[shard.index] = self._tries.get(shard.index, 0) + 1
        step = next_step(error, tries, self.max_attempts)
        if step is Next.end_the_run:
            raise error
        if step is Next.again:
            self.progress.note(f"{shard.name}: {error}; trying again ({tries} so far)")
            return True
        self.progress.note(f"{shard.name}: {error}; given up after {tries} attempts")
        self.failed[shard.index] = str(error)
        return False
