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


def attempts_path(plan: RunPlan, launch: str, shard: Shard) -> str:
    """Where the attempts at a shard are, of one launch."""
    return files.join(plan.run_dir, "attempts", launch, shard.name)


def begin(
    plan: RunPlan, launch: str, shard: Shard, *, devices: tuple[str, ...], engine: str
) -> Attempt:
    """Say that this process begins a shard."""
    attempt = Attempt(
        id=uuid.uuid4().hex[:8],
        launch=launch,
        shard=shard.index,
        host=socket.gethostname(),
        pid=os.getpid(),
        devices=devices,
        engine=engine,
        started_at=dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
    )
    _write(plan, shard, attempt)
    return attempt


def fail(plan: RunPlan, shard: Shard, attempt: Attempt, error: NightshelfError) -> None:
    """Say why an attempt failed."""
    failure = Failure(kind=error.kind, exit_code=error.exit_code, message=str(error))
    _write(plan, shard, attempt.model_copy(update={"failure": failure}))


def _write(plan: RunPlan, shard: Shard, attempt: Attempt) -> None:
    path = files.join(attempts_path(plan, attempt.launch, shard), f"{attempt.id}.json")
    files.write_json(path, attempt.model_dump(mode="json"))


def attempts_of(plan: RunPlan, launch: str, shard: Shard) -> list[Attempt]:
    """Attempts at a shard in one launch, the first one first."""
    folder = attempts_path(plan, launch, shard)
    found = []
    for name in files.list_names(folder):
        if name.startswith("."):
            continue
        try:
            found.append(read_record(Attempt, files.join(folder, name)))
        except (StorageError, FileNotFoundError):
            continue  # written at this moment
    return sorted(found, key=lambda attempt: attempt.started_at)


def engine_ended(plan: RunPlan, launch: str, engine: str, error: NightshelfError | None) -> None:
    """Say that an engine started, or why not."""
    failure = None
    if error is not None:
        failure = Failure(kind=error.kind, exit_code=error.exit_code, message=str(error))
    record = _EngineEnd(failure=failure).model_dump(mode="json")
    files.write_json(files.join(_engines_path(plan, launch), f"{engine}.json"), record)


def no_engine_starts(plan: RunPlan, launch: str) -> Failure | None:
    """Why not, where `run.max_attempts` engines or more were started in vain and none ever ran."""
    folder = _engines_path(plan, launch)
    names = [name for name in files.list_names(folder) if not name.startswith(".")]
    if len(names) < plan.config.run.max_attempts:
        return None
    last: Failure | None = None
    for name in names:
        last = read_record(_EngineEnd, files.join(folder, name)).failure
        if last is None:
            return None
    return last


def _engines_path(plan: RunPlan, launch: str) -> str:
    return files.join(plan.run_dir, "attempts", launch, "engines")


def end_the_run(plan: RunPlan, launch: str, error: NightshelfError) -> None:
    """Say that no attempt at a shard could do better: nobody need begin another one."""
    files.write_json(_end_path(plan, launch), error.as_record())


def ended(plan: RunPlan, launch: str) -> NightshelfError | None:
    """Why nobody need begin another shard of a launch; None while there is no such reason."""
    path = _end_path(plan, launch)
    return NightshelfError.of_record(files.read_json(path)) if files.exists(path) else None


def _end_path(plan: RunPlan, launch: str) -> str:
    return files.join(plan.run_dir, "attempts", launch, "ended.json")


def last_words(attempts: list[Attempt]) -> str:
    """Why the last attempt ended."""
    failure = attempts[-1].failure if attempts else None
    if failure is not None:
        return failure.message
    return "its worker ended without a word: killed, perhaps out of memory, or lost with its host"
