"""Partition keys of scheduled runs where clocks change: every local day once, none twice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from datetime import date, timedelta
from pathlib import Path

import pytest

pytest.importorskip("airflow.sdk")

import pendulum
from airflow.exceptions import InvalidPartitionKeyError
from airflow.plugins_manager import get_timetables_plugins
from airflow.serialization.decoders import decode_timetable
from airflow.serialization.encoders import encode_timetable
from airflow.timetables.base import TimeRestriction
from airflow.timetables.trigger import CronPartitionTimetable

from tests.dags.conftest import ROOT, write_surfaces

OURS = "nightshelf_timetable.WallClockTimetable"
WallClockTimetable = get_timetables_plugins()[OURS]
ZONES = {  # cron in the time that one night has not; the days of both changes of 2026
    "Europe/Berlin": ("30 2 * * *", "2026-03-29", "2026-10-25"),
    "America/New_York": ("30 2 * * *", "2026-03-08", "2026-11-01"),
    "Africa/Cairo": ("0 0 * * *", "2026-04-24", "2026-10-29"),
    "Asia/Beirut": ("0 0 * * *", "2026-03-29", "2026-10-24"),
    "Asia/Jerusalem": ("30 2 * * *", "2026-03-27", "2026-10-25"),
    "Australia/Lord_Howe": ("15 2 * * *", "2026-10-04", "2026-04-05"),  # by half an hour
    "America/Nuuk": ("30 23 * * *", "2026-03-28", "2026-10-24"),  # put off beyond midnight
}
TWICE = {  # in the time that one night has twice
    "Europe/Berlin": "30 2 * * *",
    "America/New_York": "30 1 * * *",
    "Africa/Cairo": "30 23 * * *",
    "Asia/Beirut": "30 23 * * *",
    "Asia/Jerusalem": "30 1 * * *",
    "Australia/Lord_Howe": "45 1 * * *",
    "America/Nuuk": "30 23 * * *",
}
EVERY = [
    *((zone, cron, forward) for zone, (cron, forward, _) in ZONES.items()),
    *((zone, TWICE[zone], back) for zone, (_, _, back) in ZONES.items()),
]


def made(cron, zone, offset=-1, kind=WallClockTimetable, key_format="%Y-%m-%d"):
    """The scheduler's copy of a timetable."""
    own = kind(cron, timezone=zone, run_offset=offset, key_format=key_format)
    read = decode_timetable(json.loads(json.dumps(encode_timetable(own))))
    assert type(read) is kind
    return read


def runs(timetable, start, num):
    """Scheduled runs, from an instant on."""
    last, found = None, []
    for _ in range(num):
        last = timetable.next_dagrun_info_v2(
            last_dagrun_info=last, restriction=TimeRestriction(start, None, True)
        )
        found.append(last)
    return found


def days(first, num):
    return [str(first + timedelta(days=n)) for n in range(num)]


def some_days_before(change, zone, num=3):
    return pendulum.parse(str(date.fromisoformat(change) - timedelta(days=num)), tz=zone)


@pytest.mark.parametrize("offset", [-2, -1, 0, 1])
@pytest.mark.parametrize(("zone", "cron", "change"), EVERY)
def test_each_local_day_has_one_key(zone, cron, change, offset):
    found = runs(made(cron, zone, offset), some_days_before(change, zone), 8)
    first = date.fromisoformat(change) + timedelta(days=offset - 3)
    assert [info.partition_key for info in found] == days(first, 8)
    assert sorted({info.run_after for info in found}) == [info.run_after for info in found]


@pytest.mark.parametrize("offset", [-2, -1, 0, 1])
@pytest.mark.parametrize(("zone", "cron", "change"), EVERY)
def test_a_backfill_meets_the_partitions_of_scheduled_runs(zone, cron, change, offset):
    """Airflow takes a backfill's run for a scheduled one by the partition's instant."""
    timetable = made(cron, zone, offset)
    scheduled = runs(timetable, some_days_before(change, zone), 8)
    first = date.fromisoformat(scheduled[0].partition_key)
    filled = list(
        timetable.iter_partition_dagrun_infos(
            earliest=pendulum.parse(str(first)),
            latest=pendulum.parse(f"{first + timedelta(days=7)}T23:59"),
        )
    )
    assert [(i.partition_key, i.partition_date) for i in filled] == [
        (i.partition_key, i.partition_date) for i in scheduled
    ]


@pytest.mark.parametrize(("zone", "cron", "change"), EVERY)
def test_a_backfill_of_one_day_has_that_day_only(zone, cron, change):
    timetable = made(cron, zone)
    for day in days(date.fromisoformat(change) - timedelta(days=2), 5):
        window = {"earliest": pendulum.parse(day), "latest": pendulum.parse(f"{day}T23:59")}
        keys = [info.partition_key for info in timetable.iter_partition_dagrun_infos(**window)]
        assert keys == [day]
        assert timetable._decode_partition_date(day).strftime("%Y-%m-%d") == day
    with pytest.raises(InvalidPartitionKeyError):
        timetable._decode_partition_date("29 March")


@pytest.mark.parametrize(("zone", "cron", "change"), EVERY)
def test_a_week_is_one_tick(zone, cron, change):
    """Of the weekday on which the clock changes."""
    day = date.fromisoformat(change)
    weekly = cron.replace("* * *", f"* * {day.isoweekday() % 7}")
    for offset in (-2, -1, 0):
        found = runs(made(weekly, zone, offset), some_days_before(change, zone, 8), 3)
        want = [str(day + timedelta(weeks=offset + n)) for n in (-1, 0, 1)]
        assert [info.partition_key for info in found] == want


@pytest.mark.parametrize("offset", [-2, -1, 0])
@pytest.mark.parametrize("cron", ["@hourly", "*/20 * * * *"])
@pytest.mark.parametrize(("zone", "_cron", "change"), EVERY)
def test_every_hour_is_as_airflow_counts(zone, _cron, change, cron, offset):
    start, full = pendulum.parse(change, tz=zone).subtract(hours=3), "%Y-%m-%dT%H:%M:%S"
    ours = runs(made(cron, zone, offset, key_format=full), start, 90)
    theirs = runs(made(cron, zone, offset, CronPartitionTimetable, full), start, 90)
    assert ours == theirs


@pytest.mark.parametrize(("zone", "_cron", "change"), EVERY)
@pytest.mark.parametrize("cron", ["30 2,14 * * *", "*/15 0,1,2,23 * * *", "0 */2 * * *"])
def test_ticks_of_a_few_hours_run_once_and_count_back_to_the_tick_before(zone, _cron, change, cron):
    start = some_days_before(change, zone, 2)
    ours = runs(made(cron, zone, -1), start, 60)
    moments = [info.run_after for info in ours]
    assert sorted(set(moments)) == moments
    assert [info.partition_date for info in ours[1:]] == moments[:-1]


@pytest.mark.parametrize("cron", ["30 2 * * *", "30 2 * * 1", "30 2,14 * * *", "0 0 1 * *"])
def test_where_no_clock_changes_it_is_as_airflows(cron):
    for offset in (-2, -1, 0, 1):
        for zone in ("UTC", "Asia/Tokyo", "Europe/Berlin"):
            start = pendulum.datetime(2026, 6, 3, 12, tz=zone)
            theirs = made(cron, zone, offset, CronPartitionTimetable)
            assert runs(made(cron, zone, offset), start, 4) == runs(theirs, start, 4)


def test_the_night_without_half_past_two():
    start = pendulum.parse("2026-03-28", tz="Europe/Berlin")
    found = runs(made("30 2 * * *", "Europe/Berlin"), start, 3)
    local = [str(info.run_after.in_timezone("Europe/Berlin").time()) for info in found]
    assert local == ["02:30:00", "03:30:00", "02:30:00"]
    assert [info.partition_key for info in found] == days(date(2026, 3, 27), 3)


def test_a_start_in_the_half_hour_before_a_put_off_tick_still_has_it():
    """Airflow's own looks for the next 02:30, and finds that of the day after."""
    start = pendulum.datetime(2026, 3, 27)  # UTC, when Jerusalem's clock goes from 2 to 3
    (info,) = runs(made("30 2 * * *", "Asia/Jerusalem", 0), start, 1)
    assert info.partition_key == "2026-03-27"


def sentence(bag):
    return [line for line in bag.dags["nightshelf_home"].doc_md.splitlines() if "plugin" in line]


@pytest.fixture
def known(monkeypatch):
    """Which timetables Airflow's plugins give."""

    def give(timetables):
        monkeypatch.setattr(
            "airflow.plugins_manager.get_timetables_plugins", lambda: dict(timetables)
        )

    return give


SCHEDULE = {"cron": "30 2 * * *", "timezone": "Europe/Berlin"}


def test_dags_have_the_plugins_timetable(dags, tmp_path):
    bag = dags(write_surfaces(tmp_path, home={"config": "c", "schedule": SCHEDULE}))
    assert type(bag.dags["nightshelf_home"].timetable) is WallClockTimetable
    assert sentence(bag) == []


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_without_the_plugin_dags_have_airflows_and_say_what_to_install(
    dags, tmp_path, known, zone, caplog
):
    """Though the module is there: Airflow refuses a timetable that no plugin registers."""
    assert "nightshelf_timetable" in sys.modules
    known({})
    schedule = SCHEDULE | {"timezone": zone}
    two = {name: {"config": "c", "schedule": schedule} for name in ("home", "away")}
    bag = dags(write_surfaces(tmp_path, **two))
    assert bag.import_errors == {}
    timetable = bag.dags["nightshelf_home"].timetable
    assert encode_timetable(timetable)["__type"] == (
        "airflow.timetables.trigger.CronPartitionTimetable"
    )
    said = sentence(bag)
    assert len(said) == (zone != "UTC")
    assert all("pip install ./airflow" in line for line in said)
    told = [record for record in caplog.records if "nightshelf-airflow" in record.getMessage()]
    assert len(told) == (zone != "UTC"), "once for all DAGs"


ELSEWHERE = """
import json, sys
from airflow.serialization.decoders import decode_timetable
from airflow.plugins_manager import get_timetables_plugins
assert not any(path.endswith("airflow/dags") for path in sys.path), sys.path
timetable = decode_timetable(json.loads(sys.argv[1]))
print(sys.modules[type(timetable).__module__].__file__)
"""


@pytest.mark.parametrize("how", ["installed", "plugins folder"])
def test_a_scheduler_without_the_dags_reads_it(tmp_path, how):
    """As an installed package, or as a file in the folder for plugins."""
    shutil.copytree(ROOT / "airflow/plugins", tmp_path / "source/plugins",
                    ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))  # fmt: skip
    shutil.copy(ROOT / "airflow/pyproject.toml", tmp_path / "source")
    place = tmp_path / ("site" if how == "installed" else "home/plugins")
    if how == "installed":
        pytest.importorskip("setuptools", minversion="77")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        command += ["--no-build-isolation", "--target", str(place), str(tmp_path / "source")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        shutil.copytree(tmp_path / "source/plugins", place)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")
    } | {
        "AIRFLOW_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(place) if how == "installed" else "",
    }
    own = WallClockTimetable("30 2 * * *", timezone="Europe/Berlin", run_offset=-1)
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, json.dumps(encode_timetable(own))],
        capture_output=True, text=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(place / "nightshelf_timetable.py")


def test_the_package_names_what_is_there():
    project = tomllib.loads((ROOT / "airflow/pyproject.toml").read_text())
    module, _, plugin = project["project"]["entry-points"]["airflow.plugins"][
        "nightshelf"
    ].partition(":")
    assert project["tool"]["setuptools"]["py-modules"] == [module]
    file = Path(sys.modules[WallClockTimetable.__module__].__file__)
    assert file == ROOT / "airflow/plugins" / f"{module}.py"
    assert WallClockTimetable in getattr(sys.modules[module], plugin).timetables
