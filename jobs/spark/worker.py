"""Inside a Spark executor: one engine per Python worker, one shard per task. No pyspark here.

Spark gives the tasks of a stage to the same Python worker one after the other, so that an engine
that is kept in the module outlives its task. A task that raises takes its worker along, and the
engine with it: the next attempt gets a new process. That is wanted where the engine may be broken,
and avoided where only the shard is at fault.
"""

from __future__ import annotations

import gc
import signal
import uuid
from dataclasses import dataclass

from engine.device import bind_addresses, num_cpus
from jobs.running.ending import end_with_parent
from jobs.running.scheduler import (
    Next,
    given_up,
    needs_new_engine,
    next_step,
    silent_for,
    time_limit,
)
from jobs.running.shard_worker import ShardWorker, set_environment
from jobs.spark.attempts import Attempt, LaunchFiles, last_words
from jobs.spark.deadline import deadline
from pipelines.shards.run_shard import load_receipt
from schemas.errors import EngineError, NightshelfError
from schemas.runs import RunPlan, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTask:
    """One shard, and what the worker needs to know of the others."""

    shard: Shard
    following: Shard | None  # which this worker will probably get next
    log: LaunchFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What Spark gave to a task."""

    addresses: tuple[str, ...]
    cpus: int


class _ExecutorWorker(ShardWorker):
    """The engine of this process, for one run on one device."""

    def __init__(self, plan: RunPlan, place: Place) -> None:
        super().__init__(plan)
        self.id = uuid.uuid4().hex[:8]
        self.addresses = place.addresses
        self.announced = ""  # the launch that knows that it started

    def start(self) -> None:
        super().start()
        # Spark's daemon collects garbage after every task, and a model's libraries are half a
        # million objects that are none.
        gc.freeze()

    def serves(self, plan: RunPlan) -> bool:
        """Whether it has the items and the engine of a run."""
        mine = self.plan.run_dir, self.plan.config.engine
        return mine == (plan.run_dir, plan.config.engine)


_worker: _ExecutorWorker | None = None  # of this process


def _worker_for(plan: RunPlan, place: Place) -> _ExecutorWorker:
    """The worker of this process, or a new one for another run. It is not started yet.

    Raises:
        EngineError: the process holds another device, and cannot change.
    """
    global _worker
    if _worker is not None and _worker.addresses != place.addresses:
        raise EngineError(
            "a Python worker was given another device than the one its engine is on",
            expected=", ".join(_worker.addresses) or "none",
            got=", ".join(place.addresses) or "none",
            do="Let an executor hold the GPUs of one task only: "
            "spark.executor.resource.gpu.amount equal to spark.task.resource.gpu.amount.",
        )
    if _worker is not None and not _worker.serves(plan):
        _worker.close()
        _worker = None
    if _worker is None:
        # An engine that nobody waits for would hold its GPU: it goes with Spark's daemon.
        end_with_parent(signal.SIGKILL)
        bind_addresses(place.addresses)
        set_environment(min(max(1, place.cpus), num_cpus()))
        _worker = _ExecutorWorker(plan, place)
    return _worker


def run_task(task: ShardTask, place: Place) -> str | None:
    """Get a shard its receipt; why not, where all attempts are used up.

    Where several engines could not start and none has yet, the shard goes back to the driver with
    neither: it is not at fault, and an engine may still be loading elsewhere. So it does where an
    error ends the run, its own or another one's (`LaunchFiles.ended`).

    Raises:
        EngineError, ShardFailedError: the engine cannot start, or may be broken. Whoever tries
            again must do so in another process.
    """
    plan, shard, log = task.log.plan, task.shard, task.log
    max_attempts = plan.config.run.max_attempts
    while load_receipt(plan, shard) is None:
        if log.ended() is not None:
            return None
        earlier = log.attempts(shard)
        if len(earlier) >= max_attempts:
            return given_up(last_words(earlier), len(earlier))
        try:
            worker = _worker_for(plan, place)
        except NightshelfError as err:
            # Under a name of its own: the engine that this process has may well have started.
            log.engine_ended(uuid.uuid4().hex[:8], err)
            raise
        if not worker.started and log.no_engine_starts() is not None:
            return None
        attempt = log.begin(shard, devices=place.addresses, engine=worker.id)
        try:
            _attempt(task, worker, attempt)
        except NightshelfError as err:
            log.fail(shard, attempt, err)
            if isinstance(err, EngineError) and not worker.started:
                raise  # another host may do better
            if next_step(err, len(earlier) + 1, max_attempts) is Next.end_the_run:
                log.end_the_run(err)
                return None
            if needs_new_engine(err):
                raise
    return None


def _attempt(task: ShardTask, worker: _ExecutorWorker, attempt: Attempt) -> None:
    """Start the engine where it is not started, and run the shard; each within its time."""
    log, config = task.log, task.log.plan.config
    start_s, shard_s = (time_limit(config, ready=ready) for ready in (False, True))

    def starts_too_late() -> None:
        late = EngineError(f"the engine has not started for {start_s:g} s")
        log.engine_ended(worker.id, late)
        log.fail(task.shard, attempt, silent_for(start_s))

    def is_silent() -> None:
        log.fail(task.shard, attempt, silent_for(shard_s))

    if not worker.started:
        with deadline(start_s, starts_too_late):
            try:
                worker.start()
            except NightshelfError as err:
                log.engine_ended(worker.id, err)
                raise
    if worker.announced != log.launch:
        log.engine_ended(worker.id, None)
        worker.announced = log.launch
    with deadline(shard_s, is_silent) as touch:
        worker.run(task.shard, task.following, lambda users: touch())
