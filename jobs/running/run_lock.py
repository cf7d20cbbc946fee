"""One run at a time for a date and surface, whatever machine it is started on.

On a disk this is a file lock, which goes with the process that holds it. An object store has no
locks: there it is a lease, a small object that the holder renews and that counts for nothing once
it has not been renewed for a while. Should two runs work at once all the same (a clock that is
wrong, a store without conditional puts), their files do not meet, and of two publishers one wins.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pipelines.publish.parquet import record_path
from pipelines.storage import files
from pipelines.storage.storage_errors import translated
from schemas.errors import NightshelfError, RunError, StorageError
from schemas.runs import RunPlan

log = logging.getLogger("nightshelf.lock")
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
    with ExitStack() as open_files:
        with translated(path, done="locked"):
            Path(local).parent.mkdir(parents=True, exist_ok=True)
            lock = open_files.enter_context(Path(local).open("ab"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _at_work(plan, path, "Wait for it to end") from None
        yield  # closing the file gives the lock back


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
    lease = _Lease(path)
    if not lease.take():
        raise _at_work(plan, path, f"Wait for it to end, or {_STALE_S:g} s if it was killed")
    over = threading.Event()

    def renew() -> None:
        renewed = time.monotonic()
        while not over.wait(_RENEW_S):
            try:
                if not lease.renew():
                    break
                renewed = time.monotonic()
            except (NightshelfError, OSError) as err:
                log.warning("the lease of the run was not renewed: %s", err)
            if time.monotonic() - renewed > _STALE_S:
                break
        if not over.is_set():
            log.warning("the lease of the run is lost: another run of %s may start", path)

    keeper = threading.Thread(target=renew, daemon=True, name="nightshelf-lease")
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()
        lease.give_back()


class _Lease:
    """A lease is a numbered object, `<path>.00000007`; the highest number counts. A stale one is
    not removed and made again, which two could do at once. It is outnumbered, by an object that
    only one can create.
    """

    def __init__(self, path: str) -> None:
        self._folder, _, self._stem = path.rpartition("/")
        self._token = uuid.uuid4().hex
        self._number = 0

    def take(self) -> bool:
        """Hold the lease; False when somebody else does."""
        latest = max(self._numbers(), default=0)
        if latest and _age(self._path(latest)) < _STALE_S:
            return False
        self._number = latest + 1
        if not files.create(self._path(self._number), _lease(self._token)):
            return False
        for old in self._numbers():
            if old < self._number:
                files.remove_if_there(self._path(old))
        return True

    def renew(self) -> bool:
        """Say that this run is still at work; False when the lease is not its own any more."""
        if max(self._numbers(), default=0) != self._number or not self._is_ours():
            return False
        files.write_bytes(self._path(self._number), _lease(self._token))
        return True

    def give_back(self) -> None:
        """Remove the lease, if it is still this run's."""
        if self._is_ours():
            files.remove_if_there(self._path(self._number))

    def _is_ours(self) -> bool:
        return bool(_read(self._path(self._number)).get("token") == self._token)

    def _path(self, number: int) -> str:
        return f"{self._folder}/{self._stem}.{number:08d}"

    def _numbers(self) -> list[int]:
        found = (name.rpartition(".") for name in files.list_names(self._folder))
        return [int(end) for stem, _, end in found if stem == self._stem and end.isdigit()]


def _lease(token: str) -> bytes:
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "token": token}
    return json.dumps({**owner, "renewed_at": time.time()}).encode()


def _read(path: str) -> dict[str, Any]:
    """A lease; empty when it is gone or damaged."""
    try:
        found = json.loads(files.read_bytes(path))
    except (FileNotFoundError, StorageError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _age(path: str) -> float:
    """Seconds since a lease was renewed; endless when it is gone or damaged."""
    renewed = _read(path).get("renewed_at")
    return time.time() - renewed if isinstance(renewed, int | float) else float("inf")
