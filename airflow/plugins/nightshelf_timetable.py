"""A cron schedule whose partition keys are right across changes of clocks.

Airflow's own `CronPartitionTimetable` counts `run_offset` in ticks of shifted time: the run of a
skipped 02:30 starts at 03:30, whose tick before is 02:30 of the same day, so that one day has two
runs and the next none. Here ticks are counted on the clock on the wall.

Airflow finds this in its plugins folder, or as an installed package (`pip install ./airflow`). The
scheduler reads it too: without it there, a DAG that names it cannot be loaded.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from airflow._shared.timezones.timezone import convert_to_utc, make_aware, make_naive
from airflow.plugins_manager import AirflowPlugin
from airflow.timetables._cron import _covers_every_hour
from airflow.timetables.trigger import CronPartitionTimetable
from croniter import croniter


class WallClockTimetable(CronPartitionTimetable):
    """`CronPartitionTimetable`, with the partition of the tick that the wall clock shows."""

    def _get_partition_date(self, *, run_date: Any) -> Any:
        """The tick `run_offset` ticks from that of a run, as an instant in UTC."""
        local = make_naive(run_date, self._timezone)
        # A skipped tick runs later: it is the last one at or before the time on the wall.
        tick = croniter(self._expression, start_time=local + timedelta(seconds=1))
        if not self._run_offset or _covers_every_hour(tick):
            return super()._get_partition_date(run_date=run_date)
        found = tick.get_prev(datetime)
        for _ in range(abs(self._run_offset)):
            found = tick.get_next(datetime) if self._run_offset > 0 else tick.get_prev(datetime)
        return convert_to_utc(make_aware(found, self._timezone))


class NightshelfPlugin(AirflowPlugin):
    """Makes the timetable known to every part of Airflow."""

    name = "nightshelf"
    timetables = [WallClockTimetable]
