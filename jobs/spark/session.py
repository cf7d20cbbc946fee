"""The Spark session of a run: opened when it is first needed, with what the launcher relies on."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from jobs.spark.conf import is_local
from schemas.errors import ConfigError, EngineError, NightshelfError
from schemas.settings import RunConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("nightshelf.spark")


class SparkApp:
    """A context manager that holds at most one session, and stops the one that it started."""

    def __init__(self) -> None:
        self._session: SparkSession | None = None
        self._ours = False

    def __enter__(self) -> SparkApp:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        session, self._session = self._session, None
        if session is None or not self._ours:
            return
        try:
            session.stop()
        except Exception as err:
            if error is None:
                raise
            # The JVM may have gone before us; what ended the block counts.
            log.debug("Spark was not stopped: %s", first_words(err))

    def session(self, config: RunConfig) -> SparkSession:
        """The session; of spark-submit, of the notebook around us, or a new one.

        Raises:
            ConfigError: pyspark is not installed, or it is Spark Connect.
            EngineError: Spark cannot start.
        """
        if self._session is None:
            self._session = self._open(config)
        return self._session

    def _open(self, config: RunConfig) -> SparkSession:
        try:
            from py4j.protocol import Py4JError
            from pyspark.errors import PySparkException
            from pyspark.sql import SparkSession
            from pyspark.sql.utils import is_remote
        except ImportError as err:
            raise ConfigError(
                "launcher spark needs a package that is not installed",
                got=str(err),
                do="pip install 'nightshelf[spark]', or run through spark-submit.",
            ) from err
        if is_remote() or "SPARK_REMOTE" in os.environ:
            raise ConfigError(
                "Spark Connect is not supported",
                expected="a driver of its own: spark-submit, or a classic session",
                got=f"SPARK_REMOTE={os.environ.get('SPARK_REMOTE', '')}",
                do="The launcher asks the SparkContext for slots and jobs, which Connect has not.",
            )
        active = SparkSession.getActiveSession()
        if active is not None:
            return active
        try:
            self._ours = True
            return _start(config)
        except (PySparkException, Py4JError, OSError, RuntimeError) as err:
            raise EngineError(
                "Spark cannot start",
                got=first_words(err),
                do="It needs Java 17 or 21 on PATH or in JAVA_HOME, a master that answers, and "
                "settings that Spark accepts.",
            ) from err


def _start(config: RunConfig) -> SparkSession:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    SparkContext._ensure_initialized()  # the settings of spark-submit are in its JVM
    conf = SparkConf()
    master = conf.get("spark.master", None) or "local[*]"
    retries = config.run.max_attempts + 1  # the last one only says that the others failed
    if is_local(master) or master.startswith("local-cluster"):
        # Workers on this machine are to be this Python, whatever python3 is on PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if is_local(master):
        conf.setMaster(with_retries(master, retries))
    conf.setIfMissing("spark.app.name", f"nightshelf {config.surface} {config.ds or ''}".strip())
    conf.setIfMissing("spark.task.maxFailures", str(max(4, retries)))
    return SparkSession.builder.config(conf=conf).getOrCreate()


def with_retries(master: str, retries: int) -> str:
    """A local master that tries a task again: `local[2]` gives up a job at its first failure."""
    inside = master.removeprefix("local").strip("[]") or "1"
    return master if "," in inside else f"local[{inside},{retries}]"


@contextmanager
def spark_errors(kind: type[NightshelfError], what: str) -> Iterator[None]:
    """Turn what Spark raises in the block into an error of ours."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as err:
        raise kind(what, got=first_words(err)) from err


def first_words(error: BaseException) -> str:
    """What a Spark error says happened: the last line of a Python traceback in it, else the Java
    exception, else its first line; never the stack around it.
    """
    lines = str(error).splitlines()
    said = [line.strip() for line in lines if line.strip()]
    starts = [at for at, line in enumerate(lines) if "Traceback (most recent" in line]
    for line in lines[starts[-1] + 1 :] if starts else ():
        if line.strip() and not line[0].isspace():  # lines of the stack are indented
            return line.strip()[:300]
    said = [line.removeprefix(": ") for line in said if line.startswith(": ")] or said
    return said[0][:300] if said else type(error).__name__
