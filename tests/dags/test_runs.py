"""Whole runs in a real Airflow: its scheduler, its executor, its backfills, its API.

One Airflow on loopback, as `make airflow` starts it, serves all tests; their runs are started first
and looked at later, so that they share the time.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from urllib.parse import quote

import pytest

pytest.importorskip("airflow.sdk")

from tests.dags.conftest import ROOT, build, nightshelf, rows, write_surfaces

AIRFLOW = str(Path(sys.executable).parent / "airflow")
DAYS = ("2026-11-25", "2026-11-26", "2026-11-27")
PATIENCE_S = 600
ENDED = ("success", "failed")


@dataclass
class Standalone:
    """A running Airflow with the DAGs of `surfaces.yaml`, and the folders of their runs."""

    folder: Path
    port: int
    heard: list[str]

    def api(self, path: str, body: dict | None = None, method: str | None = None) -> dict:
        """Call the REST API."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/v2{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method=method,
        )
        for attempt in range(5):
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as err:
                if err.code == 409 and attempt:  # the try that failed has made it
                    return {}
                if err.code < 500 or attempt == 4:
                    raise AssertionError(f"{err}: {err.read().decode()}") from err
                time.sleep(2)  # its SQLite was busy
        raise AssertionError("not reached")

    def airflow(self, *words: str) -> subprocess.CompletedProcess:
        """Airflow's command line."""
        environment = os.environ | self.environment()
        return subprocess.run([AIRFLOW, *words], capture_output=True, text=True, env=environment)

    def environment(self) -> dict[str, str]:
        return {
            "AIRFLOW_HOME": str(self.folder / "airflow"),
            "AIRFLOW__API__PORT": str(self.port),
            "NIGHTSHELF_SURFACES": str(self.folder / "surfaces.yaml"),
            "NIGHTSHELF_TEST_TROUBLE": str(self.folder / "trouble"),
            # A deadline is looked at this often, and runs start this soon.
            "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "2",
        }

    def trigger(self, surface: str, run_id: str, **conf: str) -> None:
        """Start a run by hand, as the trigger form does."""
        body = {"dag_run_id": run_id, "logical_date": None, "conf": conf}
        self.api(f"/dags/nightshelf_{surface}/dagRuns", body)

    def runs(self, surface: str) -> list[dict]:
        return self.api(f"/dags/nightshelf_{surface}/dagRuns?limit=100")["dag_runs"]

    def tasks(self, surface: str, run_id: str) -> dict[str, dict]:
        path = f"/dags/nightshelf_{surface}/dagRuns/{quote(run_id)}/taskInstances"
        return {task["task_id"]: task for task in self.api(path)["task_instances"]}

    def ended(self, surface: str, run_id: str) -> dict:
        """The run, when it has ended."""

        def look() -> dict | None:
            found = [run for run in self.runs(surface) if run["dag_run_id"] == run_id]
            return found[0] if found and found[0]["state"] in ENDED else None

        return until(look, f"{surface} {run_id}")

    def logs(self, surface: str, run_id: str, task: str) -> list[str]:
        """One for each try. (A busy Airflow may lose a task that has not begun: that is a try.)"""
        folder = f"airflow/logs/dag_id=nightshelf_{surface}/run_id={run_id}/task_id={task}"
        return [log.read_text() for log in sorted((self.folder / folder).glob("*.log"))]

    def tries_that_say(self, surface: str, run_id: str, task: str, words: str) -> int:
        return sum(words in log for log in self.logs(surface, run_id, task))


def until(look, what: str):
    """The first answer that is not empty; no test is decided by how long it takes."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if answer := look():
            return answer
        time.sleep(1)
    raise AssertionError(f"still waiting for {what}")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class _Webhook(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        length = int(self.headers["Content-Length"])
        self.server.heard.append(json.loads(self.rfile.read(length))["text"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def webhook():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Webhook) as server:
        server.heard = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def write_everything(folder: Path) -> None:
    """Four surfaces: one that goes well, one with a worker that dies, one that the audit refuses,
    and one that starts when another has published."""
    trouble = folder / "trouble"
    trouble.mkdir()
    (trouble / "poison").touch()
    flaky = {
        "surface": "flaky",
        "engine__backend": "tests.trouble:trouble_backend",
        "prompt": {"template": "{history}!"},  # every prompt holds what the backend stumbles over
        "run__workers": 1,
        "run__max_attempts": 1,
    }
    build(
        folder,
        home={},
        flaky=flaky,
        refused={"surface": "refused", "audit": {"min_rows": 30}},
        email={"surface": "email"},
    )
    write_surfaces(
        folder,
        defaults={"max_active_runs": 3, "pool_slots": 1},
        home={
            "config": "home/run.yaml",
            "schedule": {"cron": "0 2 * * *", "run_offset": -1},
            "start_date": date(2099, 1, 1),  # nothing but backfills and runs by hand
            "ready": ["home/users.parquet"],
            "deadline_hours": 0.0001,
        },
        flaky={"config": "flaky/run.yaml", "retries": 20},
        refused={"config": "refused/run.yaml"},
        email={"config": "email/run.yaml", "schedule": {"assets": ["nightshelf_flaky"]}},
    )


@pytest.fixture(scope="module")
def standalone(tmp_path_factory, webhook):
    folder = tmp_path_factory.mktemp("standalone")
    write_everything(folder)
    found = Standalone(folder=folder, port=free_port(), heard=webhook.heard)
    environment = found.environment() | {
        "NIGHTSHELF_WEBHOOK": f"http://127.0.0.1:{webhook.server_port}/",
        "GPUS": "2",
    }
    log = folder / "standalone.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(ROOT / "airflow/standalone.sh")],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
    try:
        until(lambda: process.poll() is not None or ready(found), f"Airflow; see {log}")
        assert process.poll() is None, log.read_text()[-3000:]
        yield found
    finally:
        end(process)


def end(process: subprocess.Popen) -> None:
    """All of it: its parts are in the same group."""
    for signal_, seconds in ((signal.SIGTERM, 5), (signal.SIGKILL, 30)):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal_)
            process.wait(timeout=seconds)


def ready(airflow: Standalone) -> bool:
    """Whether all four DAGs are known and may run."""
    try:
        dags = airflow.api("/dags")["dags"]
    except (OSError, urllib.error.URLError):
        return False
    broken = airflow.api("/importErrors")["import_errors"]
    assert not broken, broken[0]["stack_trace"]
    if len(dags) < 4:
        return False
    for dag in dags:
        airflow.api(f"/dags/{dag['dag_id']}", {"is_paused": False}, "PATCH")
    return True


@pytest.fixture(scope="module")
def started(standalone):
    """Everything set going at once."""
    words = ("--dag-id", "nightshelf_home", "--from-date", DAYS[0], "--max-active-runs", "3")
    done = standalone.airflow("backfill", "create", *words, "--to-date", f"{DAYS[-1]}T23:59")
    assert done.returncode == 0, done.stderr
    again = standalone.airflow("backfill", "create", *words, "--to-date", f"{DAYS[-1]}T23:59")
    nightshelf("run", standalone.folder / "refused/run.yaml", "--ds", "2026-11-26",
               "--set", "audit.min_rows=1")  # fmt: skip
    standalone.trigger("refused", "new_day", ds="2026-11-27")
    standalone.trigger("refused", "same_day", ds="2026-11-26")
    standalone.trigger("refused", "no_day")
    standalone.trigger("flaky", "first", ds="2026-11-28")
    repair = threading.Thread(target=repair_after_one_try, args=(standalone,), daemon=True)
    repair.start()
    return standalone, again


def repair_after_one_try(airflow: Standalone) -> None:
    """As a machine that comes back."""
    seen = ("up_for_retry", "failed")
    until(lambda: airflow.tasks("flaky", "first")["score"]["state"] in seen, "a try of score")
    (airflow.folder / "trouble/poison").unlink()


def test_a_backfill_of_three_days_publishes_three_partitions_as_the_command_does(started):
    airflow, _ = started
    runs = {run["partition_key"]: run for run in until(lambda: all_ended(airflow), "backfill")}
    assert {key: run["state"] for key, run in runs.items()} == dict.fromkeys(DAYS, "success")
    for day in DAYS:
        run_dir = nightshelf(
            "run", airflow.folder / "home/run.yaml", "--ds", day,
            "--set", f"output.path={airflow.folder / 'cli/out'}",
            "--set", f"run.work_dir={airflow.folder / 'cli/runs'}",
        )["run_dir"]  # fmt: skip
        assert Path(run_dir).exists()
        want = rows(airflow.folder / "cli", day, "home")
        assert len(want) == 100
        assert rows(airflow.folder / "home", day, "home") == want
    assert sorted(p.name for p in (airflow.folder / "home/out").glob("ds=*")) == [
        f"ds={day}" for day in DAYS
    ]


def all_ended(airflow: Standalone) -> list[dict] | None:
    runs = [run for run in airflow.runs("home") if run["run_type"] == "backfill"]
    done = len(runs) == 3 and all(run["state"] in ENDED for run in runs)
    return runs if done else None


def test_a_second_backfill_is_refused_while_one_runs(started):
    _, again = started
    assert again.returncode != 0
    assert "only one running backfill per Dag" in again.stderr + again.stdout


def test_exit_4_is_tried_again_and_the_run_succeeds(started):
    airflow, _ = started
    assert airflow.ended("flaky", "first")["state"] == "success"
    tasks = airflow.tasks("flaky", "first")
    assert tasks["score"]["try_number"] >= 2
    assert airflow.tries_that_say("flaky", "first", "score", "score ended with exit 4") >= 1
    assert airflow.tries_that_say("flaky", "first", "score", "finished shards are kept") >= 1
    assert rows(airflow.folder / "flaky", "2026-11-28", "flaky")


def test_exit_6_fails_the_run_at_once_and_the_rows_of_before_stay(started):
    """C25, airflow #49717: a failed job was shown as a success."""
    airflow, _ = started
    before = rows(airflow.folder / "refused", "2026-11-26", "refused")
    for run_id in ("new_day", "same_day"):
        assert airflow.ended("refused", run_id)["state"] == "failed"
        tasks = airflow.tasks("refused", run_id)
        assert tasks["audit"]["state"] == "failed"
        assert airflow.tries_that_say("refused", run_id, "audit", "audit ended with exit 6") == 1
        assert tasks["publish"]["state"] == "upstream_failed"
    assert rows(airflow.folder / "refused", "2026-11-26", "refused") == before
    assert not (airflow.folder / "refused/out/ds=2026-11-27").exists()
    told = [text for text in airflow.heard if "run new_day" in text]
    assert len(told) == 1
    assert "audit ended with exit 6 (the audit refused)" in told[0]
    assert "rows_min" in told[0]


def test_a_run_without_a_date_fails_at_once_and_is_told(started):
    airflow, _ = started
    assert airflow.ended("refused", "no_day")["state"] == "failed"
    assert airflow.tasks("refused", "no_day")["plan"]["state"] == "failed"
    assert airflow.tries_that_say("refused", "no_day", "plan", "Task failed with exception") == 1
    told = until(lambda: [text for text in airflow.heard if "run no_day" in text], "the alert")
    assert "has no partition date" in told[0]


def test_a_published_asset_starts_the_dag_that_waits_for_it(started):
    airflow, _ = started
    airflow.ended("flaky", "first")
    run = until(lambda: next(iter(airflow.runs("email")), None), "a run of email")
    assert run["run_type"] == "asset_triggered"
    assert run["partition_key"] == "2026-11-28"
    events = airflow.api("/assets/events?limit=100")["asset_events"]
    mine = next(e for e in events if e["uri"] == "nightshelf://recommendations/flaky")
    assert mine["extra"]["rows_published"] == len(
        rows(airflow.folder / "flaky", "2026-11-28", "flaky")
    )
    assert mine["extra"]["ds"] == mine["partition_key"] == "2026-11-28"
    assert airflow.ended("email", run["dag_run_id"])["state"] == "success"
    assert rows(airflow.folder / "email", "2026-11-28", "email")


def test_xcom_holds_ids_and_counts(started):
    airflow, _ = started
    until(lambda: all_ended(airflow), "backfill")
    run_id = airflow.runs("home")[0]["dag_run_id"]
    path = f"/dags/nightshelf_home/dagRuns/{quote(run_id)}/taskInstances/publish/xcomEntries"
    value = airflow.api(f"{path}/return_value")["value"]
    assert value["rows_published"] == 100
    assert set(map(type, value.values())) <= {int, float, str, type(None)}
    assert {k for k, v in value.items() if isinstance(v, str)} == {
        "run_id", "ds", "surface", "status",
    }  # fmt: skip


def test_a_run_beyond_its_deadline_is_told(started):
    airflow, _ = started
    told = until(
        lambda: [text for text in airflow.heard if text.startswith("nightshelf home:")],
        "a deadline",
    )
    assert "is not published 0.0001 hours after it was queued" in told[0]


def test_two_runs_of_one_partition_do_not_corrupt_it(started):
    """C24, airflow #58752: concurrent backfills of one partition. A person starts a date that is at
    work already: the lock makes one wait, by exit 4."""
    airflow, _ = started
    until(lambda: all_ended(airflow), "backfill")
    want = rows(airflow.folder / "home", DAYS[0], "home")
    lock = next((airflow.folder / "home/runs/published").glob(f"**/*{DAYS[0]}*.lock"))
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as a run at work holds it
        for run_id in ("one", "two"):
            airflow.trigger("home", run_id, ds=DAYS[0])
        until(
            lambda: any(
                airflow.tasks("home", "one")["prepare"]["state"] == state
                for state in ("up_for_retry", "failed")
            ),
            "prepare to meet the lock",
        )
    said = "another run of this date and surface is at work"
    assert airflow.tries_that_say("home", "one", "prepare", said) >= 1
    for run_id in ("one", "two"):
        assert airflow.ended("home", run_id)["state"] == "success"
    assert rows(airflow.folder / "home", DAYS[0], "home") == want
