"""Publishes in processes of their own, that race or are killed. `python -m tests.publish.processes`

    together RUN...                 publish all at once; prints what became of each
    killed HOW POINTS SEED OLD NEW  over OLD publish NEW, killed at so many moments, one after the
                                    other; after each, look, publish it again, and look again

Processes are forked from one that has loaded everything and started no thread: quick, and real.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from polars.testing import assert_frame_equal

from pipelines.publish import open_table, publish_run
from schemas.errors import ConflictError
from tests.publish.runs import Run, expected, load, read

for name in ("iceberg", "delta"):
    importlib.import_module(f"pipelines.publish.{name}")
for name in ("pyiceberg.io.pyarrow", "pyiceberg.io.fsspec", "pyiceberg.catalog.sql"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

MUTATIONS = {"os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}


def in_a_child(body: Callable[[], None]) -> int:
    """Run in a forked process; its wait status. What it prints comes through."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def together(paths: list[str]) -> None:
    """Publish in one process each; they start when the parent closes a pipe."""
    start, go = os.pipe()
    pids = []
    for path in paths:
        pid = os.fork()
        if pid == 0:
            os.close(go)
            os.read(start, 1)
            try:
                publish_run(*load(path))
                Path(f"{path}.done").write_text("published")
            except ConflictError:
                Path(f"{path}.done").write_text("conflict")
            except BaseException as err:
                Path(f"{path}.done").write_text(repr(err).replace(" ", "_"))
            os._exit(0)
        pids.append(pid)
    os.close(go)
    for pid, path in zip(pids, paths, strict=True):
        os.waitpid(pid, 0)
        print(Path(f"{path}.done").read_text())  # noqa: T201  read by the parent


class Moments:
    """Counts moments of a publish, and ends the process at one of them."""

    def __init__(self, how: str, point: float | None) -> None:
        self.count, self.point = 0, point
        if how == "files":  # each change of a file or folder by Python
            sys.addaudithook(self._audit)
        elif how == "calls":  # each call of a function
            sys.setprofile(self._profile)
        elif point is not None:  # whatever goes on, in whatever thread
            timer = threading.Timer(point, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()

    def _moment(self) -> None:
        self.count += 1
        if self.count == self.point:
            os.kill(os.getpid(), signal.SIGKILL)

    def _audit(self, event: str, args: tuple[object, ...]) -> None:
        writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
        if event in MUTATIONS or writes:
            self._moment()

    def _profile(self, frame: object, event: str, arg: object) -> None:
        if event in ("call", "c_call"):
            self._moment()


def killed(how: str, points: int, seed: int, old: Run, new: Run) -> None:
    """Prints how many processes were killed."""

    def count(tell: int) -> None:
        started, moments = time.monotonic(), Moments(how, None)
        publish_run(*new)
        sys.setprofile(None)
        total = time.monotonic() - started if how == "time" else moments.count
        os.write(tell, str(total).encode())

    def publish_until(point: float) -> None:
        Moments(how, point)
        publish_run(*new)

    def check() -> None:
        rows = read(new[0].config)
        assert rows["run_id"].n_unique() == 1, "a mix"
        was = old if rows["run_id"][0] == old[0].run_id else new
        assert_frame_equal(rows, expected(was))
        for run in (new, old):  # finish, and go back for the next time
            publish_run(*run)
            assert_frame_equal(read(run[0].config), expected(run))
            if run[0].config.output.format == "parquet":
                assert_clean(run)

    here, tell = os.pipe()
    for body in (lambda: publish_run(*old), lambda: count(tell), lambda: publish_run(*old)):
        assert in_a_child(body) == 0
    total = float(os.read(here, 100))
    chance = random.Random(seed)
    if how == "time":
        chosen = [chance.uniform(0, total) for _ in range(points)]
    else:
        chosen = sorted(chance.sample(range(1, int(total) + 1), min(points, int(total))))
    died = 0
    for point in chosen:
        status = in_a_child(lambda point=point: publish_until(point))
        died += os.WIFSIGNALED(status)
        assert os.WIFSIGNALED(status) or status == 0, status
        assert in_a_child(check) == 0, f"killed at {point} of {total}"
    print(died)  # noqa: T201  read by the parent


def assert_clean(run: Run) -> None:
    """Nothing but the run's files and `_SUCCESS` is in the folder, and nothing waits beside it."""
    published = open_table(run[0].config).current()
    assert published is not None
    partition = Path(published.partition)
    assert {p.name for p in partition.iterdir()} == {*published.files, "_SUCCESS"}
    root = Path(run[0].config.output.path + ".current")
    left = [p for p in root.rglob("*") if p.is_file() and p.suffix != ".json"]
    assert all(p.suffix == ".tmp" for p in left), left
    assert not list(root.rglob("new-*"))


if __name__ == "__main__":
    if sys.argv[1] == "together":
        together(sys.argv[2:])
    else:
        _, _, how, points, seed, old_path, new_path = sys.argv
        killed(how, int(points), int(seed), load(old_path), load(new_path))
