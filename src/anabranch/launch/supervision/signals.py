"""Signals as values: while a job runs they are collected and read by the supervisor's loop, and interrupt nothing.

One request may come twice: ``timeout`` and wrappers that pass signals on send one to the launcher and one to its
process group. So a second stopping signal counts as another request only some time after the first.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that end a job."""

ECHO_SECONDS = 0.5
"""A stopping signal within this time of the first is its echo."""


class Stopped(BaseException):
    """A signal ends the job before it has started; not an ``Exception``, so that it is not handled as a failure."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.number = number


class SignalBox:
    """The received signals that were not taken yet; ``descriptor`` is readable while there are some."""

    def __init__(self) -> None:
        self.descriptor, self.notify = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self.notify, False)
        self._pending: list[tuple[signal.Signals, bool]] = []
        self._first: float | None = None
        self._on_stop: Callable[[signal.Signals], None] | None = None

    def put(self, number: int, frame: FrameType | None = None) -> None:
        """Collect a signal; a handler."""
        again, now = False, time.monotonic()
        if number in STOPPING:
            again = self._first is not None and now - self._first >= ECHO_SECONDS
            self._first = now if self._first is None else self._first
        self._pending.append((signal.Signals(number), again))
        if number in STOPPING and self._on_stop is not None:
            self._on_stop(signal.Signals(number))

    def call_on_stop(self, act: Callable[[signal.Signals], None] | None) -> None:
        """Call ``act`` in the handler of each stopping signal, and now if one has come; ``None``: no more."""
        self._on_stop = act
        stopping = [number for number, _ in self._pending if number in STOPPING]
        if act is not None and stopping:
            act(stopping[0])

    def take(self) -> list[tuple[signal.Signals, bool]]:
        """Return the signals since the last call, in order, each with True if it is another request to stop."""
        with suppress(BlockingIOError):
            os.read(self.descriptor, 4096)
        taken = self._pending[:]
        del self._pending[: len(taken)]
        return taken

    def close(self) -> None:
        """Close both ends."""
        os.close(self.descriptor)
        os.close(self.notify)


_box: SignalBox | None = None


@contextmanager
def collect_signals() -> Iterator[SignalBox]:
    """Collect SIGINT, SIGTERM, SIGHUP, SIGTSTP (Ctrl-Z) and SIGWINCH until the block ends.

    Inside of another such block it is that one's box. Off the main thread nothing is collected: the interpreter
    delivers signals only to the main thread. SIGHUP and SIGTSTP stay ignored if they were (``nohup``).
    """
    global _box
    on_main = threading.current_thread() is threading.main_thread()
    if _box is not None and on_main:
        yield _box
        return
    box = SignalBox()
    try:
        if not on_main:
            yield box
            return
        numbers = [
            number
            for number in (*STOPPING, signal.SIGTSTP, signal.SIGWINCH)
            if number not in (signal.SIGHUP, signal.SIGTSTP) or signal.getsignal(number) is not signal.SIG_IGN
        ]
        _box, previous = box, {number: signal.signal(number, box.put) for number in numbers}
        wakeup = signal.set_wakeup_fd(box.notify, warn_on_full_buffer=False)
        try:
            yield box
        finally:
            _box = None
            signal.set_wakeup_fd(wakeup)
            for number, handler in previous.items():
                signal.signal(number, handler)
    finally:
        box.close()


def suspend() -> None:
    """Stop like the default action of SIGTSTP; returns when the shell lets this process continue (``fg``, ``bg``).

    Returns at once if no shell could: the kernel knows, and does nothing.
    """
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)
