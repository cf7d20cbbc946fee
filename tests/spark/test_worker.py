"""What becomes of shards whose engines do not start: no Spark is started here."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs.spark import launch as launch_spark
from jobs.spark import worker as spark_worker
from jobs.spark.attempts import LaunchFiles
from jobs.spark.launch import SparkLauncher
from jobs.spark.worker import Place, ShardTask, run_task
from pipelines.inputs.prepared import shards_of
from pipelines.planning.plan import plan_run
from schemas.config_file import load_config
from schemas.errors import AccessError, EngineError, StorageError
from tests.factories import write_config, write_inputs

LAUNCH = "launch"
HERE = Place(addresses=(), cpus=1)
BROKEN = EngineError("CUDA out of memory")


@pytest.fixture
def plan(tmp_path):
    write_inputs(tmp_path, num_users=30)
    config = write_config(tmp_path, run__shard_users=6, run__max_attempts=2)
    return plan_run(load_config(config))


def task_of(plan, at: int) -> ShardTask:
    return ShardTask(shard=shards_of(plan)[at], following=None, log=LaunchFiles(plan, LAUNCH))


def fail_engines(log: LaunchFiles) -> None:
    for engine in ("e1", "e2"):
        log.engine_ended(engine, BROKEN)


def test_a_shard_that_meets_no_engine_goes_back_without_a_reason(plan, monkeypatch):
    worker = SimpleNamespace(id="e3", started=False)
    begun = []
    monkeypatch.setattr(spark_worker, "_worker_for", lambda plan, place: worker)
    monkeypatch.setattr(spark_worker, "_attempt", lambda *args: begun.append(args))
    task = task_of(plan, 3)
    log = task.log
    fail_engines(log)
    assert run_task(task, HERE) is None
    assert log.attempts(task.shard) == []
    log.engine_ended("e4", None)
    assert "given up after 2 attempts" in str(run_task(task, HERE))
    assert len(begun) == 2, "once an engine has started, it is tried"


def test_a_worker_that_cannot_hold_an_engine_says_so(plan, monkeypatch):
    def refuse(plan, place):
        raise EngineError("CUDA was started in this process before its GPU was known")

    monkeypatch.setattr(spark_worker, "_worker_for", refuse)
    log = LaunchFiles(plan, LAUNCH)
    for _ in range(2):
        assert log.no_engine_starts() is None
        with pytest.raises(EngineError):
            run_task(task_of(plan, 0), HERE)
    last = log.no_engine_starts()
    assert last is not None
    assert "before its GPU was known" in last.message


class Stages:
    """Stages that only the test knows the end of, and a driver that sees them."""

    def __init__(self, plan, monkeypatch, outcomes) -> None:
        self.plan, self.outcomes = plan, outcomes
        self.asked: list[list[int]] = []
        self.notes: list[str] = []
        self.done: set[int] = set()
        monkeypatch.setattr(launch_spark, "check_conf", lambda *args: None)
        monkeypatch.setattr(
            launch_spark, "load_receipt", lambda plan, shard: shard.index in self.done or None
        )
        app = SimpleNamespace(session=lambda config: SimpleNamespace(conf={}))
        self.launcher = SparkLauncher(app)
        self.launcher._asked = plan.run_dir
        monkeypatch.setattr(self.launcher, "_run_stage", self.run_stage)

    def run_stage(self, spark, shards, log):
        self.asked.append([shard.index for shard in shards])
        return self.outcomes[len(self.asked) - 1](self, log) or {}, None

    def launch(self) -> dict[int, str]:
        progress = SimpleNamespace(
            start=lambda users: None, advance=lambda users: None, note=self.notes.append
        )
        return self.launcher.launch(self.plan, shards_of(self.plan), progress)


def test_shards_that_met_only_bad_engines_get_a_stage_with_the_good_ones(plan, monkeypatch):
    def drained(stages, log):
        fail_engines(log)
        log.engine_ended("e3", None)  # it took longer to load
        stages.done = {0}
        return {1: "CUDA out of memory; given up after 2 attempts"}

    def done(stages, log):
        stages.done |= {2, 3, 4}

    monkeypatch.setattr(launch_spark, "_progress_by_receipts", lambda *args: nullcontext())
    stages = Stages(plan, monkeypatch, [drained, done])
    assert set(stages.launch()) == {1}
    assert stages.asked == [[0, 1, 2, 3, 4], [2, 3, 4]]
    assert "3 shards met no engine that starts; others have started since" in stages.notes


def test_where_no_engine_started_it_is_the_engine(plan, monkeypatch):
    monkeypatch.setattr(launch_spark, "_progress_by_receipts", lambda *args: nullcontext())
    stages = Stages(plan, monkeypatch, [lambda stages, log: fail_engines(log)])
    with pytest.raises(EngineError, match=r"starts on no executor.*CUDA out of memory"):
        stages.launch()
    assert len(stages.asked) == 1


@pytest.mark.parametrize(
    "error",
    [
        StorageError("the store is busy"),
        OSError("no route"),
        AccessError("the credentials have expired"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_store_that_cannot_be_looked_at_stops_only_the_bar(plan, monkeypatch, error):
    shards = shards_of(plan)
    receipts = Path(plan.run_dir) / "receipts"
    receipts.mkdir(parents=True)
    for shard in shards[:2]:
        (receipts / f"{shard.name}.json").write_text("{}")
    seen, looks = [], []
    list_names = launch_spark.files.list_names
    counted = SimpleNamespace(counts=SimpleNamespace(users_in=6))

    def sometimes(folder):
        looks.append(folder)
        if len(looks) in (1, 2) or over:
            raise error
        return list_names(folder)

    over = []
    monkeypatch.setattr(launch_spark, "_POLL_S", 0.01)
    monkeypatch.setattr(launch_spark.files, "list_names", sometimes)
    monkeypatch.setattr(launch_spark, "load_receipt", lambda plan, shard, prove: counted)
    progress = SimpleNamespace(advance=seen.append)
    with launch_spark._progress_by_receipts(plan, shards, progress):
        end = time.monotonic() + 30
        while len(seen) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        over.append(True)
    assert seen == [6, 6], "the watcher went on, and the last look fails nothing"
