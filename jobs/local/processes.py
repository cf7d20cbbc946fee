"""Local launcher: one spawned process per device, a queue of shards, and a watch over the
processes.

A worker that dies costs its shard one attempt; the shard goes to another worker, and after
`max_attempts` it is failed while the others go on (`jobs.running.retries`). A worker that reports
nothing for `shard_timeout_s` is ended. Workers end with their parent.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from engine.backends.registry import spec_of
from engine.device import bind_gpu, num_cpus, visible_gpus
from jobs.local.inline import run_inline
from jobs.running.launcher import Progress
from jobs.running.retries import Attempts, needs_new_engine, panics_are_failures
from jobs.running.shard_worker import set_environment, start_engine, take_and_guess
from nightshelf import own_packages
from pipelines.catalog.build import Catalog
from pipelines.catalog.items import open_items
from pipelines.inputs.prepare import prepare_run
from pipelines.inputs.read_ahead import ReadAhead
from pipelines.inputs.read_batches import ShardInput
from pipelines.planning.input_tables import tables_of_spark
from pipelines.shards.run_shard import run_shard
from schemas.errors import EngineError, NightshelfError, ShardFailedError
from schemas.runs import RunPlan, Shard
from schemas.settings import RunConfig

if TYPE_CHECKING:
    from engine.engine import Engine

_POLL_S = 0.5
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Device:
    """What one worker owns: a GPU by its name, or a share of the processors."""

    gpu: str | None  # or several, with commas
    threads: int


class LocalLauncher:
    """Runs shards in worker processes of this machine; with 0 workers, in this process."""

    name = "local"

    def locate(self, config: RunConfig) -> RunConfig:
        """The configuration as it is: its inputs are files.

        Raises:
            EngineError: this Python lacks the backend's packages.
        """
        for problem in spec_of(config.engine.backend).missing_packages():
            raise problem
        return config

    def problems(self, config: RunConfig) -> Iterator[NightshelfError]:
        """Inputs that are tables of Spark's catalog."""
        yield from tables_of_spark(config)

    def prepare(self, plan: RunPlan, progress: Progress) -> None:
        """Write the shards in this process."""
        prepare_run(plan)

    def published(self, plan: RunPlan, progress: Progress) -> None:
        """Nobody else has to hear of it."""

    def launch(self, plan: RunPlan, shards: list[Shard], progress: Progress) -> dict[int, str]:
        """Run the shards; the reasons of those that failed, by shard.

        Raises:
            NightshelfError: the engine cannot start, or what no other attempt would do better.
        """
        progress.start(plan.inputs["users"].rows * len(shards) // plan.num_shards)
        if plan.config.run.workers == 0:
            return run_inline(plan, shards, progress)
        devices = _devices(plan, len(shards))
        return _Pool(plan, shards, devices, progress).run()


def _devices(plan: RunPlan, num_shards: int) -> list[_Device]:
    """One device per worker: GPUs first come first served, else shares of the processors."""
    wanted = plan.config.run.workers
    gpus = visible_gpus() if plan.config.engine.device != "cpu" else []
    if gpus:
        count = len(gpus) if wanted == "auto" else wanted
        if count > len(gpus):
            raise EngineError(
                "more workers than GPUs",
                expected=f"at most {len(gpus)}",
                got=f"run.workers {count}",
            )
        return [_Device(gpu, num_cpus()) for gpu in gpus[: min(count, num_shards)]]
    count = min(1 if wanted == "auto" else wanted, num_shards)
    return [_Device(None, max(1, num_cpus() // count))] * count


@dataclass(slots=True, eq=False)
class _Worker:
    """A process, the pipe to it, and what it is doing."""

    process: BaseProcess
    pipe: Connection
    device: _Device
    ready: bool = False
    shard: Shard | None = None
    users_done: int = 0
    heard: float = field(default_factory=time.monotonic)


class _Pool:
    """Workers, the shards that wait, and what has become of the others."""

    def __init__(
        self, plan: RunPlan, shards: list[Shard], devices: list[_Device], progress: Progress
    ) -> None:
        self._plan = plan
        self._waiting = deque(shards)
        self._devices = devices
        self._progress = progress
        self._attempts = Attempts(plan.config.run.max_attempts, progress)
        self._false_starts = 0
        self._workers: list[_Worker] = []

    def run(self) -> dict[int, str]:
        """Until no shard waits and no worker works."""
        with self._ended_at_the_end():
            self._workers = [self._start(device) for device in self._devices]
            while self._waiting or any(w.shard for w in self._workers):
                ready = wait(self._handles(), timeout=_POLL_S)
                for worker in list(self._workers):
                    if worker.pipe in ready or worker.process.sentinel in ready:
                        self._receive(worker)
                self._end_the_silent()
        return self._attempts.failed

    def _handles(self) -> list[Any]:
        return [h for w in self._workers for h in (w.pipe, w.process.sentinel)]

    def _start(self, device: _Device) -> _Worker:
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=own_packages.call,  # else another project's `jobs` might be read in its place
            args=(_work, self._plan, device, theirs),
            # An engine may start processes of its own, which a daemon may not.
            daemon=not spec_of(self._plan.config.engine.backend).starts_processes,
            name="nightshelf-worker",
        )
        process.start()
        theirs.close()
        return _Worker(process, ours, device)

    def _receive(self, worker: _Worker) -> None:
        """Take everything a worker has said; notice when it is gone."""
        try:
            while worker in self._workers and worker.pipe.poll():
                self._take(worker, worker.pipe.recv())
        except (EOFError, OSError):
            ended = ShardFailedError(f"its worker ended ({_exit_words(worker.process)})")
            self._replace(worker, ended, said=False)

    def _take(self, worker: _Worker, message: tuple[str, Any]) -> None:
        kind, value = message
        worker.heard = time.monotonic()
        if kind == "users":
            worker.users_done += value
            self._progress.advance(value)
        elif kind == "cannot_start":
            if not value.retryable:
                raise value
            self._replace(worker, value)
        elif kind == "ready":
            worker.ready = True
            self._assign(worker)
        elif kind == "done":
            worker.shard = None
            self._assign(worker)
        elif needs_new_engine(value):
            self._replace(worker, value)
        else:
            self._retry(worker, value)
            self._assign(worker)

    def _assign(self, worker: _Worker) -> None:
        worker.shard, worker.users_done = None, 0
        if self._waiting:
            shard = self._waiting.popleft()
            worker.shard, worker.heard = shard, time.monotonic()
            with contextlib.suppress(OSError):  # it died just now: its sentinel tells
                worker.pipe.send((shard, self._probably_next()))

    def _probably_next(self) -> Shard | None:
        """What a worker will get after its shard, if the others are as fast."""
        turn = len(self._workers) - 1
        return self._waiting[turn] if turn < len(self._waiting) else None

    def _retry(self, worker: _Worker, error: NightshelfError) -> None:
        """The worker's shard has used up one attempt.

        Raises:
            NightshelfError: the error itself, where no attempt could do better.
        """
        shard = worker.shard
        if shard is None:
            return
        worker.shard = None
        self._progress.advance(-worker.users_done)
        worker.users_done = 0
        if self._attempts.failed_once(shard, error):
            self._waiting.append(shard)

    def _replace(self, worker: _Worker, error: NightshelfError, *, said: bool = True) -> None:
        """A worker is gone or goes: its shard is for an idle one, or for a new one in its place.

        Args:
            said: whether the error is what the worker said of itself.
        """
        self._retry(worker, error)
        self._workers.remove(worker)
        worker.pipe.close()
        worker.process.join(timeout=_GRACE_S)
        if not worker.ready:
            self._false_starts += 1
            if self._false_starts >= self._plan.config.run.max_attempts:
                if said:
                    raise error
                raise EngineError(
                    f"workers ended {self._false_starts} times before they were ready",
                    got=str(error),
                    do="Out of memory is the usual reason: use fewer workers, or a smaller model.",
                )
        for other in self._workers:
            if other.ready and other.shard is None:
                self._assign(other)
        if self._waiting:
            self._workers.append(self._start(worker.device))

    def _end_the_silent(self) -> None:
        settings = self._plan.config.run
        for worker in list(self._workers):
            limit = settings.shard_timeout_s if worker.ready else settings.start_timeout_s
            idle = worker.ready and worker.shard is None
            if not idle and time.monotonic() - worker.heard > limit:
                worker.process.kill()
                worker.process.join(timeout=_GRACE_S)
                silent = ShardFailedError(f"its worker reported nothing for {limit:g} s")
                self._replace(worker, silent, said=False)

    @contextlib.contextmanager
    def _ended_at_the_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            for worker in self._workers:
                worker.pipe.close()  # an idle worker leaves by itself
                if worker.shard is not None or not worker.ready:
                    worker.process.terminate()
            for worker in self._workers:
                worker.process.join(timeout=_GRACE_S)
                if worker.process.is_alive():
                    worker.process.kill()


def _exit_words(process: BaseProcess) -> str:
    process.join(timeout=_GRACE_S)
    code = process.exitcode
    if code is not None and code < 0:
        return f"signal {-code}" + (", perhaps out of memory" if code == -9 else "")
    return f"exit code {code}"


def _work(plan: RunPlan, device: _Device, pipe: Connection) -> None:
    """A worker's life: own the device, start the engine, run shards until the pipe closes."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent decides what becomes of the shard
    threading.Thread(target=_end_with_parent, daemon=True).start()
    bind_gpu(device.gpu)
    set_environment(device.threads)
    with contextlib.suppress(KeyboardInterrupt, EOFError, BrokenPipeError):
        try:
            with panics_are_failures("the worker", EngineError), contextlib.ExitStack() as stack:
                catalog = open_items(plan)
                engine = stack.enter_context(start_engine(plan, catalog))
                ahead = stack.enter_context(ReadAhead(plan, catalog))
                pipe.send(("ready", None))
                while True:
                    shard, following = pipe.recv()
                    _run_one(plan, shard, engine, catalog, pipe, take_and_guess(ahead, following))
        except NightshelfError as err:
            pipe.send(("cannot_start", err))


def _run_one(
    plan: RunPlan,
    shard: Shard,
    engine: Engine,
    catalog: Catalog | None,
    pipe: Connection,
    read: Callable[[Shard], ShardInput],
) -> None:
    try:
        with panics_are_failures(shard.name):
            run_shard(plan, shard, engine, catalog, lambda users: pipe.send(("users", users)), read)
    except NightshelfError as err:
        pipe.send(("failed", err))
    else:
        pipe.send(("done", shard.index))


def _end_with_parent() -> None:
    """Leave at once when the driver is gone, whatever this process is doing."""
    parent = mp.parent_process()
    assert parent is not None, "a worker has a parent"
    wait([parent.sentinel])
    os._exit(1)
