"""Signals as values: while a job runs they are collected and read by the supervisor's loop, and interrupt nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

__all__ = ["ECHO_SECONDS", "STOPPING", "SignalBox", "Stopped", "collect_signals", "stand_still"]

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that end a job."""

ECHO_SECONDS = 0.5
"""`timeout` and wrappers that pass signals on deliver one twice: to the launcher, and to its group."""


class Stopped(BaseException):
    """A signal ends the job before it has begun; no ``Exception``, so that nobody takes it for a failure of his."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.number = number


class SignalBox:
    """The signals that came in and were not taken yet; ``descriptor`` is readable while there are some.

    Attributes:
        on_stop: called in the handler, wherever the program is, with each stopping signal, and whether it is a second
            one. A loop that is busy, or has not begun, would see to it late.
    """

    def __init__(self) -> None:
        self.descriptor, self._notify = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._notify, False)
        self._pending: list[signal.Signals] = []
        self._stopping_since: float | None = None
        self.on_stop: Callable[[signal.Signals, bool], None] | None = None

    def put(self, number: int, frame: FrameType | None = None) -> None:
        """Collects one signal; the handler itself."""
        self._pending.append(signal.Signals(number))
        if number not in STOPPING:
            return
        now = time.monotonic()
        again = self._stopping_since is not None and now - self._stopping_since >= ECHO_SECONDS
        if self._stopping_since is None:
            self._stopping_since = now
        if self.on_stop is not None:
            self.on_stop(signal.Signals(number), again)

    def take(self) -> list[signal.Signals]:
        """What has come since the last call, in order."""
        with suppress(BlockingIOError):
            os.read(self.descriptor, 4096)
        taken = self._pending[:]
        del self._pending[: len(taken)]
        return taken

    @property
    def notify(self) -> int:
        """What the interpreter writes to when a signal arrives."""
        return self._notify

    def close(self) -> None:
        """Closes both ends."""
        os.close(self.descriptor)
        os.close(self._notify)


@contextmanager
def collect_signals() -> Iterator[SignalBox]:
    """Collects SIGINT, SIGTERM, SIGHUP, SIGTSTP (Ctrl-Z) and SIGWINCH until the block ends.

    Off the main thread nothing is collected: the interpreter hands signals to the main thread alone. SIGHUP and SIGTSTP
    stay ignored where they were (``nohup``).
    """
    box = SignalBox()
    if threading.current_thread() is not threading.main_thread():
        try:
            yield box
        finally:
            box.close()
        return
    maybe = (signal.SIGHUP, signal.SIGTSTP)
    numbers = [number for number in (*STOPPING, signal.SIGTSTP) if number not in maybe or not _ignored(number)]
    previous = {number: signal.signal(number, box.put) for number in (*numbers, signal.SIGWINCH)}
    wakeup = signal.set_wakeup_fd(box.notify, warn_on_full_buffer=False)
    try:
        yield box
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in previous.items():
            signal.signal(number, handler)
        box.close()


def stand_still() -> None:
    """Does what SIGTSTP does by itself; returns when the shell lets this process go on (``fg``, ``bg``).

    At once where there is no shell that could: the kernel knows, and does nothing.
    """
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)


def _ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN
