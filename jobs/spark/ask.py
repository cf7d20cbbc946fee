"""Before the model is loaded anywhere: do executors answer, and have they what the run needs?"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError
from pyspark import cloudpickle
from pyspark.errors import PySparkException

from jobs.running.launcher import Progress
from jobs.spark import probe as spark_probe
from jobs.spark.conf import GpuSettings
from jobs.spark.session import first_words
from schemas.errors import EngineError
from schemas.runs import RunPlan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def ask_executors(spark: SparkSession, plan: RunPlan, progress: Progress) -> None:
    """A small stage: one task per slot looks around, and what it saw is told or refused.

    Raises:
        ConfigError, EngineError: executors lack something, or none answers.
    """
    asked = json.dumps(spark_probe.questions(plan))
    slots = min(256, max(1, spark.sparkContext.defaultParallelism))
    cloudpickle.register_pickle_by_value(spark_probe)
    limit = plan.config.run.start_timeout_s
    late = threading.Event()
    try:
        with _cancelled_after(spark, limit, late):
            frame = spark.range(0, slots, 1, slots)
            frame = frame.mapInArrow(spark_probe.answering(asked), "answer string")
            answers = [row.answer for row in frame.collect()]
    except (PySparkException, Py4JError) as err:
        if late.is_set():
            raise EngineError(
                f"no executor has answered for {limit:g} s",
                expected="resources for at least one executor",
                do="See the cluster's page: executors may ask for more memory, cores or GPUs than "
                "any machine has left. run.start_timeout_s says how long to wait.",
            ) from err
        raise EngineError(
            "executors cannot run the driver's Python",
            got=first_words(err),
            do="Driver and executors need the same Python minor version with pyspark, pyarrow and "
            "pandas: set spark.pyspark.python (PYSPARK_PYTHON) on both; see docs/spark.md.",
        ) from err
    finally:
        cloudpickle.unregister_pickle_by_value(spark_probe)
    settings = GpuSettings.of(lambda name: spark.conf.get(name, None), plan.config.spark.resource)
    handed_out = settings.executor is not None or plan.config.spark.profile != "none"
    for note in spark_probe.check_answers(plan, answers, handed_out=handed_out):
        progress.note(note)


@contextmanager
def _cancelled_after(spark: SparkSession, seconds: float, late: threading.Event) -> Iterator[None]:
    """Cancel the jobs of the block, and set `late`, when it takes longer."""
    context, tag = spark.sparkContext, f"nightshelf-look-{uuid.uuid4().hex[:8]}"

    over = threading.Event()

    def cancel() -> None:
        if over.wait(seconds):
            return
        late.set()
        while not over.is_set():  # again: a job that is not submitted yet cannot be cancelled
            context.cancelJobsWithTag(tag)
            over.wait(1.0)

    canceller = threading.Thread(target=cancel, daemon=True, name="nightshelf-look-limit")
    context.addJobTag(tag)
    canceller.start()
    try:
        yield
    finally:
        over.set()
        canceller.join()
        context.removeJobTag(tag)
