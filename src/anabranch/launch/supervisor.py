"""Watches a job's workers until the last has ended, and ends them in time when one fails or a signal asks for it.

One thread, one selector, no polling: a worker's end, rank 0's output and the launcher's signals are all descriptors.

::

                 a worker fails                      time is up        SIGINT, SIGTERM, SIGHUP
                        │                                │                        │ passed on to the workers
       others may say what they saw (patience.failure)   │ SIGABRT: stacks        │
                        v                                │                        │
                     SIGTERM                             │                        │ the same signal again: at once
                        └──── patience.stop ────> SIGKILL <──── patience.stop ────┘

torch's own agent starts workers alike and is what ``torchrun`` uses; it is not used here because it kills the others
the moment one fails, before they can name the peer they lost, waits 30 seconds for a frozen worker, and forgets
processes that workers started.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from anabranch.launch.screen import Screen
from anabranch.launch.signals import SignalBox
from anabranch.launch.worker import Worker

__all__ = ["Patience", "Supervisor"]

# How long SIGKILL may take: longer only for a process in an uninterruptible system call, a broken disk's or driver's.
_KERNEL_SECONDS = 10.0
# `timeout` and wrappers that pass signals on deliver one twice: to the launcher, and to its group.
_ECHO_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the launcher waits for workers to end by themselves, in seconds.

    Attributes:
        failure: for the others after one failed, before they are asked to stop.
        stop: for those asked to stop, before they and all they have started are killed.
        drain: the same when the launcher itself was sent SIGTERM: time to finish a step and save.
    """

    failure: float = 3.0
    stop: float = 5.0
    drain: float = 25.0


class Supervisor:
    """Watches ``workers`` until all have ended.

    Args:
        workers: the running workers, by rank.
        signals: what the launcher received.
        screen: rank 0's output, if it is shown.
        patience: how long workers may take to end.
        seconds: the job's time; ``None`` for as long as it takes.
        tell: called with each line that a user should see at once.

    Attributes:
        interrupted: the signal that ended the job.
        timed_out: whether its time was over.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        signals: SignalBox,
        *,
        screen: Screen | None = None,
        patience: Patience | None = None,
        seconds: float | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.interrupted: signal.Signals | None = None
        self.timed_out = False
        self._workers = workers
        self._signals = signals
        self._screen = screen
        self._patience = patience or Patience()
        self._ends = None if seconds is None else time.monotonic() + seconds
        self._tell = tell
        self._failed = False
        self._interrupted_at = 0.0
        self._given_up_at: float | None = None
        # What is still to be sent to the workers that run on, each with its moment; the last is always SIGKILL.
        self._plan: deque[tuple[float, signal.Signals]] = deque()

    def run(self) -> None:
        """Returns when every worker has ended and was reaped."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.descriptor, selectors.EVENT_READ, self._on_signal)
            for source in self._screen.targets if self._screen else ():
                selector.register(source, selectors.EVENT_READ, partial(self._on_output, selector, source))
            for worker in self._workers:
                selector.register(worker.pidfd, selectors.EVENT_READ, partial(self._on_end, selector, worker))
            while self._running():
                for key, _ in selector.select(self._next_moment()):
                    key.data()
                self._act()

    def kill(self) -> None:
        """Ends all workers at once."""
        for worker in self._running():
            worker.signal(signal.SIGKILL)

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.running]

    def _on_output(self, selector: selectors.BaseSelector, source: int) -> None:
        assert self._screen
        if self._screen.blocked(source):
            resume = partial(self._on_room, selector, source)
            selector.unregister(source)
            selector.register(self._screen.targets[source], selectors.EVENT_WRITE, resume)
        elif not self._screen.copy(source):
            selector.unregister(source)

    def _on_room(self, selector: selectors.BaseSelector, source: int) -> None:
        assert self._screen
        selector.unregister(self._screen.targets[source])
        selector.register(source, selectors.EVENT_READ, partial(self._on_output, selector, source))

    def _on_end(self, selector: selectors.BaseSelector, worker: Worker) -> None:
        selector.unregister(worker.pidfd)
        worker.reap()
        if worker.exit_code == 0 or worker.stopped or self._failed:
            return
        self._failed = True
        others = len(self._running())
        if others and not self._plan:
            whom = "the other worker" if others == 1 else f"the {others} other workers"
            self._tell(f"rank {worker.rank} failed; stopping {whom}")
            now = time.monotonic()
            self._plan.append((now + self._patience.failure, signal.SIGTERM))
            self._end_by(now + self._patience.failure + self._patience.stop)

    def _on_signal(self) -> None:
        for number in self._signals.take():
            if number == signal.SIGWINCH:
                if self._screen:
                    self._screen.fit()
            elif self.interrupted and time.monotonic() - self._interrupted_at < _ECHO_SECONDS:
                continue
            elif self.interrupted:
                self._tell(f"{number.name} again: killing the workers")
                self._plan.clear()
                self._end_by(time.monotonic())
            else:
                self.interrupted = number
                self._interrupted_at = time.monotonic()
                self._tell(f"{number.name}: stopping the workers (once more kills them)")
                self._send(number)
                self._plan.clear()
                patience = self._patience.drain if number == signal.SIGTERM else self._patience.stop
                self._end_by(time.monotonic() + patience)

    def _next_moment(self) -> float | None:
        moments = [moment for moment, _ in self._plan]
        if self._given_up_at is not None:
            moments.append(self._given_up_at)
        if self._ends is not None and not self.timed_out:
            moments.append(self._ends)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _act(self) -> None:
        now = time.monotonic()
        if self._ends is not None and now >= self._ends and not self.timed_out:
            self.timed_out = True
            self._send(signal.SIGABRT)
            self._plan.clear()
            self._end_by(now + self._patience.stop)
        while self._plan and now >= self._plan[0][0]:
            self._send(self._plan.popleft()[1])
        if self._given_up_at is not None and now >= self._given_up_at:
            for worker in self._running():
                self._tell(f"rank {worker.rank} (pid {worker.pid}) does not die of SIGKILL: it hangs in the kernel")
                worker.abandon()

    def _end_by(self, moment: float) -> None:
        self._plan.append((moment, signal.SIGKILL))
        self._given_up_at = moment + _KERNEL_SECONDS

    def _send(self, number: signal.Signals) -> None:
        for worker in self._running():
            worker.signal(number)
