"""The scheduler over a pool whose workers say what a test has written down."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jobs.running import scheduler
from jobs.running.scheduler import Scheduler
from pipelines.inputs.prepared import shards_of
from pipelines.planning.plan import plan_run
from schemas.config_file import load_config
from schemas.errors import EngineError, ShardFailedError, StorageError, TableError
from tests.factories import write_config, write_inputs

BUSY = StorageError("the store is busy")  # another try may help, with the same engine
BROKEN = ShardFailedError("the engine broke")
GONE = ShardFailedError("its worker ended (exit code 7)")
NO_DEVICE = EngineError("no device")


class ScriptedPool:
    """One line of the script for each poll: reports by name, each with its worker's place."""

    def __init__(self, size, script, *, same_process=False):
        self.size, self.same_process = size, same_process
        self.script = list(script)
        self.asked: list[tuple] = []

    def start(self, at):
        self.asked.append(("start", at))

    def submit(self, at, shard, following):
        self.asked.append(("submit", at, shard.index, following and following.index))

    def poll(self, timeout_s, reports):
        for name, *arguments in self.script.pop(0):
            getattr(reports, name)(*arguments)

    def stop(self, at, *, kill):
        self.asked.append(("kill" if kill else "stop", at))

    def close(self):
        self.asked.append(("close",))


class Bar:
    def __init__(self):
        self.users, self.notes = 0, []

    def start(self, users):
        self.users = 0

    def advance(self, users):
        self.users += users

    def note(self, message):
        self.notes.append(message)


@pytest.fixture
def run(tmp_path):
    """Runs three shards over a pool; the pool, the bar and the shards that failed."""
    write_inputs(tmp_path, num_users=30)
    config = write_config(tmp_path, run__shard_users=10, run__max_attempts=2)
    plan = plan_run(load_config(config))
    assert plan.num_shards == 3

    def go(*script, size=1, **settings):
        pool, bar = ScriptedPool(size, script, **settings), Bar()
        go.pool = pool
        failed = Scheduler(plan, shards_of(plan), pool, bar).run()
        assert pool.script == []
        return pool, bar, failed

    return go


def test_shards_go_to_who_is_free_and_the_next_one_is_guessed(run):
    pool, _, failed = run(
        [("ready", 1), ("ready", 0)], [("done", 0)], [("done", 0), ("done", 1)], size=2
    )
    assert failed == {}
    assert pool.asked == [
        ("start", 0),
        ("start", 1),
        ("submit", 1, 0, 2),
        ("submit", 0, 1, None),
        ("submit", 0, 2, None),
        ("close",),
    ]


def test_users_of_an_attempt_that_failed_are_taken_back(run):
    _, bar, failed = run(
        [("ready", 0), ("users", 0, 4), ("failed", 0, BUSY)],
        [("users", 0, 10), ("done", 0), ("users", 0, 10), ("done", 0), ("users", 0, 10)],
        [("done", 0)],
    )
    assert (bar.users, failed) == (30, {})
    assert len(bar.notes) == 1


def test_a_shard_that_failed_goes_last_and_a_worker_with_a_broken_engine_is_replaced(run):
    pool, _, failed = run(
        [("ready", 0), ("failed", 0, BROKEN)], [("ready", 0), ("done", 0), ("done", 0), ("done", 0)]
    )
    assert failed == {}
    assert pool.asked[2:4] == [("stop", 0), ("start", 0)]
    assert [shard for kind, _, shard, *_ in (a for a in pool.asked if a[0] == "submit")] == [
        0, 1, 2, 0,
    ]  # fmt: skip


def test_a_shard_that_kills_its_workers_is_given_up_and_the_others_are_done(run):
    pool, bar, failed = run(
        [("ready", 0), ("lost", 0, GONE)],
        [("ready", 0), ("done", 0), ("done", 0), ("lost", 0, GONE)],
    )
    assert failed == {0: str(GONE)}
    assert pool.asked[-2:] == [("stop", 0), ("close",)], "nobody waits: no worker is started"
    assert "given up after 2 attempts" in bar.notes[-1]


def test_what_an_idle_worker_can_do_waits_for_no_new_one(run):
    pool, _, failed = run(
        [("ready", 0), ("ready", 1)],
        [("done", 1), ("done", 1), ("lost", 0, GONE)],
        [("done", 1)],
        size=2,
    )
    assert failed == {}
    assert pool.asked[-3:] == [("stop", 0), ("submit", 1, 0, None), ("close",)]


def test_an_error_that_stays_ends_the_run_and_every_worker(run):
    with pytest.raises(TableError):
        run([("ready", 0), ("failed", 0, TableError("damage"))])
    assert run.pool.asked[-1] == ("close",)


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_whatever_ends_the_run_ends_every_worker(run, end, monkeypatch):
    def interrupted(self, timeout_s, reports):
        raise end

    monkeypatch.setattr(ScriptedPool, "poll", interrupted)
    with pytest.raises(end):
        run()
    assert run.pool.asked[-1] == ("close",)


def test_an_engine_that_may_yet_start_is_tried_as_often_as_a_shard(run):
    passing = EngineError("the device is busy")
    passing.retryable = True
    pool, _, failed = run(
        [("cannot_start", 0, passing)], [("ready", 0), ("done", 0), ("done", 0), ("done", 0)]
    )
    assert failed == {}
    assert pool.asked[:3] == [("start", 0), ("stop", 0), ("start", 0)]
    with pytest.raises(EngineError, match="the device is busy"):
        run([("cannot_start", 0, passing), ("cannot_start", 0, passing)])
    with pytest.raises(EngineError, match="no device"):
        run([("cannot_start", 0, NO_DEVICE)])


def test_workers_that_end_before_they_are_ready_end_the_run(run):
    with pytest.raises(EngineError, match="workers ended 2 times before they were ready"):
        run([("lost", 0, GONE), ("lost", 0, GONE)])


def test_a_device_that_is_lost_to_this_process_fails_what_is_left(run):
    script = [("ready", 0), ("done", 0), ("failed", 0, BROKEN), ("cannot_start", 0, NO_DEVICE)]
    _, _, failed = run(script, same_process=True)
    assert failed == dict.fromkeys((1, 2), f"{BROKEN}; then no new engine: {NO_DEVICE}")
    with pytest.raises(EngineError, match="no device"):
        run(script)


def test_a_worker_that_reports_nothing_is_killed_at_its_limit(run, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(
        Scheduler, "later", lambda self, seconds: now.append(now.pop() + seconds), raising=False
    )
    pool, bar, failed = run(
        [("later", 1800.0)],
        [("later", 1.0)],  # one second more than an engine has to start
        [("ready", 0), ("later", 3600.0)],
        [("users", 0, 1), ("later", 3600.0)],
        [("later", 1.0)],
        [("ready", 0), ("done", 0), ("done", 0), ("done", 0)],
    )
    assert failed == {}
    kinds = [what[0] for what in pool.asked if what[0] != "submit"]
    assert kinds == ["start", "kill", "start", "kill", "start", "close"]
    assert [note.count("reported nothing for 3600 s") for note in bar.notes] == [1]


def test_a_worker_without_a_shard_may_be_silent(run, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(
        Scheduler, "later", lambda self, seconds: now.append(now.pop() + seconds), raising=False
    )
    pool, _, _ = run(
        [("ready", 0), ("ready", 1), ("done", 1), ("done", 1)],
        [("later", 3000.0), ("users", 0, 1), ("later", 3000.0)],
        [("done", 0)],
        size=2,
    )
    assert "kill" not in {what[0] for what in pool.asked}
