"""What a person sees while a run works: a bar on a terminal, a line now and then elsewhere. On
stderr.
"""

from __future__ import annotations

import datetime as dt
import json
import time

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from jobs.cli.options import LogFormat

_LINE_EVERY_S = 5.0


class _Rate(ProgressColumn):
    """Users per second."""

    def render(self, task: Task) -> Text:
        """The rate of the last half minute."""
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} users/s" if speed else "- users/s", style="cyan")


class _WhenCounting(ProgressColumn):
    """Another column, once there is a number of users to reach."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> RenderableType:
        """The column, or nothing."""
        return "" if task.total is None else self._column(task)


class TerminalProgress:
    """A line per step that is done, and below them the present one, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        counting = (BarColumn(), MofNCompleteColumn(), TextColumn("users"), _Rate())
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            *(_WhenCounting(column) for column in counting),
            TimeElapsedColumn(),
            *(_WhenCounting(column) for column in (TextColumn("ETA"), TimeRemainingColumn())),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._name, self._started = "", 0.0

    def __enter__(self) -> TerminalProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._end(done=kind is None)
        finally:
            self._bar.stop()

    def step(self, name: str) -> None:
        """A step of the run begins."""
        self._end(done=True)
        self._name, self._started = name, time.monotonic()
        self._task = self._bar.add_task(name, total=None)

    def _end(self, *, done: bool) -> None:
        """Leave a line of the present step, if there is one."""
        if self._task is None:
            return
        task, self._task = self._task, None  # whatever interrupts the rest, it is ended once
        counted = self._bar.tasks[0]
        users = f"  {counted.completed:,.0f} users" if counted.total is not None else ""
        self._bar.remove_task(task)
        mark, style = ("✓", "green") if done else ("✗", "red")
        took = f"{time.monotonic() - self._started:7.1f} s"
        self._console.print(
            Text.assemble((mark, style), f" {self._name:<8}{took}{users}"), highlight=False
        )

    def start(self, users: int) -> None:
        """Scoring begins."""
        if self._task is None:
            self._task = self._bar.add_task(self._name, total=users)
        else:  # the same task: between two an interrupt would find none
            self._bar.reset(self._task, total=users)

    def advance(self, users: int) -> None:
        """So many users more are done."""
        if self._task is not None:
            self._bar.advance(self._task, users)

    def note(self, message: str) -> None:
        """Something a person should know."""
        self._console.print(message, style="yellow", highlight=False, markup=False, soft_wrap=True)


class LineProgress:
    """A line per step, and one every few seconds while scoring; for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._done = self._total = 0
        self._step = "score"
        self._started = self._printed_at = time.monotonic()

    def __enter__(self) -> LineProgress:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def step(self, name: str) -> None:
        """A step of the run begins."""
        self._step = name
        self._print(name)

    def start(self, users: int) -> None:
        """Scoring begins."""
        self._done, self._total = 0, users
        self._started = self._printed_at = time.monotonic()

    def advance(self, users: int) -> None:
        """So many users more are done."""
        self._done += users
        now = time.monotonic()
        if now - self._printed_at < _LINE_EVERY_S:
            return
        self._printed_at = now
        rate = self._done / (now - self._started)
        left = (self._total - self._done) / rate if rate > 0 else 0.0
        self._report(rate, left)

    def _report(self, rate: float, left: float) -> None:
        done = f"{self._step} {self._done}/{self._total} users"
        self._print(f"{done}, {rate:,.0f} users/s, ETA {left:,.0f} s")

    def note(self, message: str) -> None:
        """Something a person should know."""
        self._print(message)

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class JsonProgress(LineProgress):
    """The same as JSON objects, one per line: `ts`, `event`, and what belongs to it."""

    def step(self, name: str) -> None:
        """A step of the run begins."""
        self._log("step", step=name)

    def note(self, message: str) -> None:
        """Something a person should know."""
        self._log("note", message=message)

    def _report(self, rate: float, left: float) -> None:
        self._log(
            "progress",
            users_done=self._done,
            users=self._total,
            users_per_s=round(rate, 2),
            eta_s=round(left, 1),
        )

    def _log(self, event: str, **fields: object) -> None:
        ts = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        self._print(json.dumps({"ts": ts, "event": event, **fields}))


AnyProgress = TerminalProgress | LineProgress


def open_progress(console: Console, log_format: LogFormat = LogFormat.text) -> AnyProgress:
    """A bar on a terminal, lines elsewhere; JSON lines where they are asked for.

    A terminal that can redraw: not `TERM=dumb`, and not the log of a job that forces colours.
    """
    if log_format is LogFormat.json:
        return JsonProgress(console)
    redraws = console.is_interactive and console.file.isatty()
    return TerminalProgress(console) if redraws else LineProgress(console)
