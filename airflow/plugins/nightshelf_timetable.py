"""A cron schedule whose partition keys are right across changes of clocks.

A tick that the clock skips runs later: 02:30 of the night without it runs at 03:30. Airflow's own
`CronPartitionTimetable` looks for the tick before 03:30 on the clock on the wall, and finds 02:30
of the same night: that day is two runs' key and the day before is no run's. Here ticks are compared
as moments.

Airflow finds this in its plugins folder, or as an installed package (`pip install ./airflow`). The
scheduler reads it too: without it there, a DAG that names it cannot be loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any

from airflow._shared.timezones.timezone import convert_to_utc, make_aware, make_naive
from airflow.plugins_manager import AirflowPlugin
from airflow.timetables.trigger import CronPartitionTimetable
from croniter import croniter

# The most by which a clock is put forward (2 h, on Troll in Antarctica) or back, and some.
_LONGEST_CHANGE = timedelta(hours=3)


class WallClockTimetable(CronPartitionTimetable):
    """`CronPartitionTimetable` where each tick runs once, and its key is what its own clock shows.

    The key is of the tick `run_offset` ticks away. For a daily cron that is the local day so many
    days away. Crons of every hour are Airflow's own: they follow time, not the wall.
    """

    def _get_next(self, current: Any) -> Any:
        """The first moment of a tick after this one."""
        if self._every_hour():
            return super()._get_next(current)
        start = make_naive(current, self._timezone) - _LONGEST_CHANGE
        found = None
        for tick in self._ticks(start, "get_next"):
            # What comes on the wall after the best one cannot come before it.
            if found is not None and tick > make_naive(found, self._timezone):
                break
            moment = self._moment(tick)
            if moment > current and (found is None or moment < found):
                found = moment
        return found

    def _get_prev(self, current: Any) -> Any:
        """The last moment of a tick before this one."""
        if self._every_hour():
            return super()._get_prev(current)
        start = make_naive(current, self._timezone) + _LONGEST_CHANGE
        found = None
        for tick in self._ticks(start, "get_prev"):
            if found is not None and tick < make_naive(found, self._timezone) - _LONGEST_CHANGE:
                break
            moment = self._moment(tick)
            if moment < current and (found is None or moment > found):
                found = moment
        return found

    def _format_key(self, partition_date: Any) -> str:
        """From the tick's own time, which the run's is not where the clock skips it."""
        return self._wall(partition_date).strftime(self._key_format)

    def iter_partition_dagrun_infos(self, *, earliest: datetime, latest: datetime) -> Iterable[Any]:
        """A run for each tick of a window of local times, for backfills."""
        first = earliest.replace(tzinfo=None)
        for info in super().iter_partition_dagrun_infos(earliest=earliest, latest=latest):
            if self._wall(info.partition_date) >= first:  # a skipped tick is of the day before
                yield info

    def _wall(self, moment: Any) -> datetime:
        """The tick of a moment, as its own clock shows it; the local time, where there is none."""
        local = make_naive(moment, self._timezone)
        if self._every_hour() or croniter.match(self._expression, local):
            return local
        for tick in self._ticks(local, "get_prev"):
            if tick < local - _LONGEST_CHANGE:
                break
            if self._moment(tick) == moment:
                return tick
        return local

    def _moment(self, tick: datetime) -> Any:
        """When a tick runs: later where the clock skips it, the second time of two."""
        return convert_to_utc(make_aware(tick, self._timezone))

    def _ticks(self, start: datetime, step: str) -> Iterator[datetime]:
        """Times of the wall, from a first one on or back."""
        times = croniter(self._expression, start_time=start)
        while True:
            yield getattr(times, step)(datetime)

    def _every_hour(self) -> bool:
        """Whether Airflow itself counts hours that pass; as it decides it."""
        return croniter(self._expression).expanded[1] == ["*"]


class NightshelfPlugin(AirflowPlugin):
    """Makes the timetable known to every part of Airflow."""

    name = "nightshelf"
    timetables = [WallClockTimetable]
