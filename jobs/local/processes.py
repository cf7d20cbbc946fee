"""One spawned process per device, and a pipe to each. Workers end with their parent."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from engine.backends.registry import spec_of
from engine.device import bind_gpu
from jobs.running.scheduler import Scheduler
from jobs.running.shard_worker import serve, set_environment
from nightshelf import own_packages
from schemas.errors import ShardFailedError
from schemas.runs import RunPlan, Shard

_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Device:
    """What one worker owns: a GPU by its name, or a share of the processors."""

    gpu: str | None
    threads: int


@dataclass(slots=True)
class _Worker:
    """A process and the pipe to it."""

    process: BaseProcess
    pipe: Connection
    busy: bool = True  # with the start of its engine, or with a shard


class ProcessPool:
    """A process for each device."""

    same_process = False

    def __init__(self, plan: RunPlan, devices: list[Device]) -> None:
        self._plan = plan
        self.size = len(devices)
        self._devices = devices
        self._workers: dict[int, _Worker] = {}

    def start(self, at: int) -> None:
        """Spawn a process."""
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=own_packages.call,  # else another project's `jobs` might be read in its place
            args=(_work, self._plan, self._devices[at], theirs),
            # An engine may start processes of its own, which a daemon may not.
            daemon=not spec_of(self._plan.config.engine.backend).starts_processes,
            name="nightshelf-worker",
        )
        process.start()
        theirs.close()
        self._workers[at] = _Worker(process, ours)

    def submit(self, at: int, shard: Shard, following: Shard | None) -> None:
        """Send a process its shard."""
        self._workers[at].busy = True
        with contextlib.suppress(OSError):  # it died just now: its pipe will say so
            self._workers[at].pipe.send((shard, following))

    def poll(self, timeout_s: float, reports: Scheduler) -> None:
        """Pass on what processes say, and which have ended."""
        workers = dict(self._workers)
        handles = [h for w in workers.values() for h in (w.pipe, w.process.sentinel)]
        ready = wait(handles, timeout=timeout_s)
        for at, worker in workers.items():
            if worker.pipe in ready or worker.process.sentinel in ready:
                self._report(at, worker, reports)

    def _report(self, at: int, worker: _Worker, reports: Scheduler) -> None:
        """Pass on everything that a worker has said, and that it is gone."""
        while self._workers.get(at) is worker:
            try:
                if not worker.pipe.poll():
                    return
                kind, *arguments = worker.pipe.recv()
            except (EOFError, OSError):
                gone = ShardFailedError(f"its worker ended ({_exit_words(worker.process)})")
                reports.lost(at, gone)
                return
            worker.busy = kind == "users"
            getattr(reports, kind)(at, *arguments)

    def stop(self, at: int, *, kill: bool) -> None:
        """End a process, and wait for that."""
        worker = self._workers.pop(at)
        worker.pipe.close()  # a worker that is not at work leaves by itself
        if kill:
            worker.process.kill()
        worker.process.join(timeout=_GRACE_S)

    def close(self) -> None:
        """End every process."""
        for worker in self._workers.values():
            worker.pipe.close()
            if worker.busy:
                worker.process.terminate()
        for worker in self._workers.values():
            worker.process.join(timeout=_GRACE_S)
            if worker.process.is_alive():
                worker.process.kill()


def _exit_words(process: BaseProcess) -> str:
    process.join(timeout=_GRACE_S)
    code = process.exitcode
    if code is not None and code < 0:
        return f"signal {-code}" + (", perhaps out of memory" if code == -9 else "")
    return f"exit code {code}"


def _work(plan: RunPlan, device: Device, pipe: Connection) -> None:
    """A worker's life: own the device, then run shards until the pipe closes."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent decides what becomes of the shard
    threading.Thread(target=_end_with_parent, daemon=True).start()
    bind_gpu(device.gpu)
    set_environment(device.threads)

    def send(*report: Any) -> None:
        pipe.send(report)

    with contextlib.suppress(KeyboardInterrupt, EOFError, BrokenPipeError):
        serve(plan, pipe.recv, send)


def _end_with_parent() -> None:
    """Leave at once when the driver is gone, whatever this process is doing."""
    parent = mp.parent_process()
    assert parent is not None, "a worker has a parent"
    wait([parent.sentinel])
    os._exit(1)
