"""The tasks by themselves: which date a run is of, what is tried again, what a failure says."""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
import time
from datetime import UTC, date, datetime, timedelta
from types import SimpleNamespace

import pytest

pytest.importorskip("airflow.sdk")

import pendulum
from airflow.sdk import RetryAction
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from airflow.serialization.encoders import coerce_to_core_timetable
from airflow.timetables.base import TimeRestriction
from nightshelf_alerts import run_failed, run_late
from nightshelf_dates import partition_date
from nightshelf_steps import (
    InputsReady,
    NightshelfOperator,
    RetryOnlyWhatHelps,
    StepFailed,
    ids_and_counts,
)

from tests.dags.conftest import PYTHON, build, nightshelf_env, write_surfaces


def event(partition_key=None, name="users", **extra):
    return SimpleNamespace(
        asset=SimpleNamespace(name=name), partition_key=partition_key, extra=extra
    )


def dag_run(**known):
    start = {"partition_key": None, "consumed_asset_events": [], "logical_date": None}
    return SimpleNamespace(**(start | known))


# --- the date -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "run", "want"),
    [
        ({"ds": "2026-11-28"}, dag_run(partition_key="2026-11-01"), "2026-11-28"),
        ({}, dag_run(partition_key="2026-11-28"), "2026-11-28"),
        # a partitioned asset of another DAG whose keys are times
        ({"ds": None}, dag_run(partition_key="2026-11-28T00:00:00"), "2026-11-28"),
        ({}, dag_run(consumed_asset_events=[event("2026-11-28")]), "2026-11-28"),
        ({}, dag_run(consumed_asset_events=[event(ds="2026-11-28"), event()]), "2026-11-28"),
        # by hand, at the end of the 29th: what the run of the 29th is of, the day before
        ({}, dag_run(logical_date=datetime(2026, 11, 29, 23, 30, tzinfo=UTC)), "2026-11-28"),
    ],
    ids=["parameter", "partition key", "time as key", "event's key", "event's extra", "by hand"],
)
def test_the_partition_date_is_what_the_run_is_for(params, run, want):
    assert partition_date(params, run, days=-1, timezone="UTC") == want


def test_a_run_by_hand_is_of_the_day_in_the_time_zone_of_the_schedule():
    run = dag_run(logical_date=datetime(2026, 11, 29, 23, 30, tzinfo=UTC))
    assert partition_date({}, run, days=0, timezone="Asia/Tokyo") == "2026-11-30"


@pytest.mark.parametrize(
    ("params", "run", "days", "message"),
    [
        ({}, dag_run(), -1, "has no partition date"),
        ({}, dag_run(logical_date=datetime(2026, 11, 29, tzinfo=UTC)), None, "no partition date"),
        ({}, dag_run(partition_key="eu"), -1, "the partition key is not a date: 'eu'"),
        ({"ds": "today"}, dag_run(), -1, "the parameter ds is not a date: 'today'"),
        (
            {},
            dag_run(consumed_asset_events=[event("2026-11-28"), event("2026-11-27")]),
            -1,
            "several dates: 2026-11-27, 2026-11-28",
        ),
        ({}, dag_run(consumed_asset_events=[event("eu")]), -1, "the event of asset 'users'"),
    ],
)
def test_a_run_without_one_date_fails_and_says_so(params, run, days, message):
    with pytest.raises(AirflowFailException, match=message):
        partition_date(params, run, days=days, timezone="UTC")


@pytest.mark.parametrize(
    ("schedule", "key"),
    [
        ({"cron": "0 2 * * *"}, "2026-11-28"),
        ({"cron": "0 2 * * *", "run_offset": 0}, "2026-11-29"),
        # half past midnight of the 30th there is still the 29th in UTC
        ({"cron": "30 0 * * *", "timezone": "Asia/Tokyo", "run_offset": 0}, "2026-11-30"),
    ],
    ids=["the day before", "its own day", "in a time zone"],
)
def test_the_first_run_of_the_29th_has_the_partition_of_its_schedule(dags, tmp_path, schedule, key):
    timetable = core_timetable(dags, tmp_path, schedule)
    earliest = pendulum.datetime(2026, 11, 29)
    info = timetable.next_dagrun_info_v2(
        last_dagrun_info=None, restriction=TimeRestriction(earliest, None, catchup=True)
    )
    assert info.partition_key == key


@pytest.mark.parametrize(
    ("schedule", "days"),
    [
        ({"cron": "0 2 * * *"}, -1),
        ({"cron": "@daily", "run_offset": 0}, 0),
        ({"cron": "0 * * * *"}, None),
        ({"cron": "0 */6 * * *"}, None),
        ({"cron": "*/5 2 * * *"}, None),
        ({"cron": "0 2 * * 1"}, None),
        ({"cron": "0 2,14 * * *"}, None),
    ],
    ids=str,
)
def test_only_a_daily_schedule_says_how_many_days_away_a_partition_is(schedule, days):
    """A run by hand takes its date from that; one tick is a day only where ticks are days."""
    from nightshelf_surfaces import days_of

    assert days_of(schedule) == days


@pytest.mark.parametrize(
    ("last", "keys"),
    [
        (pendulum.datetime(2026, 11, 27, 23, 59), ["2026-11-25", "2026-11-26", "2026-11-27"]),
        (pendulum.datetime(2026, 11, 27), ["2026-11-25", "2026-11-26"]),  # as the manual warns
    ],
)
def test_a_backfill_has_the_partitions_whose_tick_is_in_its_window(dags, tmp_path, last, keys):
    timetable = core_timetable(dags, tmp_path, {"cron": "0 2 * * *"})
    first = pendulum.datetime(2026, 11, 25)
    infos = timetable.iter_partition_dagrun_infos(earliest=first, latest=last)
    assert [info.partition_key for info in infos] == keys


CHANGES = {  # zone: time of the daily run, days of both changes of 2026
    "Europe/Berlin": ("30 2 * * *", ["2026-03-29", "2026-10-25"]),
    "America/New_York": ("30 2 * * *", ["2026-03-08", "2026-11-01"]),
    "Africa/Cairo": ("0 0 * * *", ["2026-04-24", "2026-10-30"]),
    "Asia/Beirut": ("@daily", ["2026-03-29", "2026-10-25"]),
    "Australia/Lord_Howe": ("15 2 * * *", ["2026-10-04", "2026-04-05"]),  # half an hour
    "America/Nuuk": ("30 23 * * *", ["2026-03-28", "2026-10-24"]),  # put off beyond midnight
}


def dates_over_a_change(dags, tmp_path, zone, change, run_offset):
    """What the commands of eight scheduled runs are given, and what is right."""
    cron, days = CHANGES[zone]
    schedule = {"cron": cron, "timezone": zone, "run_offset": run_offset}
    bag = dags(write_surfaces(tmp_path, home={"config": "c", "schedule": schedule}))
    dag = bag.dags["nightshelf_home"]
    timetable = coerce_to_core_timetable(dag.timetable)
    day_before = date.fromisoformat(days[change]) - timedelta(days=5)
    late = pendulum.parse(f"{day_before}T23:45", tz=zone)  # after that day's run
    restriction = TimeRestriction(late.in_timezone("UTC"), None, catchup=True)
    info, found = None, []
    for _ in range(8):
        info = timetable.next_dagrun_info_v2(last_dagrun_info=info, restriction=restriction)
        run = dag_run(
            run_type="scheduled", run_after=info.run_after, partition_key=info.partition_key
        )
        found.append(dag.user_defined_macros["ds_of"]({}, run))
    return found, [str(day_before + timedelta(days=run_offset + n)) for n in range(1, 9)]


@pytest.mark.parametrize("run_offset", [-2, -1, 0, 1])
@pytest.mark.parametrize("change", [0, 1], ids=["spring", "autumn"])
@pytest.mark.parametrize("zone", CHANGES)
def test_over_a_change_of_clocks_each_day_has_one_run(dags, tmp_path, zone, change, run_offset):
    """The scheduler's own ticks; the date is what the commands are given."""
    found, want = dates_over_a_change(dags, tmp_path, zone, change, run_offset)
    assert found == want


@pytest.mark.parametrize("change", [0, 1], ids=["spring", "autumn"])
@pytest.mark.parametrize("zone", CHANGES)
def test_without_the_plugin_too_each_day_has_one_run(dags, tmp_path, monkeypatch, zone, change):
    monkeypatch.setattr("airflow.plugins_manager.get_timetables_plugins", dict)
    found, want = dates_over_a_change(dags, tmp_path, zone, change, -1)
    assert found == want


@pytest.mark.parametrize("zone", CHANGES)
def test_a_backfill_over_a_change_of_clocks_has_each_day_once(dags, tmp_path, zone):
    cron, days = CHANGES[zone]
    timetable = core_timetable(dags, tmp_path, {"cron": cron, "timezone": zone})
    for day in days:
        first = pendulum.parse(day).subtract(days=3)
        last = first.add(days=6, hours=23, minutes=59)
        infos = timetable.iter_partition_dagrun_infos(earliest=first, latest=last)
        runs = [dag_run(run_type="backfill", partition_key=info.partition_key) for info in infos]
        found = [partition_date({}, run, days=-1, timezone=zone) for run in runs]
        assert found == [str(first.add(days=n).date()) for n in range(7)]


def test_keys_that_are_times_are_mapped_to_days(dags, tmp_path):
    schedule = {"assets": ["users", "s3://lake/candidates"], "keys": "timestamp"}
    timetable = core_timetable(dags, tmp_path, schedule)
    assert timetable.default_partition_mapper.to_downstream("2026-11-28T05:00:00") == "2026-11-28"


def core_timetable(dags, folder, schedule):
    """The scheduler's own form of a DAG's timetable."""
    bag = dags(write_surfaces(folder, home={"config": "c", "schedule": schedule}))
    assert bag.import_errors == {}
    return coerce_to_core_timetable(bag.dags["nightshelf_home"].timetable)


# --- retries --------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [1, 2, 3, 5, 6])
def test_an_exit_code_that_stays_is_not_tried_again(code):
    decision = RetryOnlyWhatHelps().evaluate(StepFailed("score", code, "why"), 1, 3)
    assert decision.action is RetryAction.FAIL


@pytest.mark.parametrize("code", [4, 130, 143, -9, -15, 137])
def test_exit_4_and_a_killed_step_are_tried_again(code):
    decision = RetryOnlyWhatHelps().evaluate(StepFailed("score", code, "why"), 1, 3)
    assert decision.action is RetryAction.RETRY
    assert decision.retry_delay is None  # the task's own, which grows


def test_what_is_no_step_follows_the_task(dags, tmp_path):
    assert RetryOnlyWhatHelps().evaluate(OSError(), 1, 3).action is RetryAction.DEFAULT
    bag = dags(write_surfaces(tmp_path, home={"config": "c", "retries": 5, "retry_delay_s": 7}))
    for task in bag.dags["nightshelf_home"].tasks:
        assert isinstance(task.retry_policy, RetryOnlyWhatHelps) or task.has_retry_policy
        assert task.retries == 5
        assert task.retry_delay.total_seconds() == 7
        assert task.retry_exponential_backoff == 2


# --- a step ---------------------------------------------------------------------------------------


def step(code: str, name: str = "score", **more) -> NightshelfOperator:
    return NightshelfOperator(
        task_id=name, step=name, command=[sys.executable, "-c", code, ""], **more
    )


CONTEXT = {"params": {"reprocess": "all"}}


def test_a_step_gives_ids_and_counts_and_nothing_else():
    code = """
import json, sys
print("score", file=sys.stderr)
print('{"broken')
print(json.dumps({"run_id": "a", "rows": 5, "exact_share": 0.5, "cost": None, "run_dir": "/x",
                  "hashes": {"config": "y"}, "surface": "home"}))
"""
    found = step(code).execute(CONTEXT)
    assert found == {
        "run_id": "a", "rows": 5, "exact_share": 0.5, "cost": None, "surface": "home",
    }  # fmt: skip
    assert ids_and_counts({"before": "none", "gates": []}) == {"before": "none"}


def test_a_failed_step_says_the_reason_that_the_command_gave():
    code = """
import json
print(json.dumps({"status": "failed", "error": {"message": "rows_min is 5", "exit_code": 6}}))
raise SystemExit(6)
"""
    with pytest.raises(StepFailed, match=r"audit ended with exit 6 \(the audit refused.*rows_min"):
        step(code, "audit").execute(CONTEXT)
    with pytest.raises(StepFailed, match="exit 9: see the task's log"):
        step("raise SystemExit(9)").execute(CONTEXT)


def test_a_command_that_is_not_there_is_a_setting_to_repair():
    broken = NightshelfOperator(task_id="plan", step="plan", command=["/no/nightshelf", "plan"])
    with pytest.raises(StepFailed, match="cannot be started: .*No such file") as err:
        broken.execute(CONTEXT)
    assert err.value.final


def test_killing_a_task_ends_the_command_and_its_workers(tmp_path):
    code = f"""
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
time.sleep(600)
"""
    task = step(code)
    failure = []

    def work():
        try:
            task.execute(CONTEXT)
        except StepFailed as err:
            failure.append(err)

    thread = threading.Thread(target=work)
    thread.start()
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    task.on_kill()
    thread.join(timeout=60)
    assert failure[0].exit_code == -15
    assert "signal SIGTERM" in str(failure[0])
    assert not failure[0].final
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def test_a_command_that_ignores_the_signal_is_killed_with_its_children(tmp_path):
    code = f"""
import pathlib, signal, subprocess, sys, time
ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", ignore])
pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
time.sleep(600)
"""
    task = step(code)
    task.kill_after_s = 0.5
    failure = []

    def work():
        try:
            task.execute(CONTEXT)
        except StepFailed as err:
            failure.append(err)

    thread = threading.Thread(target=work)
    thread.start()
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    task.on_kill()
    thread.join(timeout=60)
    assert failure[0].exit_code == -9
    assert not failure[0].final
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


class Events(dict):
    """The outlet events of a task, as Airflow gives them."""

    def __missing__(self, asset):
        self[asset] = SimpleNamespace(extra=None, partitions=[])
        self[asset].add_partitions = self[asset].partitions.append
        return self[asset]


@pytest.mark.parametrize(
    ("params", "surface", "told"),
    [
        ({"surface": "home", "config": "/c"}, "home", True),
        ({"surface": "eu", "config": "/c"}, "eu", False),
        ({"surface": "home", "config": "/d"}, "home", False),
        ({"surface": "home", "config": "/c"}, "eu", False),  # whatever the form said
    ],
)
def test_an_event_is_of_what_was_published_or_there_is_none(params, surface, told):
    from airflow.sdk import Asset

    asset = Asset(name="nightshelf_home", uri="nightshelf://recommendations/home")
    code = f"""print('{{"run_id": "a", "ds": "2026-11-28", "surface": "{surface}", "rows": 3}}')"""
    announces = {"surface": "home", "config": "/c"}
    publish = step(code, "publish", asset=asset, announces=announces)
    assert publish.outlets == [asset]
    events = Events()
    publish.execute(
        {"params": params, "outlet_events": events, "ti": SimpleNamespace(task=publish)}
    )
    assert bool(publish.outlets) == told  # Airflow makes an event for each that is left
    assert [event.partitions for event in events.values()] == ([["2026-11-28"]] if told else [])


@pytest.mark.parametrize(
    "spelled", ["/conf/run.yaml", "run.yaml", "./run.yaml", "/conf//x/../run.yaml"]
)
def test_the_same_configuration_in_other_words_is_the_same(tmp_path, spelled):
    from airflow.sdk import Asset

    asset = Asset(name="nightshelf_home", uri="nightshelf://recommendations/home")
    announces = {"config": str(tmp_path / "run.yaml")}
    publish = step(
        """print('{"ds": "2026-11-28"}')""", "publish", asset=asset, announces=announces,
        cwd=str(tmp_path),
    )  # fmt: skip
    events, params = Events(), {"config": spelled.replace("/conf", str(tmp_path))}
    context = {"params": params, "outlet_events": events, "ti": SimpleNamespace(task=publish)}
    publish.execute(context)
    assert [event.partitions for event in events.values()] == [["2026-11-28"]]


def test_a_command_that_does_not_say_what_it_published_fails_and_is_not_tried_again():
    from airflow.sdk import Asset

    asset = Asset(name="nightshelf_home", uri="nightshelf://recommendations/home")
    publish = step("print('done')", "publish", asset=asset)
    context = {"params": {}, "outlet_events": Events(), "ti": SimpleNamespace(task=publish)}
    with pytest.raises(StepFailed, match="no last line with the run's date") as failed:
        publish.execute(context)
    assert failed.value.final


def test_a_word_that_no_program_can_be_given_is_told():
    with pytest.raises(StepFailed, match="the command cannot be started"):
        step("\0").execute({"params": {}})


def alive(pid: int) -> bool:
    """Running, and not only waiting to be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("before", "reprocess", "runs"),
    [
        ("none", "none", True), ("published", "none", False), ("refused", "none", False),
        ("refused", "failed", True), ("published", "failed", False), ("published", "all", True),
    ],
)  # fmt: skip
def test_reprocess_says_which_dates_are_run_again(before, reprocess, runs):
    plan = step(f"""print('{{"run_id": "a", "before": "{before}"}}')""", "plan")
    context = {"params": {"reprocess": reprocess}}
    if runs:
        assert plan.execute(context)["before"] == before
    else:
        with pytest.raises(AirflowSkipException, match=f"{before} already"):
            plan.execute(context)


# --- inputs ---------------------------------------------------------------------------------------


def test_a_run_waits_until_every_marker_is_there(tmp_path):
    markers = ["users/_SUCCESS", f"file://{tmp_path}/candidates/_SUCCESS"]
    sensor = InputsReady(task_id="inputs_ready", markers=markers, folder=str(tmp_path))
    assert sensor.reschedule
    for name in ("users", "candidates"):
        assert not sensor.poke({})
        (tmp_path / name).mkdir()
        (tmp_path / name / "_SUCCESS").touch()
    assert sensor.poke({})


# --- alerts ---------------------------------------------------------------------------------------


@pytest.fixture
def webhook(monkeypatch):
    heard = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers["Content-Length"])
            heard.append(json.loads(self.rfile.read(length))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("NIGHTSHELF_WEBHOOK", f"http://127.0.0.1:{server.server_port}/")
        yield heard
        server.shutdown()


def failed_context():
    return {
        "task_instance": SimpleNamespace(dag_id="nightshelf_home", task_id="audit", try_number=1),
        "dag_run": SimpleNamespace(run_id="scheduled__2026-11-29"),
        "task": SimpleNamespace(),
        "exception": StepFailed("audit", 6, "coverage is 0.4, allowed at least 0.9"),
    }


def test_a_failure_tells_which_step_of_which_run_and_why(webhook):
    run_failed(failed_context())
    assert webhook == [
        "nightshelf_home, run scheduled__2026-11-29: audit failed in try 1: audit ended with exit "
        "6 (the audit refused): coverage is 0.4, allowed at least 0.9. What was published before "
        "is unchanged."
    ]


def test_a_failed_report_does_not_say_that_nothing_was_published(webhook):
    context = failed_context()
    context["task_instance"].task_id = "report"
    run_failed(context)
    assert webhook[0].endswith("The rows are published.")


def test_a_late_run_is_told(webhook):
    run_late("home", 6, context={"dag_run": {"dag_run_id": "r"}})
    assert webhook == ["nightshelf home: r is not published 6 hours after it was queued."]


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/", "nonsense", None])
def test_a_webhook_that_cannot_be_reached_hides_no_failure(monkeypatch, caplog, address):
    if address is not None:
        monkeypatch.setenv("NIGHTSHELF_WEBHOOK", address)
    run_failed(failed_context())
    assert "coverage is 0.4" in caplog.text
    assert ("cannot be reached" in caplog.text) == (address is not None)


def test_a_step_runs_where_the_worker_s_path_has_packages_of_the_same_names(tmp_path):
    """Airflow's workers have the DAGs' own `jobs` and `schemas` on the path, which commands get."""
    theirs = tmp_path / "theirs"
    for name in ("jobs", "schemas", "engine", "pipelines"):
        (theirs / name).mkdir(parents=True)
        (theirs / name / "__init__.py").write_text("raise ImportError('not ours')")
    build(tmp_path, home={"run": {"work_dir": "runs", "workers": 2, "shard_users": 10}})
    env = nightshelf_env()
    task = NightshelfOperator(
        task_id="run",
        step="run",
        command=[PYTHON, "-m", "nightshelf", "run", str(tmp_path / "home/run.yaml"),
                 "--ds", "2026-11-28", "--output", "json"],
        env={**env, "PYTHONPATH": f"{theirs}{os.pathsep}{env['PYTHONPATH']}"},
        cwd=str(theirs),
    )  # fmt: skip
    assert task.execute(CONTEXT)["rows_published"] > 0
