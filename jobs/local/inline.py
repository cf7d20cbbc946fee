"""`run.workers: 0`: one worker, which is this process and works while it is polled."""

from __future__ import annotations

import gc

from jobs.running.scheduler import Scheduler
from jobs.running.shard_worker import ShardWorker
from schemas.errors import NightshelfError
from schemas.runs import RunPlan, Shard


class InlinePool:
    """A pool of one worker, in this process."""

    size = 1
    same_process = True

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._worker = ShardWorker(plan)
        self._error: NightshelfError | None = None  # that was reported last

    def start(self, at: int) -> None:
        """What is polled next starts the engine."""

    def submit(self, at: int, shard: Shard, following: Shard | None) -> None:
        """What is polled next runs the shard."""
        self._given = shard, following

    def poll(self, timeout_s: float, reports: Scheduler) -> None:
        """Do what was asked for, and report it."""
        starting = not self._worker.started
        try:
            if starting:
                self._worker.start()
            else:
                self._worker.run(*self._given, lambda users: reports.users(0, users))
        except NightshelfError as err:
            self._error = err
        else:
            self._error = None
        if self._error is None:
            (reports.ready if starting else reports.done)(0)
        else:
            (reports.cannot_start if starting else reports.failed)(0, self._error)

    def stop(self, at: int, *, kill: bool) -> None:
        """Free the device."""
        self._worker.close()
        self._worker = ShardWorker(self._plan)
        if self._error is not None:  # its frames hold what the engine had on its device
            self._error.__cause__ = self._error.__context__ = self._error.__traceback__ = None
        gc.collect()

    def close(self) -> None:
        """Free the device."""
        self._worker.close()
