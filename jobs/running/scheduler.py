"""Which shard is run next, and what becomes of one that failed: the same for every launcher.

A `Pool` has workers that run shards and knows nothing else; `PoolLauncher` turns one into a
launcher. The scheduler hands out shards, counts attempts and users, replaces workers whose engine
may be broken, ends those that report nothing, and ends the run with an error that stays.

An error says of itself whether another try may help (`retryable`). One that does not ends the run
at once, as what it is: the same input gives the same end wherever it is read. Others are tried
again, `run.max_attempts` times in all. Where the engine may be broken, which only an engine that
raised something of its own is, the next try has a new one.

Spark hands out shards itself, and its workers count attempts in files; the rules are these.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from jobs.running.launcher import Launcher, Progress
from schemas.errors import EngineError, NightshelfError, ShardFailedError
from schemas.runs import RunPlan, Shard
from schemas.settings import RunConfig

_POLL_S = 0.5


class Next(Enum):
    """What to do after an attempt that failed."""

    again = "again"
    give_up = "give up"
    end_the_run = "end the run"


def next_step(error: NightshelfError, attempts: int, max_attempts: int) -> Next:
    """What to do about a shard after so many attempts, the last of which ended with this error."""
    if not error.retryable:
        return Next.end_the_run
    return Next.again if attempts < max_attempts else Next.give_up


def needs_new_engine(error: NightshelfError) -> bool:
    """Whether the engine may be in any state: something below it raised an error."""
    return isinstance(error, ShardFailedError | EngineError)


def given_up(reason: object, attempts: int) -> str:
    """What is said of a shard that is not tried again."""
    return f"{reason}; given up after {attempts} attempts"


def time_limit(config: RunConfig, *, ready: bool) -> float:
    """Seconds for which a worker may report nothing; `ready`: whether its engine has started."""
    return config.run.shard_timeout_s if ready else config.run.start_timeout_s


def silent_for(limit: float) -> ShardFailedError:
    """Why the shard of a worker failed that reported nothing for too long."""
    return ShardFailedError(f"its worker reported nothing for {limit:g} s")


class Attempts:
    """Attempts at the shards of one launch, and the reasons of those that are given up."""

    def __init__(self, plan: RunPlan, shards: list[Shard], progress: Progress) -> None:
        self._max_attempts = plan.config.run.max_attempts
        self._progress = progress
        self._tries: dict[int, int] = {}
        self.failed: dict[int, str] = {}
        progress.start(plan.inputs["users"].rows * len(shards) // plan.num_shards)

    def failed_once(self, shard: Shard, error: NightshelfError) -> bool:
        """An attempt at a shard failed; whether there is to be another.

        Raises:
            NightshelfError: the error itself, where no attempt could do better.
        """
        tries = self._tries[shard.index] = self._tries.get(shard.index, 0) + 1
        step = next_step(error, tries, self._max_attempts)
        if step is Next.end_the_run:
            raise error
        if step is Next.again:
            self._progress.note(f"{shard.name}: {error}; trying again ({tries} so far)")
            return True
        self._progress.note(f"{shard.name}: {given_up(error, tries)}")
        self.failed[shard.index] = str(error)
        return False


class Pool(Protocol):
    """Workers that run shards, each with an engine of its own (`jobs.running.shard_worker`)."""

    size: int
    same_process: bool  # whether a worker's successor has the process that the worker had

    def start(self, at: int) -> None:
        """Begin to start a worker, the first one here or the successor of one that was stopped."""

    def submit(self, at: int, shard: Shard, following: Shard | None) -> None:
        """Give a worker that is ready a shard, and name the one that it will probably get next."""

    def poll(self, timeout_s: float, reports: Scheduler) -> None:
        """Wait until a worker has something to say, but no longer than this. Report everything by
        the worker's place: it is `ready`, so many `users` more are done, its shard is `done` or
        `failed`, it `cannot_start`, or it is `lost`.
        """

    def stop(self, at: int, *, kill: bool) -> None:
        """End a worker, which may have ended already; `kill`: it does not answer."""

    def close(self) -> None:
        """End all workers, those that are at work too: nobody waits for their shards any more."""


class PoolLauncher(Launcher):
    """A launcher whose shards are run by a pool of workers."""

    @abstractmethod
    def pool(self, plan: RunPlan, num_shards: int) -> Pool:
        """Workers for so many shards; none of them is started yet."""

    def launch(self, plan: RunPlan, shards: list[Shard], progress: Progress) -> dict[int, str]:
        """Run the shards; the reasons of those that failed, by shard.

        Raises:
            NightshelfError: the engine cannot start, or what no other attempt would do better.
        """
        return Scheduler(plan, shards, self.pool(plan, len(shards)), progress).run()


@dataclass(slots=True)
class _Worker:
    """What a worker of the pool is doing, as far as it was heard."""

    running: bool = False
    ready: bool = False
    shard: Shard | None = None
    users_done: int = 0
    heard: float = 0.0

    @property
    def idle(self) -> bool:
        return self.running and self.ready and self.shard is None


class Scheduler:
    """Gets shards done by the workers of a pool, which reports what they say."""

    def __init__(self, plan: RunPlan, shards: list[Shard], pool: Pool, progress: Progress) -> None:
        self._config = plan.config
        self._waiting = deque(shards)
        self._pool = pool
        self._progress = progress
        self._attempts = Attempts(plan, shards, progress)
        self._workers = [_Worker() for _ in range(pool.size)]
        self._false_starts = 0
        self._broke: NightshelfError | None = None  # what the last engine broke with

    def run(self) -> dict[int, str]:
        """Until no shard waits and no worker works; the reasons of those that failed, by shard.

        Whatever ends it before, SIGTERM too, ends the workers.
        """
        with closing(self._pool):
            for at in range(self._pool.size):
                self._start(at)
            while self._waiting or any(worker.shard for worker in self._workers):
                self._pool.poll(_POLL_S, self)
                self._stop_silent_workers()
        return self._attempts.failed

    def ready(self, at: int) -> None:
        """A worker's engine has started: it gets a shard."""
        self._workers[at].ready = True
        self._next_shard(at)

    def users(self, at: int, number: int) -> None:
        """Count users; what is heard of a worker gives it time."""
        worker = self._workers[at]
        worker.heard = time.monotonic()
        worker.users_done += number
        self._progress.advance(number)

    def done(self, at: int) -> None:
        """A shard is done: its worker gets another."""
        self._next_shard(at)

    def failed(self, at: int, error: NightshelfError) -> None:
        """A shard failed: its worker gets another, or is replaced if its engine may be broken."""
        if needs_new_engine(error):
            self._broke = error
            self._replace(at, error)
        else:
            self._end_attempt(at, error)
            self._next_shard(at)

    def cannot_start(self, at: int, error: NightshelfError) -> None:
        """An engine did not start: it is tried again, as shards are.

        Raises:
            NightshelfError: the error itself, where no other start could do better.
        """
        self._false_starts += 1
        if next_step(error, self._false_starts, self._config.run.max_attempts) is not Next.again:
            if not (self._broke and self._pool.same_process):
                raise error
            # A device that is lost to this process comes with another one.
            for shard in self._waiting:
                self._attempts.failed[shard.index] = f"{self._broke}; then no new engine: {error}"
            self._waiting.clear()
        self._replace(at, error)

    def lost(self, at: int, error: NightshelfError) -> None:
        """A worker has ended without a word: it is replaced.

        Raises:
            EngineError: workers end before they are ready, one after the other.
        """
        self._lose(at, error, kill=False)

    def _start(self, at: int) -> None:
        self._workers[at] = _Worker(running=True, heard=time.monotonic())
        self._pool.start(at)

    def _next_shard(self, at: int) -> None:
        worker = self._workers[at]
        worker.shard, worker.users_done, worker.heard = None, 0, time.monotonic()
        if self._waiting:
            worker.shard = self._waiting.popleft()
            # After this one the worker gets what is left by the others, if they are as fast.
            turn = sum(other.running for other in self._workers) - 1
            following = self._waiting[turn] if turn < len(self._waiting) else None
            self._pool.submit(at, worker.shard, following)

    def _end_attempt(self, at: int, error: NightshelfError) -> None:
        """The worker's shard, if it has one, has used up one attempt.

        Raises:
            NightshelfError: the error itself, where no attempt could do better.
        """
        worker = self._workers[at]
        shard, worker.shard = worker.shard, None
        if shard is not None:
            self._progress.advance(-worker.users_done)
            if self._attempts.failed_once(shard, error):
                self._waiting.append(shard)

    def _replace(self, at: int, error: NightshelfError, *, kill: bool = False) -> None:
        """A worker is gone or goes: its shard is for an idle one, or for a new one in its place."""
        self._end_attempt(at, error)
        self._workers[at].running = False
        self._pool.stop(at, kill=kill)
        for other, worker in enumerate(self._workers):
            if worker.idle and self._waiting:
                self._next_shard(other)
        if self._waiting:
            self._start(at)

    def _lose(self, at: int, error: NightshelfError, *, kill: bool) -> None:
        if not self._workers[at].ready:
            self._false_starts += 1
            if next_step(error, self._false_starts, self._config.run.max_attempts) is Next.give_up:
                raise EngineError(
                    f"workers ended {self._false_starts} times before they were ready",
                    got=str(error),
                    do="Out of memory is the usual reason: use fewer workers, or a smaller model.",
                )
        self._replace(at, error, kill=kill)

    def _stop_silent_workers(self) -> None:
        now = time.monotonic()
        for at, worker in enumerate(self._workers):
            limit = time_limit(self._config, ready=worker.ready)
            if worker.running and not worker.idle and now - worker.heard > limit:
                self._lose(at, silent_for(limit), kill=True)
