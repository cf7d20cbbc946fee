"""Real Spark: a session inside the test process, and spark-submit as users start it.

All of these tests are one xdist group: one Spark at a time is enough for a machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyspark
import pytest

from tests.spark.helpers import ROOT, Submitted

LIMIT_S = 800


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/spark/" in item.nodeid:
            item.add_marker(pytest.mark.xdist_group("spark"))
            item.add_marker(pytest.mark.timeout(900))  # a JVM on a busy machine takes its time


@pytest.fixture(scope="session")
def spark_home(tmp_path_factory) -> Path:
    """pyspark's folder by links: a local cluster writes its work folder into SPARK_HOME."""
    home = tmp_path_factory.mktemp("spark_home")
    for entry in Path(pyspark.__file__).parent.iterdir():
        (home / entry.name).symlink_to(entry)
    return home


@pytest.fixture(scope="session")
def spark_env(spark_home) -> dict[str, str]:
    return {
        **os.environ,
        "SPARK_HOME": str(spark_home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
    }


@dataclass
class Submit:
    """Starts spark-submit and ends what it leaves."""

    home: Path
    env: dict[str, str]
    folder: Path
    running: list[subprocess.Popen[str]]

    def start(
        self, *args: str | Path, master: str = "local[2]", conf: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
    ) -> subprocess.Popen[str]:  # fmt: skip
        settings = {
            "spark.ui.enabled": "false",
            "spark.local.dir": str(self.folder / "spark-local"),
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
            "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
            "spark.executor.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
            **(conf or {}),
        }
        flags = [word for k, v in settings.items() for word in ("--conf", f"{k}={v}")]
        command = [str(self.home / "bin/spark-submit"), "--master", master, *flags]
        process = subprocess.Popen(
            [*command, str(ROOT / "jobs/spark_submit.py"), *map(str, args)],
            cwd=self.folder,
            env={**self.env, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def wait(self, process: subprocess.Popen[str], check: int | None = 0) -> Submitted:
        out, err = process.communicate(timeout=LIMIT_S)
        done = Submitted(process.returncode, out, err)
        if check is not None:
            assert done.code == check, f"exit {done.code}\n{done.out}\n{done.err}"
        return done

    def __call__(self, *args, check: int | None = 0, **options) -> Submitted:
        return self.wait(self.start(*args, **options), check)

    def end(self) -> None:
        for process in self.running:
            for one in psutil.process_iter(["pid"]):
                if one.pid != os.getpid() and _is_in_session(one.pid, process.pid):
                    one.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                pipe.close()


def _is_in_session(pid: int, session: int) -> bool:
    try:
        return os.getsid(pid) == session
    except OSError:
        return False


@pytest.fixture
def submit(spark_home, spark_env, tmp_path) -> Iterator[Submit]:
    starter = Submit(spark_home, spark_env, tmp_path, [])
    yield starter
    starter.end()


@pytest.fixture(scope="session")
def spark(spark_home, tmp_path_factory):
    """A session of this process, `local[2]` with retries. Commands that run here find it."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp("session")
    os.environ.update(
        {"SPARK_HOME": str(spark_home), "SPARK_LOCAL_IP": "127.0.0.1",
         "PYSPARK_PYTHON": sys.executable}
    )  # fmt: skip
    session = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.local.dir", str(folder / "local"))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.driver.extraJavaOptions",
                f"-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Dderby.system.home={folder}")
        .config("spark.executorEnv.PYTHONPATH", str(ROOT))
        .getOrCreate()
    )  # fmt: skip
    session.sparkContext.setLogLevel("ERROR")
    gateway = SparkContext._gateway
    yield session
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    try:
        gateway.proc.wait(timeout=20)
    except subprocess.TimeoutExpired:
        gateway.proc.send_signal(signal.SIGKILL)
        gateway.proc.wait()
    shutil.rmtree(folder, ignore_errors=True)
