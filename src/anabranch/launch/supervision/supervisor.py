"""Watches a job's processes until the last has ended, and ends them by a deadline when one fails or a signal requests
it.

One thread, one selector, no polling: a process's end and the launcher's signals are descriptors.

::

                 a worker fails                      time is up        SIGINT, SIGTERM, SIGHUP
                        │                                │                        │ passed on to the workers
       others may say what they saw (patience.failure)   │ SIGABRT: stacks        │
                        v                                │                        │
                     SIGTERM                             │                        │ the same signal again: at once
                        └──── patience.stop ────> SIGKILL <──── patience.stop ────┘

Services (parameter servers, experts) are stopped when the last worker has ended, however it did, so that workers that
drain still find them. A service that dies earlier is restarted as its budget allows. One that has no restart
left ends the job, except for an expert that has served: mixtures continue with the experts that answer.

torch's own agent starts workers alike and is what ``torchrun`` uses; it is not used here because it kills the others
the moment one fails, before they can name the peer they lost, waits 30 seconds for a frozen worker, and forgets
processes that workers started.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from functools import partial

from anabranch.launch.output.long_waits import LongWaits
from anabranch.launch.output.screen import Screen
from anabranch.launch.supervision import signals as signal_box
from anabranch.launch.supervision.signals import SignalBox
from anabranch.launch.supervision.worker import ProcessSpec, RoleProcess

__all__ = ["Patience", "Supervisor"]

# How long SIGKILL may take: longer only for a process in an uninterruptible system call, a broken disk's or driver's.
_KERNEL_SECONDS = 10.0
_LINGER_SECONDS = 1.0  # for which services may see that the last worker has gone


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that the launcher waits for processes to end on their own.

    Attributes:
        failure: for the others after one failed, before they are asked to stop.
        stop: for those asked to stop, before they and all they have started are killed.
        drain: the same when the launcher itself was sent a signal: time to finish a step and save. Services have it
            too when the workers have ended well.
    """

    failure: float = 3.0
    stop: float = 5.0
    drain: float = 25.0


class _Ending:
    """The end of some processes: the signals still to be sent to those that run on, and their times."""

    def __init__(self, processes: Sequence[RoleProcess], tell: Callable[[str], None]) -> None:
        self.processes = processes
        self._tell = tell
        self._steps: deque[tuple[float, signal.Signals]] = deque()  # the last is always SIGKILL
        self._given_up_at: float | None = None

    @property
    def planned(self) -> bool:
        return bool(self._steps) or self._given_up_at is not None

    def running(self) -> list[RoleProcess]:
        return [process for process in self.processes if process.running]

    def send(self, number: signal.Signals) -> None:
        for process in self.running():
            process.signal(number)

    def plan(self, moment: float, number: signal.Signals) -> None:
        """Send ``number`` then."""
        self._steps.append((moment, number))

    def end_by(self, moment: float, what: str = "did not stop in time") -> None:
        """Kill those that still run then; ``what`` says what they did."""
        self._what = what
        self._steps.append((moment, signal.SIGKILL))
        self._given_up_at = moment + _KERNEL_SECONDS

    def clear(self) -> None:
        self._steps.clear()
        self._given_up_at = None

    def postpone(self, seconds: float) -> None:
        self._steps = deque((moment + seconds, number) for moment, number in self._steps)
        if self._given_up_at is not None:
            self._given_up_at += seconds

    def moments(self) -> list[float]:
        """Return the time at which ``act`` has something to do."""
        found = [moment for moment, _ in self._steps]
        return found if self._given_up_at is None else [*found, self._given_up_at]

    def act(self, now: float) -> None:
        while self._steps and now >= self._steps[0][0]:
            number = self._steps.popleft()[1]
            if number == signal.SIGKILL:
                for process in self.running():
                    self._tell(f"{process.who} {self._what}; killing it")
            self.send(number)
        if self._given_up_at is not None and now >= self._given_up_at:
            for process in self.running():
                self._tell(f"{process.who} (pid {process.pid}) does not die from SIGKILL: it hangs in the kernel")
                process.abandon()
            self._given_up_at = None


class Supervisor:
    """Watches ``workers`` until all have ended, then ends ``services``.

    Args:
        workers: the running workers, by rank.
        signals: what the launcher received.
        services: the running services; one that is restarted takes its predecessor's place here.
        rendezvous: where they all find one another; a job that loses it ends. The caller ends it.
        start: restarts one.
        returns: called when one has ended that is to be restarted.
        screen: rank 0's output, if it is shown.
        waits: reports long waits to the user.
        patience: how long processes may take to end.
        seconds: the job's time; ``None`` for as long as it takes.
        tell: called with each line that a user should see at once.

    Attributes:
        interrupted: the signal that ended the job.
        timed_out: whether its time was over.
    """

    def __init__(
        self,
        workers: Sequence[RoleProcess],
        signals: SignalBox,
        *,
        services: MutableSequence[RoleProcess] | None = None,
        rendezvous: RoleProcess | None = None,
        start: Callable[[ProcessSpec, int], RoleProcess] = RoleProcess,
        returns: Callable[[ProcessSpec], None] = lambda spec: None,
        screen: Screen | None = None,
        waits: LongWaits | None = None,
        patience: Patience | None = None,
        seconds: float | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.interrupted: signal.Signals | None = None
        self.timed_out = False
        self._services: MutableSequence[RoleProcess] = [] if services is None else services
        self._rendezvous = rendezvous
        self._start = start
        self._returns = returns
        self._workers = _Ending(workers, tell)
        self._service_ending = _Ending(self._services, tell)
        self._signals = signals
        self._screen = screen
        self._patience = patience or Patience()
        self._ends = None if seconds is None else time.monotonic() + seconds
        self._tell = tell
        self._waits = waits
        self._failed = False
        self._returning: list[tuple[float, RoleProcess]] = []  # services, and when they are to be restarted

    def run(self) -> None:
        """Return when every process has ended and was reaped."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.descriptor, selectors.EVENT_READ, self._on_signal)
            for process in (*self._workers.processes, *self._services, *filter(None, [self._rendezvous])):
                self._watch(selector, process)
            while self._workers.running() or self._service_ending.running():
                if not self._workers.running() and not self._service_ending.planned:
                    self._stop_services()
                for key, _ in selector.select(self._next_moment()):
                    key.data()
                self._bring_back(selector)
                self._act()

    def kill(self) -> None:
        """End all processes at once."""
        self._workers.send(signal.SIGKILL)
        self._service_ending.send(signal.SIGKILL)

    def _watch(self, selector: selectors.BaseSelector, process: RoleProcess) -> None:
        selector.register(process.pidfd, selectors.EVENT_READ, partial(self._on_end, selector, process))

    def _on_end(self, selector: selectors.BaseSelector, process: RoleProcess) -> None:
        selector.unregister(process.pidfd)
        process.reap()
        self._on_signal()  # one that was sent to all processes at once ended this one
        if self.interrupted is not None and process.exit_code == -self.interrupted:
            process.stopped = True
        if process is self._rendezvous:
            process.early = True
            self._fail(process)
        elif process.role != "worker":
            self._on_service_end(selector, process)
        elif process.exit_code != 0 and not process.stopped:
            self._fail(process)

    def _on_service_end(self, selector: selectors.BaseSelector, service: RoleProcess) -> None:
        if service.stopped or self._failed or not self._workers.running():
            return
        spec, exit_ = service.spec, service.exit
        served = service.restarted > 0 or service.has_served()
        restarts = spec.restarts if served else None
        if self.interrupted:  # the workers drain: too late for another
            service.forgiven = True
            if exit_.code:
                self._tell(exit_.describe())
        elif restarts is not None and (pause := restarts.take()) is not None:
            when = f" in {pause:g} s" if pause else ""
            self._tell(f"{exit_.describe()}; restarted{when} ({restarts.used} of {restarts.times})")
            self._returns(spec)
            self._returning.append((time.monotonic() + pause, service))
            self._bring_back(selector)
        elif spec.role == "expert" and served:
            service.forgiven = True
            self._tell(f"{exit_.describe()}; the job continues without it")
        else:
            service.early = True
            if exit_.code == 0:
                self._tell(f"{exit_.describe()}: the script never called job.serve()")
            self._fail(service)

    def _bring_back(self, selector: selectors.BaseSelector) -> None:
        """Restart the services whose pause is over, if they are still needed."""
        now = time.monotonic()
        due = [service for moment, service in self._returning if moment <= now]
        self._returning = [(moment, service) for moment, service in self._returning if moment > now]
        if self._failed or self.interrupted or not self._workers.running():
            return
        for service in due:
            successor = self._start(service.spec, service.restarted + 1)
            self._services[self._services.index(service)] = successor
            self._watch(selector, successor)

    def _fail(self, process: RoleProcess) -> None:
        """End the job because of ``process``, after giving the others a moment to report."""
        if self._failed:
            return
        self._failed = True
        others = len(self._workers.running())
        if others and not self._workers.planned:
            count, other = f"{others} " if others > 1 else "", "other " if process.role == "worker" else ""
            self._tell(f"{process.who} failed; stopping the {count}{other}worker{'s' * (others > 1)}")
            now = time.monotonic()
            self._workers.plan(now + self._patience.failure, signal.SIGTERM)
            self._workers.end_by(now + self._patience.failure + self._patience.stop)

    def _stop_services(self) -> None:
        """Request that they finish, save and exit: no worker is left to call them.

        The second signal is for those that linger, because somebody from elsewhere is connected.
        """
        self._service_ending.send(signal.SIGTERM)
        self._service_ending.plan(time.monotonic() + _LINGER_SECONDS, signal.SIGTERM)
        patience = self._patience.stop if self._failed or self.timed_out else self._patience.drain
        self._service_ending.end_by(time.monotonic() + patience)

    def _on_signal(self) -> None:
        for number, again in self._signals.take():
            if number == signal.SIGWINCH:
                if self._screen:
                    self._screen.fit()
            elif number == signal.SIGTSTP:
                self._pause()
            elif self.interrupted and not again:
                continue
            elif self.interrupted:
                self._tell(f"{number.name} again: killing the workers")
                for ending in (self._workers, self._service_ending):
                    ending.clear()
                    ending.end_by(time.monotonic(), "did not stop")
            else:
                self.interrupted = number
                self._tell(f"{number.name}: stopping the workers (send it again to kill them)")
                self._workers.send(number)
                self._workers.clear()
                self._workers.end_by(time.monotonic() + self._patience.drain)

    def _pause(self) -> None:
        """Ctrl-Z: stop all processes, and this one, until the shell lets it continue; that time is nobody's."""
        everyone = [*self._workers.processes, *self._services, *filter(None, [self._rendezvous])]
        for process in everyone:
            process.signal_group(signal.SIGSTOP)
        before = time.monotonic()
        signal_box.suspend()
        stopped = time.monotonic() - before
        for process in everyone:
            process.signal_group(signal.SIGCONT)
        self._workers.postpone(stopped)
        self._service_ending.postpone(stopped)
        self._returning = [(moment + stopped, service) for moment, service in self._returning]
        if self._ends is not None:
            self._ends += stopped
        if self._screen:
            self._screen.fit()

    def _next_moment(self) -> float | None:
        moments = [*self._workers.moments(), *self._service_ending.moments(), *(due for due, _ in self._returning)]
        if self._ends is not None and not self.timed_out:
            moments.append(self._ends)
        if self._waits is not None:
            moments.append(self._waits.next_check)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _act(self) -> None:
        now = time.monotonic()
        if self._waits is not None:
            self._waits.check(now)
        if self._ends is not None and now >= self._ends and not self.timed_out:
            self.timed_out = True
            self._workers.send(signal.SIGABRT)
            self._workers.clear()
            self._workers.end_by(now + self._patience.stop)
        self._workers.act(now)
        self._service_ending.act(now)
