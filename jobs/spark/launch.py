"""Spark launcher: one task per shard, one engine per executor, receipts as the only result.

The stage is `range(shards)` with as many partitions, mapped by `mapInArrow`: exactly one shard per
task, without a shuffle, so that adaptive execution has nothing to merge. A task returns its shard's
number and what kept it from being done; rows never pass through Spark.

Who retries: a shard that fails inside a whole engine is tried again at once. Anything else fails
the task, and Spark tries it elsewhere, in a new process (`worker.py`). Attempts are counted in
files, so that a shard that kills its workers is given up after `run.max_attempts` and the others go
on. Where Spark gives up the whole stage first, the shards that are left get another stage; and so
do those that met no engine because good ones were still loading.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark import TaskContext
from pyspark.errors import PySparkException

from jobs.running.launcher import Launcher, Progress
from jobs.running.scheduler import Attempts, given_up
from jobs.spark.ask import ask_executors
from jobs.spark.attempts import LaunchFiles, last_words
from jobs.spark.carried import carried
from jobs.spark.conf import check_conf
from jobs.spark.prepare import prepare_on_executors
from jobs.spark.register import check_registration, register
from jobs.spark.session import SparkApp, first_words
from jobs.spark.tables import copy_tables, table_problems
from jobs.spark.worker import Place, ShardTask, run_task
from pipelines.shards.run_shard import load_receipt
from pipelines.storage import files
from schemas.errors import EngineError, NightshelfError
from schemas.runs import RunPlan, Shard
from schemas.settings import RunConfig

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

_POLL_S = 1.0
_SCHEMA = pa.schema([("shard", pa.int64()), ("failure", pa.string())])
_DDL = "shard long, failure string"


@contextmanager
def open_spark() -> Iterator[SparkLauncher]:
    """The launcher, with an application of its own where there is none yet."""
    with SparkApp() as app:
        yield SparkLauncher(app)


class SparkLauncher(Launcher):
    """Runs shards in the executors of a Spark application."""

    name = "spark"

    def __init__(self, app: SparkApp) -> None:
        self._app = app
        self._profile: ResourceProfile | None = None  # equal ones are not the same one to Spark
        self._asked: str | None = None

    def locate(self, config: RunConfig) -> RunConfig:
        """The configuration with tables of Spark's catalog as files.

        Raises:
            TableError: Spark knows no such table, or cannot read it; or `spark.register_table` is
                a table that cannot be told of what will be published.
        """
        name = config.spark.register_table
        if name is not None:
            check_registration(self._app.session(config), config, name)
        if not config.inputs.tables:
            return config
        return copy_tables(self._app.session(config), config)

    def problems(self, config: RunConfig) -> Iterator[NightshelfError]:
        """Tables of Spark's catalog that a run would not read, or could not tell of its rows."""
        name = config.spark.register_table
        if name is None and not config.inputs.tables:
            return
        try:
            spark = self._app.session(config)
            if name is not None:
                check_registration(spark, config, name)
        except NightshelfError as err:
            yield err
            return
        yield from table_problems(spark, config)

    def prepare(self, plan: RunPlan, progress: Progress) -> None:
        """Write the shards: here, or in executors.

        Raises:
            RunError: Spark gave up; the same command tries again.
        """
        if plan.config.spark.prepare == "driver" or plan.config.inputs.self_contained:
            super().prepare(plan, progress)
            return
        spark = self._app.session(plan.config)
        self._ask_executors(spark, plan, progress)
        prepare_on_executors(spark, plan)

    def published(self, plan: RunPlan, progress: Progress) -> None:
        """Add the partition to the table of Spark's catalog, where one is configured."""
        name = plan.config.spark.register_table
        if name is not None:
            register(self._app.session(plan.config), plan, name)
            progress.note(f"{name} has the partition")

    def launch(self, plan: RunPlan, shards: list[Shard], progress: Progress) -> dict[int, str]:
        """Run the shards; the reasons of those that failed, by shard.

        Raises:
            ConfigError: Spark is configured so that engines would share or miss their GPUs, or
                executors do not see the run's folder.
            EngineError: executors lack something, or the engine cannot start on any.
            NightshelfError: what no other attempt at a shard would do better.
        """
        spark = self._app.session(plan.config)
        check_conf(plan.config, lambda name: spark.conf.get(name, None))
        self._ask_executors(spark, plan, progress)
        log = LaunchFiles(plan, uuid.uuid4().hex[:12])
        failed = Attempts(plan, shards, progress).failed
        left, ended = shards, None
        for _ in range(plan.config.run.max_attempts + 1):
            with _progress_by_receipts(plan, left, progress):
                given_up_there, ended = self._run_stage(spark, left, log)
            failed.update(given_up_there)
            if (end := log.ended()) is not None:
                raise end
            if (failure := log.no_engine_starts()) is not None:  # trying on helps nobody
                raise EngineError("the engine starts on no executor", got=failure.message)
            left = [s for s in left if s.index not in failed and load_receipt(plan, s) is None]
            if not left:
                break
            progress.note(
                f"Spark ended the stage with {len(left)} shards to do: {ended}"
                if ended is not None
                else f"{len(left)} shards met no engine that starts; others have started since"
            )
        for shard in left:
            failed[shard.index] = _why(log, shard, ended)
        _note_attempts(log, shards, failed, progress)
        return failed

    def _ask_executors(self, spark: SparkSession, plan: RunPlan, progress: Progress) -> None:
        """Once for a run: what executors are like is known then."""
        if self._asked != plan.run_dir:
            ask_executors(spark, plan, progress)
            self._asked = plan.run_dir

    def _run_stage(
        self, spark: SparkSession, shards: list[Shard], log: LaunchFiles
    ) -> tuple[dict[int, str], str | None]:
        """One Spark job over some shards.

        Returns:
            The reasons of shards that are given up; and why Spark gave up, where it did.
        """
        if self._profile is None:
            self._profile = _resource_profile(spark, log.plan.config)
        context, tag, num = spark.sparkContext, f"nightshelf-{log.launch}", len(shards)
        context.addJobTag(tag)
        context.setJobDescription(f"nightshelf score {log.plan.run_id}")
        work = carried(_work(shards, log, max(1, context.defaultParallelism)))
        one_each = spark.range(0, num, 1, num)
        try:
            rows = one_each.mapInArrow(work, _DDL, profile=self._profile).collect()
        except (PySparkException, Py4JError) as err:
            return {}, first_words(err)
        except BaseException:  # Ctrl-C or SIGTERM: tasks must not go on for nobody
            with suppress(PySparkException, Py4JError, OSError):
                context.cancelJobsWithTag(tag)
            raise
        finally:
            context.removeJobTag(tag)
            context.setJobDescription("")
        return {row.shard: row.failure for row in rows if row.failure is not None}, None


def _work(
    shards: list[Shard], log: LaunchFiles, slots: int
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function of the stage: places in `shards` in, outcomes out."""
    resource = log.plan.config.spark.resource

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        place = _place(resource)
        for batch in batches:
            for at in batch.column(0).to_pylist():
                following = shards[at + slots] if at + slots < len(shards) else None
                task = ShardTask(shard=shards[at], following=following, log=log)
                outcome = {"shard": shards[at].index, "failure": run_task(task, place)}
                yield pa.RecordBatch.from_pylist([outcome], schema=_SCHEMA)

    return work


def _place(resource: str) -> Place:
    """What Spark gave to this task."""
    context = TaskContext.get()
    assert context is not None, "only called in a task"
    given = context.resources().get(resource)
    return Place(
        addresses=tuple(given.addresses) if given is not None else (), cpus=int(context.cpus())
    )


def _resource_profile(spark: SparkSession, config: RunConfig) -> ResourceProfile | None:
    """The resources that the scoring stage asks for by itself; None where Spark's settings say."""
    if config.spark.profile == "none":
        return None
    from pyspark.resource import (
        ExecutorResourceRequests,
        ResourceProfileBuilder,
        TaskResourceRequests,
    )

    name = config.spark.resource
    cpus = int(spark.conf.get("spark.task.cpus", "1") or 1)
    builder = ResourceProfileBuilder().require(TaskResourceRequests().cpus(cpus).resource(name, 1))
    if config.spark.profile == "executor":
        conf = spark.conf.get
        executors = (
            ExecutorResourceRequests()
            .cores(int(conf("spark.executor.cores", "1") or 1))
            .memory(conf("spark.executor.memory", "1g") or "1g")
            .resource(name, 1, config.spark.discovery_script or "")
        )
        overhead = conf("spark.executor.memoryOverhead", None)
        if overhead is not None:
            executors = executors.memoryOverhead(overhead)
        builder = builder.require(executors)
    return builder.build


@contextmanager
def _progress_by_receipts(plan: RunPlan, shards: list[Shard], progress: Progress) -> Iterator[None]:
    """Count users of new receipts for the progress bar while the block runs."""
    over = threading.Event()
    waiting = {f"{shard.name}.json": shard for shard in shards}

    def look() -> None:
        with suppress(NightshelfError, OSError):  # only the bar waits; the next look may see them
            for name in files.list_names(files.join(plan.run_dir, "receipts")):
                shard = waiting.get(name)
                receipt = load_receipt(plan, shard, prove=False) if shard else None
                if receipt is not None:
                    del waiting[name]
                    progress.advance(receipt.counts.users_in)

    def watch() -> None:
        while not over.wait(_POLL_S):
            look()

    watcher = threading.Thread(target=watch, daemon=True, name="nightshelf-receipts")
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    look()


def _why(log: LaunchFiles, shard: Shard, ended: str | None) -> str:
    """Why a shard has no receipt that its tasks gave no reason for."""
    tried = log.attempts(shard)
    if tried and tried[-1].failure is not None:
        return tried[-1].failure.message
    if not tried and ended is None:
        return "it met no engine that starts"
    return f"Spark ended the stage: {ended}" if ended else last_words(tried)


def _note_attempts(
    log: LaunchFiles,
    shards: list[Shard],
    failed: dict[int, str],
    progress: Progress,
) -> None:
    """Say which shards took more than one attempt."""
    for shard in shards:
        tried = log.attempts(shard)
        if len(tried) > 1 or shard.index in failed:
            reason = last_words(tried[:-1] or tried)
            done = f"{reason}; done after {len(tried)} attempts"
            end = given_up(reason, len(tried)) if shard.index in failed else done
            progress.note(f"{shard.name}: {end}")
