"""A launcher as somebody else would write it: one thread per worker, all in this process."""

from __future__ import annotations

import queue
import threading
from typing import Any

from jobs.running.scheduler import Pool, PoolLauncher, Scheduler
from jobs.running.shard_worker import serve
from schemas.errors import ShardFailedError
from schemas.runs import RunPlan, Shard


class ThreadPool:
    """Two threads, a queue of shards to each, and one queue of what they say."""

    size = 2
    same_process = True

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._shards: dict[int, queue.SimpleQueue[tuple[Shard, Shard | None] | None]] = {}
        self._said: queue.SimpleQueue[tuple[int, Any, str, tuple[Any, ...]]] = queue.SimpleQueue()

    def start(self, at: int) -> None:
        mine = self._shards[at] = queue.SimpleQueue()

        def say(name: str, *arguments: Any) -> None:
            self._said.put((at, mine, name, arguments))

        def work() -> None:
            try:
                serve(self._plan, mine.get, say)
            except SystemExit as err:  # as if its host were gone
                say("lost", ShardFailedError(f"its thread ended: {err}"))

        threading.Thread(target=work, daemon=True).start()

    def submit(self, at: int, shard: Shard, following: Shard | None) -> None:
        self._shards[at].put((shard, following))

    def poll(self, timeout_s: float, reports: Scheduler) -> None:
        try:
            at, of, name, arguments = self._said.get(timeout=timeout_s)
        except queue.Empty:
            return
        if self._shards.get(at) is of:  # else it is of a worker that was replaced
            getattr(reports, name)(at, *arguments)

    def stop(self, at: int, *, kill: bool) -> None:
        self._shards.pop(at).put(None)

    def close(self) -> None:
        for at in list(self._shards):
            self.stop(at, kill=False)


class ThreadLauncher(PoolLauncher):
    """Runs shards in threads."""

    name = "threads"

    def pool(self, plan: RunPlan, num_shards: int) -> Pool:
        return ThreadPool(plan)
