"""Partition keys of scheduled runs where clocks change: every local day once, none twice."""

from __future__ import annotations

import json
import sys
from datetime import date, timedelta

import pytest

pytest.importorskip("airflow.sdk")

import pendulum
from airflow.serialization.decoders import decode_timetable
from airflow.serialization.encoders import encode_timetable
from airflow.timetables.base import TimeRestriction
from nightshelf_timetable import WallClockTimetable

DAILY = [  # zone, cron in the hour that one night has not, around both changes of 2026
    ("Europe/Berlin", "30 2 * * *", "2026-03-29", "2026-10-25"),
    ("America/New_York", "30 2 * * *", "2026-03-08", "2026-11-01"),
    ("Africa/Cairo", "0 0 * * *", "2026-04-24", "2026-10-29"),
    ("Asia/Beirut", "0 0 * * *", "2026-03-29", "2026-10-25"),
    ("Australia/Lord_Howe", "15 2 * * *", "2026-10-04", "2026-04-05"),
]


def runs(cron, zone, offset, start, num=8):
    """Local time and key of each scheduled run, by the scheduler's copy of the timetable."""
    made = WallClockTimetable(cron, timezone=zone, run_offset=offset, key_format="%Y-%m-%d")
    ours = decode_timetable(json.loads(json.dumps(encode_timetable(made))))
    assert type(ours) is WallClockTimetable
    last, found = None, []
    for _ in range(num):
        last = ours.next_dagrun_info_v2(
            last_dagrun_info=last, restriction=TimeRestriction(start, None, True)
        )
        found.append((last.run_after.in_timezone(zone), last.partition_key))
    return found


@pytest.mark.parametrize("offset", [0, -1, -2, 1])
@pytest.mark.parametrize("change", [0, 1], ids=["forward", "back"])
@pytest.mark.parametrize(("zone", "cron", "forward", "back"), DAILY, ids=[d[0] for d in DAILY])
def test_each_local_day_has_one_key(zone, cron, forward, back, change, offset):
    day = date.fromisoformat((forward, back)[change])
    start = pendulum.datetime(day.year, day.month, day.day, tz=zone).subtract(days=3)
    found = runs(cron, zone, offset, start)
    assert [key for _, key in found] == [
        str(local.date() + timedelta(days=offset)) for local, _ in found
    ]
    days = [local.date() for local, _ in found]
    assert days == [days[0] + timedelta(days=n) for n in range(len(days))]


def test_the_night_without_half_past_two():
    start = pendulum.parse("2026-03-28", tz="Europe/Berlin")
    found = runs("30 2 * * *", "Europe/Berlin", -1, start, num=3)
    assert [(str(local.time()), key) for local, key in found] == [
        ("02:30:00", "2026-03-27"),
        ("03:30:00", "2026-03-28"),
        ("02:30:00", "2026-03-29"),
    ]


def test_a_week_is_one_tick():
    start = pendulum.parse("2026-03-20", tz="Europe/Berlin")
    keys = [key for _, key in runs("30 2 * * 0", "Europe/Berlin", -1, start, num=3)]
    assert keys == ["2026-03-15", "2026-03-22", "2026-03-29"]


def test_twice_a_day_is_two_ticks():
    start = pendulum.parse("2026-03-29", tz="Europe/Berlin")
    keys = [key for _, key in runs("30 2,14 * * *", "Europe/Berlin", -1, start, num=4)]
    assert keys == ["2026-03-28", "2026-03-29", "2026-03-29", "2026-03-30"]


def test_every_hour_is_as_airflow_counts():
    start = pendulum.parse("2026-10-24T23:00", tz="Europe/Berlin")
    found = runs("0 * * * *", "Europe/Berlin", -1, start, num=6)
    assert len({local.timestamp() for local, _ in found}) == 6, (
        "the hour that comes twice runs twice"
    )
    assert [key for _, key in found] == ["2026-10-24"] * 2 + ["2026-10-25"] * 4


def test_a_backfill_names_each_day_once():
    made = WallClockTimetable(
        "30 2 * * *", timezone="Europe/Berlin", run_offset=-1, key_format="%Y-%m-%d"
    )
    first, last = pendulum.parse("2026-03-27"), pendulum.parse("2026-03-31")
    infos = made.iter_partition_dagrun_infos(earliest=first, latest=last)
    keys = [info.partition_key for info in infos]
    assert keys == ["2026-03-27", "2026-03-28", "2026-03-29", "2026-03-30"]


def test_dags_use_it_where_it_is_installed_and_airflows_own_elsewhere(monkeypatch, caplog):
    import nightshelf_precompute as dags

    dags._cron_timetable.cache_clear()
    assert dags._cron_timetable() is WallClockTimetable
    monkeypatch.setitem(sys.modules, "nightshelf_timetable", None)
    dags._cron_timetable.cache_clear()
    assert dags._cron_timetable() is dags.CronPartitionTimetable
    assert "pip install ./airflow" in caplog.text
    dags._cron_timetable.cache_clear()
