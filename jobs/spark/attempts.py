"""Attempts: the small files by which workers of other machines say which shard they began.

    <run_dir>/attempts/<launch>/shard-00003/<attempt>.json
    <run_dir>/attempts/<launch>/engines/<engine>.json
    <run_dir>/attempts/<launch>/ended.json

A worker that dies cannot say so, but its attempt stays: so attempts are counted, over all machines,
and a shard that has used up its share is not tried again. Written before the engine is started.
Engines are written too, those that started and those that could not: where none ever could, the
shards that are left need not find that out one by one; nor where an error ends the run.
"""

from __future__ import annotations

import datetime as dt
import os
import socket
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from pipelines.storage import files
from pipelines.storage.records import read_record
from schemas.errors import NightshelfError, StorageError
from schemas.records import Record, Stored
from schemas.runs import RunPlan, Shard


class Failure(Record):
    """How an attempt ended that did not end well."""

    kind: str  # of the error tree
    exit_code: int
    message: str

    @classmethod
    def of(cls, error: NightshelfError) -> Failure:
        """That an attempt, or an engine, ended with this error."""
        return cls(kind=error.kind, exit_code=error.exit_code, message=str(error))


class Attempt(Stored):
    """One attempt at one shard by one worker process."""

    NAME: ClassVar[str] = "an attempt"

    id: str
    launch: str
    shard: int
    host: str
    pid: int
    devices: tuple[str, ...]  # addresses that the cluster assigned
    engine: str  # one engine of one process
    started_at: str
    failure: Failure | None = None


class _EngineEnd(Stored):
    """Whether an engine started; `failure` says why not."""

    NAME: ClassVar[str] = "an engine's record"

    failure: Failure | None


@dataclass(frozen=True, slots=True)
class LaunchFiles:
    """The attempts of one launch of a run."""

    plan: RunPlan
    launch: str

    def begin(self, shard: Shard, *, devices: tuple[str, ...], engine: str) -> Attempt:
        """Say that this process begins a shard."""
        attempt = Attempt(
            id=uuid.uuid4().hex[:8],
            launch=self.launch,
            shard=shard.index,
            host=socket.gethostname(),
            pid=os.getpid(),
            devices=devices,
            engine=engine,
            started_at=dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
        )
        files.write_json(self._path(shard.name, attempt.id), attempt.model_dump(mode="json"))
        return attempt

    def fail(self, shard: Shard, attempt: Attempt, error: NightshelfError) -> None:
        """Say why an attempt failed."""
        failed = attempt.model_copy(update={"failure": Failure.of(error)})
        files.write_json(self._path(shard.name, attempt.id), failed.model_dump(mode="json"))

    def attempts(self, shard: Shard) -> list[Attempt]:
        """Attempts at a shard, the first one first."""
        found = []
        for path in self._records(shard.name):
            with suppress(StorageError, FileNotFoundError):  # it is written at this moment
                found.append(read_record(Attempt, path))
        return sorted(found, key=lambda attempt: attempt.started_at)

    def engine_ended(self, engine: str, error: NightshelfError | None) -> None:
        """Say that an engine started, or why not."""
        end = _EngineEnd(failure=None if error is None else Failure.of(error))
        files.write_json(self._path("engines", engine), end.model_dump(mode="json"))

    def no_engine_starts(self) -> Failure | None:
        """Why not, where `run.max_attempts` engines or more were started and none ever ran."""
        paths = self._records("engines")
        if len(paths) < self.plan.config.run.max_attempts:
            return None
        last: Failure | None = None
        for path in paths:
            last = read_record(_EngineEnd, path).failure
            if last is None:
                return None
        return last

    def end_the_run(self, error: NightshelfError) -> None:
        """Say that no attempt at a shard could do better: nobody need begin another one."""
        files.write_json(self._path("ended"), error.as_record())

    def ended(self) -> NightshelfError | None:
        """Why nobody need begin another shard; None while there is no such reason."""
        path = self._path("ended")
        return NightshelfError.of_record(files.read_json(path)) if files.exists(path) else None

    def _path(self, *names: str) -> str:
        return files.join(self.plan.run_dir, "attempts", self.launch, *names) + ".json"

    def _records(self, folder: str) -> list[str]:
        inside = files.join(self.plan.run_dir, "attempts", self.launch, folder)
        names = (name for name in files.list_names(inside) if not name.startswith("."))
        return [files.join(inside, name) for name in names]


def last_words(attempts: list[Attempt]) -> str:
    """Why the last attempt ended."""
    failure = attempts[-1].failure if attempts else None
    if failure is not None:
        return failure.message
    return "its worker ended without a word: killed, perhaps out of memory, or lost with its host"
