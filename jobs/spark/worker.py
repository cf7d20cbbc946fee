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
from contextlib import ExitStack
from dataclasses import dataclass

from engine.device import bind_addresses, num_cpus
from jobs.running.ending import end_with_parent
from jobs.running.retries import Next, needs_new_engine, next_step, panics_are_failures
from jobs.running.shard_worker import set_environment, start_engine, take_and_guess
from jobs.spark import attempts
from jobs.spark.deadline import Deadline
from pipelines.catalog.items import open_items
from pipelines.inputs.read_ahead import ReadAhead
from pipelines.shards.run_shard import load_receipt, run_shard
from schemas.errors import EngineError, NightshelfError, ShardFailedError
from schemas.runs import RunPlan, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTask:
    """One shard, and what the worker needs to know of the others."""

    plan: RunPlan
    shard: Shard
    following: Shard | None  # which this worker will probably get next
    launch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What Spark gave to a task."""

    addresses: tuple[str, ...]
    cpus: int


class _Held:
    """The engine of this process, for one run on one device."""

    def __init__(self, plan: RunPlan, place: Place) -> None:
        self.id = uuid.uuid4().hex[:8]
        self.addresses = place.addresses
        self.key = _key(plan)
        self._stack = ExitStack()
        self._plan = plan
        self.started = False
        self.told = ""  # the launch that knows that it started

    def start(self) -> None:
        """Load everything."""
        self.catalog = open_items(self._plan)
        self.engine = self._stack.enter_context(start_engine(self._plan, self.catalog))
        self.ahead = self._stack.enter_context(ReadAhead(self._plan, self.catalog))
        # Spark's daemon collects garbage after every task, and a model's libraries are half a
        # million objects that are none.
        gc.freeze()
        self.started = True

    def close(self) -> None:
        """Free the device."""
        self._stack.close()


_held: _Held | None = None


def _key(plan: RunPlan) -> str:
    return f"{plan.run_dir} {plan.config.engine.model_dump_json()}"


def _hold(plan: RunPlan, place: Place) -> _Held:
    """The engine of this process, or a new one for another run. It is not started yet.

    Raises:
        EngineError: the process holds another device, and cannot change.
    """
    global _held
    if _held is not None and _held.addresses != place.addresses:
        raise EngineError(
            "a Python worker was given another device than the one its engine is on",
            expected=", ".join(_held.addresses) or "none",
            got=", ".join(place.addresses) or "none",
            do="Let an executor hold the GPUs of one task only: "
            "spark.executor.resource.gpu.amount equal to spark.task.resource.gpu.amount.",
        )
    if _held is not None and _held.key != _key(plan):
        _held.close()
        _held = None
    if _held is None:
        # An engine that nobody waits for would hold its GPU: it goes with Spark's daemon.
        end_with_parent(signal.SIGKILL)
        bind_addresses(place.addresses)
        set_environment(min(max(1, place.cpus), num_cpus()))
        _held = _Held(plan, place)
    return _held


def run_task(task: ShardTask, place: Place) -> str | None:
    """Get a shard its receipt; why not, where all attempts are used up.

    Where several engines could not start and none has yet, the shard goes back to the driver with
    neither: it is not at fault, and an engine may still be loading elsewhere. So it does where an
    error ends the run, its own or another one's (`attempts.ended`).

    Raises:
        EngineError, ShardFailedError: the engine cannot start, or may be broken. Whoever tries
            again must do so in another process.
    """
    plan, shard = task.plan, task.shard
    while load_receipt(plan, shard) is None:
        if attempts.ended(plan, task.launch) is not None:
            return None
        earlier = attempts.attempts_of(plan, task.launch, shard)
        if len(earlier) >= plan.config.run.max_attempts:
            return f"{attempts.last_words(earlier)}; given up after {len(earlier)} attempts"
        held = _hold_or_say(task, place)
        if not held.started and attempts.no_engine_starts(plan, task.launch) is not None:
            return None
        attempt = attempts.begin(plan, task.launch, shard, devices=place.addresses, engine=held.id)
        try:
            _attempt(task, held, attempt)
        except NightshelfError as err:
            attempts.fail(plan, shard, attempt, err)
            if isinstance(err, EngineError) and not held.started:
                raise  # another host may do better
            if next_step(err, len(earlier) + 1, plan.config.run.max_attempts) is Next.end_the_run:
                attempts.end_the_run(plan, task.launch, err)
                return None
            if needs_new_engine(err):
                raise
    return None


def _hold_or_say(task: ShardTask, place: Place) -> _Held:
    try:
        return _hold(task.plan, place)
    except NightshelfError as err:
        # Under a name of its own: the engine that this process has may well have started.
        attempts.engine_ended(task.plan, task.launch, uuid.uuid4().hex[:8], err)
        raise


def _start(task: ShardTask, held: _Held) -> None:
    try:
        with panics_are_failures("the engine", EngineError):
            held.start()
    except NightshelfError as err:
        attempts.engine_ended(task.plan, task.launch, held.id, err)
        raise


def _attempt(task: ShardTask, held: _Held, attempt: attempts.Attempt) -> None:
    settings = task.plan.config.run
    start, limit = settings.start_timeout_s, settings.shard_timeout_s

    def too_late(limit: float) -> None:
        silent = ShardFailedError(f"its worker reported nothing for {limit:g} s")
        attempts.fail(task.plan, task.shard, attempt, silent)

    def starts_too_late() -> None:
        late = EngineError(f"the engine has not started for {start:g} s")
        attempts.engine_ended(task.plan, task.launch, held.id, late)
        too_late(start)

    if not held.started:
        with Deadline(start, starts_too_late).running():
            _start(task, held)
    if held.told != task.launch:
        attempts.engine_ended(task.plan, task.launch, held.id, None)
        held.told = task.launch
    deadline = Deadline(limit, lambda: too_late(limit))
    with deadline.running(), panics_are_failures(task.shard.name):
        run_shard(
            task.plan,
            task.shard,
            held.engine,
            held.catalog,
            lambda users: deadline.touch(),
            take_and_guess(held.ahead, task.following),
        )
