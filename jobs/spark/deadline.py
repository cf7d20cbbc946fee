"""A deadline inside a worker: it ends its own process when nothing has happened for too long.

For workers that nobody of ours watches from outside, such as those of Spark.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_GRACE_S = 30.0


class Deadline:
    """Ends this process with exit code 1 once `touch` has not been called for `seconds`.

    A thread says why first. A process that is stuck with the interpreter's lock held runs no
    thread: there `faulthandler`, which needs no lock, ends it somewhat later.
    """

    def __init__(self, seconds: float, last_words: Callable[[], None]) -> None:
        self._seconds = seconds
        self._last_words = last_words
        self._touched = time.monotonic()
        self._over = threading.Event()

    def touch(self) -> None:
        """Something happened."""
        self._touched = time.monotonic()
        faulthandler.dump_traceback_later(
            self._seconds + _GRACE_S, exit=True, file=sys.__stderr__ or sys.stderr
        )

    def _watch(self) -> None:
        left = self._seconds
        while not self._over.wait(max(left, 0.01)):
            left = self._touched + self._seconds - time.monotonic()
            if left <= 0:
                try:
                    self._last_words()
                finally:
                    os._exit(1)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch until the block ends."""
        self.touch()
        watcher = threading.Thread(target=self._watch, daemon=True, name="nightshelf-deadline")
        watcher.start()
        try:
            yield
        finally:
            self._over.set()
            faulthandler.cancel_dump_traceback_later()
            watcher.join()
