"""SIGTERM: how a command ends when its machine, its scheduler or its deadline asks it to.

The signal raises `Terminated` in the main thread, as Ctrl-C raises `KeyboardInterrupt`: what is at
work is dropped, receipts stay, locks and workers are given back on the way out, and the command
ends with exit code 143. A block under `finish_first` ends first. A library that is deep in its own
code hears no exception: for it there is a thread, which ends the process after a while. A second
SIGTERM ends it at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_PR_SET_PDEATHSIG = 1
EXIT_CODE = 143  # 128 + SIGTERM, as shells count
GRACE_S = 20.0  # Kubernetes and most spot markets kill after 30


class Terminated(BaseException):  # noqa: N818  # no error: somebody asked for it
    """The process was asked to end."""


class _Ending:
    """Whether this process was asked to end, and what it must finish before."""

    def __init__(self) -> None:
        self.asked = False
        self.listening = False
        self._raised = False
        self._unfinished = 0

    def reset(self, *, listening: bool) -> None:
        self.asked = self._raised = False
        self.listening, self._unfinished = listening, 0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self.raise_if_asked()

    def raise_if_asked(self) -> None:
        if self.asked and not self._raised and not self._unfinished:
            self._raised = True  # once: what cleans up is not to be interrupted
            raise Terminated

    @contextmanager
    def finish_first(self) -> Iterator[None]:
        """A block that a SIGTERM does not interrupt; it counts when the block has ended well."""
        self._unfinished += 1
        try:
            yield
        finally:
            self._unfinished -= 1
        self.raise_if_asked()

    @property
    def may_be_cut_off(self) -> bool:
        return not self._unfinished


_ending = _Ending()  # signals are of the process
finish_first = _ending.finish_first


def asked_to_end() -> bool:
    """Whether SIGTERM has come, whatever has become of it since."""
    return _ending.asked


def no_more_interruptions() -> None:
    """The command is saying how it ended: a SIGTERM that comes now changes nothing."""
    _ending._raised = True


@contextmanager
def ends_on_sigterm(last_words: Callable[[], None]) -> Iterator[None]:
    """Raise `Terminated` in the block when SIGTERM comes.

    Args:
        last_words: said before the process is ended from outside the main thread, which has not
            come back from a library for `GRACE_S` seconds.
    """
    if threading.current_thread() is not threading.main_thread() or _ending.listening:
        yield  # signals are for the main thread; and inside another command they are its own
        return
    _ending.reset(listening=True)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.signal(signal.SIGTERM, _ending.on_signal)
    # The byte is written even where the main thread runs no Python, and so no handler.
    woken_before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    watch = threading.Thread(
        target=_watch, args=(ours, last_words), daemon=True, name="nightshelf-ending"
    )
    watch.start()
    try:
        yield
    finally:
        _ending.listening = False
        if not _ending.asked:  # else the thread stays, should the interpreter not come to its end
            signal.set_wakeup_fd(woken_before)
            signal.signal(signal.SIGTERM, before)
            theirs.close()
            watch.join()


def end_with_parent(number: signal.Signals) -> None:
    """Ask the kernel for this signal when the parent ends. Linux only.

    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def _watch(signals: socket.socket, last_words: Callable[[], None]) -> None:
    """End the process at the second SIGTERM, or when the first has not ended it in time."""
    with signals:
        if not _next_sigterm(signals):
            return
        signals.settimeout(GRACE_S)
        try:
            if not _next_sigterm(signals):
                return
        except TimeoutError:
            while not _ending.may_be_cut_off:
                threading.Event().wait(0.1)
            last_words()
        os._exit(EXIT_CODE)


def _next_sigterm(signals: socket.socket) -> bool:
    """Wait for one; False when nobody listens any more."""
    while byte := signals.recv(1):
        if byte[0] == signal.SIGTERM:
            return True
    return False
