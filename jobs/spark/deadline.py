"""A deadline inside a worker, for workers that nobody of ours watches from outside."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_GRACE_S = 30.0


@contextmanager
def deadline(seconds: float, last_words: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """End this process with exit code 1 once nothing has happened in the block for `seconds`.

    A thread says why first. A process that is stuck with the interpreter's lock held runs no
    thread: there `faulthandler`, which needs no lock, ends it somewhat later.

    Yields:
        What says that something happened.
    """
    touched, over = time.monotonic(), threading.Event()

    def touch() -> None:
        nonlocal touched
        touched = time.monotonic()
        late = seconds + _GRACE_S
        faulthandler.dump_traceback_later(late, exit=True, file=sys.__stderr__ or sys.stderr)

    def watch() -> None:
        left = seconds
        while not over.wait(max(left, 0.01)):
            left = touched + seconds - time.monotonic()
            if left <= 0:
                try:
                    last_words()
                finally:
                    os._exit(1)

    touch()
    watcher = threading.Thread(target=watch, daemon=True, name="nightshelf-deadline")
    watcher.start()
    try:
        yield touch
    finally:
        over.set()
        faulthandler.cancel_dump_traceback_later()
        watcher.join()
