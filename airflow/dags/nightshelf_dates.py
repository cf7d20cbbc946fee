"""Which partition a DAG run is of: from what the run is for, and never from the clock."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from airflow.sdk.exceptions import AirflowFailException

MIDNIGHT = time()


def partition_date(
    params: Mapping[str, Any],
    dag_run: Any,
    *,
    days: int | None,
    timezone: str,
    at: time = MIDNIGHT,
) -> str:
    """The partition date of a DAG run, YYYY-MM-DD, from what the run is for; never from the clock.

    In this order: the `ds` of the trigger form; for a scheduled run of a daily DAG, its day where
    the schedule is; the partition key (other scheduled runs, backfills, and runs of partitioned
    assets); the date that the triggering assets' events name; for a run started
    by hand, the date that a scheduled run at its logical date would have.

    Args:
        days: how many days a daily run's partition is from the day it runs on; None when runs are
            not daily, or assets start them.
        timezone: of the schedule.
        at: the time of day of a daily schedule.

    Raises:
        AirflowFailException: none of them gives a date, or events give several.
    """
    if params.get("ds"):
        return _as_date(params["ds"], "the parameter ds")
    if days is not None and getattr(dag_run, "run_type", None) == "scheduled":
        # Not the key: without our plugin, Airflow gives a tick that the clock skips a wrong one.
        return str(_day_of_tick(dag_run.run_after, timezone, at) + timedelta(days=days))
    if dag_run.partition_key:
        return _as_date(dag_run.partition_key, "the partition key")
    named = {
        _as_date(value, f"the event of asset {event.asset.name!r}")
        for event in dag_run.consumed_asset_events or ()
        if (value := event.partition_key or (event.extra or {}).get("ds"))
    }
    if len(named) > 1:
        raise AirflowFailException(
            f"the assets' events are of several dates: {', '.join(sorted(named))}. "
            "Trigger the DAG with the parameter ds."
        )
    if named:
        return named.pop()
    if dag_run.logical_date is not None and days is not None:
        return str(_local_day(dag_run.logical_date, timezone) + timedelta(days=days))
    raise AirflowFailException(
        "the run has no partition date: no partition key, no event that names one, and no logical "
        "date of a daily schedule. Trigger it with the parameter ds."
    )


def _local_day(moment: datetime, timezone: str) -> date:
    return moment.astimezone(ZoneInfo(timezone)).date()


def _day_of_tick(moment: datetime, timezone: str, at: time) -> date:
    """The local day, but that of the tick where the clock put it off beyond midnight.

    In Nuuk the hour before midnight is skipped: 23:30 of a Saturday comes at 00:30 of the Sunday.
    """
    day = _local_day(moment, timezone)
    before = day - timedelta(days=1)
    put_off = datetime.combine(before, at, ZoneInfo(timezone))  # of a skipped time: as much later
    return before if put_off.timestamp() == moment.timestamp() else day


def _as_date(value: Any, where: str) -> str:
    try:
        return str(datetime.fromisoformat(str(value)).date())
    except ValueError:
        raise AirflowFailException(f"{where} is not a date: {value!r}") from None
