"""The tasks of a nightshelf DAG: a step of a run as a command, a wait for input files, and which
failures are worth another try.

A step is one command line of `nightshelf`, started without a shell: what a person types into the
trigger form is an argument, never code. Its last line of output is one JSON object; ids and counts
of it go to XCom, nothing else does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from airflow.sdk import (
    Asset,
    BaseOperator,
    BaseSensorOperator,
    Context,
    ObjectStoragePath,
    RetryDecision,
    RetryPolicy,
)
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

MEANINGS = {
    1: "an error nobody foresaw",
    2: "usage or configuration",
    3: "an input breaks its contract",
    4: "the run is incomplete; running it again continues it",
    5: "the engine cannot start",
    6: "the audit refused",
    130: "interrupted",
    143: "asked to end; running it again continues it",
}
_FINAL = (1, 2, 3, 5, 6)  # trying again gives the same answer
_WORDS = ("run_id", "ds", "surface", "status", "before")  # strings of a result that XCom may hold


class StepFailed(AirflowException):
    """A step ended with an exit code other than 0.

    Args:
        exit_code: as the command gave it; negative when a signal ended it.
        final: whether another try is of no use; default: what the exit code says.
    """

    def __init__(self, step: str, exit_code: int, reason: str, *, final: bool | None = None):
        self.step, self.exit_code, self.reason = step, exit_code, reason
        self.final = exit_code in _FINAL if final is None else final
        super().__init__(f"{step} ended with {self.ending}: {reason}")

    @property
    def ending(self) -> str:
        """The exit code in words."""
        if self.exit_code < 0:
            return f"signal {signal.Signals(-self.exit_code).name}"
        meaning = MEANINGS.get(self.exit_code)
        return f"exit {self.exit_code}" + (f" ({meaning})" if meaning else "")


class RetryOnlyWhatHelps(RetryPolicy):
    """Another try for exit 4 and for a step that was killed; none for any other exit code.

    Failures that are not of a step (a lost worker, a timeout) follow the task's `retries`. The
    pause grows by the task's own back-off.
    """

    def evaluate(
        self,
        exception: BaseException,
        try_number: int,
        max_tries: int,
        context: Context | None = None,
    ) -> RetryDecision:
        """Decide in the worker, from the exception."""
        if not isinstance(exception, StepFailed):
            return RetryDecision.default()
        if exception.final:
            return RetryDecision.fail(f"{exception.ending}: another try would end the same way")
        return RetryDecision.retry(reason=f"{exception.ending}: finished shards are kept")


def ids_and_counts(result: Mapping[str, Any]) -> dict[str, Any]:
    """What of a step's JSON is small enough for XCom: numbers, and the words that name the run."""
    return {
        key: value
        for key, value in result.items()
        if value is None or isinstance(value, int | float) or key in _WORDS
    }


class InputsReady(BaseSensorOperator):
    """Waits until every marker file is there. Gives its worker slot back between looks."""

    template_fields: Sequence[str] = ("markers",)

    def __init__(self, *, markers: list[str], folder: str, **kwargs: Any) -> None:
        super().__init__(mode="reschedule", **kwargs)
        self.markers = markers
        self.folder = folder

    def poke(self, context: Context) -> bool:
        """Whether all are there now."""
        missing = [name for name in self.markers if not self._path(name).exists()]
        if missing:
            self.log.info("not there yet: %s", ", ".join(missing))
        return not missing

    def _path(self, name: str) -> ObjectStoragePath:
        local = name if "://" in name else "file://" + os.path.join(self.folder, name)
        return ObjectStoragePath(local)


class NightshelfOperator(BaseOperator):
    """One step of a run: runs a command and takes its last line as the result.

    Args:
        step: `plan`, `prepare`, … for messages.
        command: program and arguments; those that render to nothing are left out.
        env: variables for the command, besides the worker's own.
        cwd: folder that the command runs in.
        asset: gets an event with the counts, when the step is done.
        announces: parameters of the run that the asset is of; a run with others has published
            something else, and the asset gets no event.
    """

    template_fields: Sequence[str] = ("command",)  # not env: what is rendered is shown in the UI
    ui_color = "#e8f0fe"
    kill_after_s = 30.0  # a command ends 20 s after it was asked, at the latest, or publishes

    def __init__(
        self,
        *,
        step: str,
        command: list[str],
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        asset: Asset | None = None,
        announces: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs, outlets=[asset] if asset else [])
        self.step = step
        self.command = command
        self.env = env or {}
        self.cwd = cwd
        self.asset = asset
        self.announces = dict(announces or {})
        self._process: subprocess.Popen[str] | None = None
        self._run_dir: str | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        """Run it.

        Raises:
            StepFailed: with the reason from the command's JSON, or without a date for the event.
            AirflowSkipException: a plan whose day needs no run.
        """
        command = [word for word in self.command if word]
        result = self._run(command)
        self._run_dir = result.get("run_dir")
        found = ids_and_counts(result)
        if self.step == "plan":
            _skip_unless_needed(found.get("before"), context["params"].get("reprocess", "all"))
        if self.asset is not None:
            self._announce(self.asset, context, found)
        return found

    def _announce(self, asset: Asset, context: Context, found: dict[str, Any]) -> None:
        """An event of what was published, or none: one comes by itself for each outlet."""
        done = {key: found[key] for key in ("surface",) if key in found}
        said = {**context["params"], **done}
        if "config" in said:  # relative to where the command runs, or spelled in another way
            said["config"] = os.path.normpath(os.path.join(self.cwd or "", str(said["config"])))
        other = sorted(key for key, own in self.announces.items() if said.get(key, own) != own)
        if other:
            self.log.info("no event of %s: another %s", asset.name, " and ".join(other))
            for task in (self, context["ti"].task):
                task.outlets = []
            return
        if "ds" not in found:
            why = "its output has no last line with the run's date, so that no event can tell of it"
            raise StepFailed(self.step, 0, why, final=True)
        event = context["outlet_events"][asset]
        event.extra = found
        event.add_partitions(found["ds"])

    def on_kill(self) -> None:
        """End the command with all its workers; what is done is kept.

        It is asked first, and killed where it has not ended after `kill_after_s` seconds.
        """
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        end = time.monotonic() + self.kill_after_s
        while _group_lives(process) and time.monotonic() < end:
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        """Datasets in and out with their rows, for OpenLineage, where its provider is installed."""
        if self.step != "publish" or self._run_dir is None:
            return None
        from nightshelf_lineage import lineage_of

        return lineage_of(self._run_dir)

    def _run(self, command: list[str]) -> dict[str, Any]:
        self.log.info("%s", subprocess.list2cmdline(command))
        try:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="backslashreplace",
                env=os.environ | self.env,
                cwd=self.cwd,
                start_new_session=True,  # a group of its own, for on_kill
            )
        except (OSError, ValueError) as err:  # a NUL in a word
            raise StepFailed(self.step, 2, f"the command cannot be started: {err}") from err
        self._process = process
        result: dict[str, Any] = {}
        assert process.stdout is not None, "stdout is a pipe"
        for line in process.stdout:
            self.log.info("%s", line.rstrip())
            result = json_object(line) or result
        code = process.wait()
        process.stdout.close()
        if code != 0:
            error = result.get("error") or {}
            raise StepFailed(self.step, code, error.get("message", "see the task's log"))
        return result


def _group_lives(process: subprocess.Popen[str]) -> bool:
    """Whether anything that the command started is still there, the command itself or a child."""
    process.poll()  # else it stays in its group as one that has ended and waits to be asked
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


class CannotRun(BaseOperator):
    """Fails with a message: the only task of a DAG that could not be made."""

    def __init__(self, *, why: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.why = why

    def execute(self, context: Context) -> None:
        """Fail.

        Raises:
            AirflowFailException: always.
        """
        raise AirflowFailException(self.why)


def json_object(line: str) -> dict[str, Any] | None:
    """The object that a line of output is, if it is one."""
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _skip_unless_needed(before: str | None, reprocess: str) -> None:
    """As `nightshelf backfill --reprocess` has it: none, failed or all."""
    if before is None or before == "none" or reprocess == "all":
        return
    if reprocess == "failed" and before != "published":
        return
    raise AirflowSkipException(f"this date is {before} already, and reprocess is {reprocess!r}")
