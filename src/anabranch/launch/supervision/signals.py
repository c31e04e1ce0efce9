"""Signals as values: while a job runs they are collected and read by the supervisor's loop, and interrupt nothing.

::

    kernel ──> a thread in sigwaitinfo, which alone learns the sender ──> the carrier ──> handler in the main thread

A Python handler does not learn the sender of a signal. So the stopping signals are blocked in the main thread, and
received by a thread that learns it; it passes them on by another signal, which interrupts the main thread's wait. In a
process with more threads, such as a program with its own job, the kernel would choose one of those: there the handler
receives all signals, without senders.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from anabranch.launch.supervision.stop_requests import TERMINAL, UNKNOWN, StopRequests

__all__ = ["STOPPING", "SignalBox", "Stopped", "collect_signals", "hold_signals", "inherited_mask", "suspend"]

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that end a job."""

_CARRIER = signal.SIGRTMIN + 7  # any that is unused
_SI_KERNEL = 0x80
_JOIN_SECONDS = 10.0

# What this module blocks in the main thread, and what it starts must not inherit.
_held: frozenset[int] = frozenset()


class Stopped(BaseException):
    """A signal ends the job before it has started; not an ``Exception``, so that it is not handled as a failure."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.number = number


class SignalBox:
    """The received signals that were not taken yet; ``descriptor`` is readable while there are some."""

    def __init__(self) -> None:
        self.descriptor, self._notify = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._notify, False)
        self._pending: list[tuple[signal.Signals, bool]] = []
        self._requests = StopRequests()
        self._on_stop: Callable[[signal.Signals, bool], None] | None = None

    def put(self, number: int, frame: FrameType | None = None) -> None:
        """Collect one signal whose sender is not known; a handler."""
        self.arrived(number, UNKNOWN, time.monotonic())

    def arrived(self, number: int, sender: int, now: float) -> None:
        """Collect one signal that ``sender`` sent."""
        again = number in STOPPING and self._requests.is_another(signal.Signals(number), sender, now)
        self._pending.append((signal.Signals(number), again))
        if number in STOPPING and self._on_stop is not None:
            self._on_stop(signal.Signals(number), again)

    def call_on_stop(self, act: Callable[[signal.Signals, bool], None]) -> None:
        """Call ``act`` with each stopping signal, and whether it is a new request after the first.

        It is called in the handler, at any point of the program: a loop that is busy, or has not begun, would handle
        the signal late. For signals already received, it is called now.
        """
        self._on_stop = act
        for number, again in self._pending[:]:
            if number in STOPPING:
                act(number, again)

    def take(self) -> list[tuple[signal.Signals, bool]]:
        """Return the signals since the last call, in order, each with True if it is another request to stop."""
        with suppress(BlockingIOError):
            os.read(self.descriptor, 4096)
        taken = self._pending[:]
        del self._pending[: len(taken)]
        return taken

    @property
    def notify(self) -> int:
        """The descriptor that the interpreter writes to when a signal arrives."""
        return self._notify

    def close(self) -> None:
        """Close both ends."""
        os.close(self.descriptor)
        os.close(self._notify)


_collected = False
_missed: list[signal.Signals] = []


@contextmanager
def hold_signals() -> Iterator[None]:
    """From the first ``collect_signals`` in the block on, a stopping signal outside of one ends nothing.

    Between two attempts at a job it applies to the next one; while a command cleans up after its job it is too late.
    """
    global _collected
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _collected = False
    _missed.clear()
    previous = {number: signal.signal(number, _hold) for number in STOPPING if not _ignored(number)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _missed.clear()


def _hold(number: int, frame: FrameType | None) -> None:
    if _collected:
        _missed.append(signal.Signals(number))
        return
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextmanager
def collect_signals() -> Iterator[SignalBox]:
    """Collect SIGINT, SIGTERM, SIGHUP, SIGTSTP (Ctrl-Z) and SIGWINCH until the block ends.

    Off the main thread nothing is collected: the interpreter delivers signals only to the main thread. SIGHUP and
    SIGTSTP stay ignored if they were (``nohup``).
    """
    global _collected
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
    _collected = True
    for number in _missed:
        box.arrived(number, UNKNOWN, time.monotonic())
        os.write(box.notify, b"\0")  # wakes the wait for the box
    _missed.clear()
    wakeup = signal.set_wakeup_fd(box.notify, warn_on_full_buffer=False)
    try:
        with _senders_known(box, frozenset(numbers) & frozenset(STOPPING)):
            yield box
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in previous.items():
            signal.signal(number, handler)
        box.close()


def inherited_mask() -> list[int]:
    """Return the signals that what this thread starts is to block: those that it blocks, except for the ones taken
    here.
    """
    return sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()) - _held))


def suspend() -> None:
    """Stop like the default action of SIGTSTP; returns when the shell lets this process continue (``fg``, ``bg``).

    Returns at once if no shell could: the kernel knows, and does nothing.
    """
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)


@contextmanager
def _senders_known(box: SignalBox, numbers: frozenset[int]) -> Iterator[None]:
    """While the block runs ``numbers`` reach ``box`` with their senders, if this process has no other thread."""
    global _held
    if len(os.listdir("/proc/self/task")) > 1:
        yield
        return
    taken: deque[tuple[int, int, float]] = deque()
    main = threading.get_ident()

    def watch() -> None:
        while (found := signal.sigwaitinfo({*numbers, _CARRIER})).si_signo != _CARRIER:
            sender = TERMINAL if found.si_code == _SI_KERNEL else found.si_pid or UNKNOWN
            taken.append((found.si_signo, sender, time.monotonic()))
            signal.pthread_kill(main, _CARRIER)

    def hand_over(number: int, frame: FrameType | None) -> None:
        while taken:
            box.arrived(*taken.popleft())

    before = signal.signal(_CARRIER, hand_over)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    watching = threading.Thread(target=watch, name="anabranch-signals")
    watching.start()  # with all blocked, as it stays
    held, _held = _held, numbers - mask
    signal.pthread_sigmask(signal.SIG_SETMASK, mask | numbers)
    try:
        yield
    finally:
        assert watching.ident is not None
        signal.pthread_kill(watching.ident, _CARRIER)
        watching.join(timeout=_JOIN_SECONDS)
        _held = held
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        hand_over(_CARRIER, None)
        signal.signal(_CARRIER, before)


def _ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN
