"""One run at a time for a date and surface, whatever machine it is started on.

On a disk this is a file lock, which goes with the process that holds it. An object store has no
locks: there it is a lease, a small object that the holder renews and that counts for nothing once
it has not been renewed for a while. Should two runs work at once all the same (a clock that is
wrong, a store without conditional puts), their files do not meet, and of two publishers one wins.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from pipelines import files
from pipelines.publish.parquet import record_path
from schemas.errors import RunError, StorageError
from schemas.runs import RunPlan

_RENEW_S = 20.0
_STALE_S = 120.0


@contextmanager
def only_run_of(plan: RunPlan) -> Iterator[None]:
    """Hold the lock of the partition.

    Raises:
        RunError: another run of the partition holds it.
    """
    path = lock_path(plan)
    local = files.local_path(path)
    if local is None:
        with _leased(plan, path):
            yield
        return
    Path(local).parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(local)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise _at_work(plan, path, "Wait for it to end") from None
    try:
        yield
    finally:
        lock.release()


def lock_path(plan: RunPlan) -> str:
    """The lock of a partition's runs."""
    return f"{record_path(plan)}.lock"


def _at_work(plan: RunPlan, path: str, do: str) -> RunError:
    return RunError(
        "another run of this date and surface is at work",
        got=f"ds {plan.ds}, surface {plan.surface!r}",
        where=path,
        do=f"{do}, then run the same command again.",
    )


@contextmanager
def _leased(plan: RunPlan, path: str) -> Iterator[None]:
    token = uuid.uuid4().hex
    if not files.create(path, _lease(token)):
        if _age(path) < _STALE_S:
            wait = f"Wait for it to end, or {_STALE_S:g} s if it was killed"
            raise _at_work(plan, path, wait)
        files.remove_if_there(path)
        if not files.create(path, _lease(token)):
            raise _at_work(plan, path, "Wait for it to end")
    over = threading.Event()

    def renew() -> None:
        while not over.wait(_RENEW_S):
            files.write_bytes(path, _lease(token))

    keeper = threading.Thread(target=renew, daemon=True, name="nightshelf-lease")
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()
        files.remove_if_there(path)


def _lease(token: str) -> bytes:
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "token": token}
    return json.dumps({**owner, "renewed_at": time.time()}).encode()


def _age(path: str) -> float:
    """Seconds since a lease was renewed; endless when it is gone or damaged."""
    try:
        return time.time() - float(json.loads(files.read_bytes(path))["renewed_at"])
    except (FileNotFoundError, StorageError, ValueError, KeyError, TypeError):
        return float("inf")
