"""Watches a job's processes until the last has ended, and ends them by a deadline when one fails or a signal requests
it.

One thread, one selector, no polling: a process's end and the launcher's signals are descriptors.

::

                 a worker fails                      time is up        SIGINT, SIGTERM, SIGHUP
                        │                                │                        │ passed on to the workers
       others may say what they saw (patience.failure)   │ SIGABRT: stacks        │
                        v                                │                        │
                     SIGTERM                             │                        │ another signal: at once
                        └──── patience.stop ────> SIGKILL <──── patience.drain ───┘

Services (parameter servers, experts) are stopped when the last worker has ended, however it did, so that workers that
drain still find them. A service that dies earlier is restarted as its budget allows. One that has no restart
left ends the job, except for an expert that has served: mixtures continue with the experts that answer.

torch's own agent starts workers alike and is what ``torchrun`` uses; it is not used here because it kills the others
the moment one fails, before they can name the peer they lost, waits 30 seconds for a frozen worker, and forgets
processes that workers started.

A job that may lose workers (``members.py``) goes on without one that was killed, and another is started in its place.
"""

from __future__ import annotations

import sched
import selectors
import signal
import time
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from anabranch.launch.output.long_waits import LongWaits
from anabranch.launch.output.screen import Screen
from anabranch.launch.supervision import signals as signal_box
from anabranch.launch.supervision.members import CALL_SECONDS, LOOK_SECONDS, Members
from anabranch.launch.supervision.signals import SignalBox
from anabranch.launch.supervision.worker import ProcessSpec, RoleProcess

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


class _Timers(sched.scheduler):
    """Actions by the time at which they are due; of one kind until that is cleared."""

    def __init__(self) -> None:
        self._behind = 0.0
        super().__init__(lambda: time.monotonic() - self._behind)

    def after(self, seconds: float, act: Callable[[], None], kind: int = 0) -> None:
        """Call ``act`` then."""
        self.enter(seconds, kind, act)  # the priority of what is due at once

    def has(self, kind: int) -> bool:
        """Return True if something of this kind is to be done."""
        return any(event.priority == kind for event in self.queue)

    def clear(self, kind: int) -> None:
        """Forget what is of this kind."""
        for event in self.queue:
            if event.priority == kind:
                self.cancel(event)

    def postpone(self, seconds: float) -> None:
        """Do everything later."""
        self._behind += seconds

    def remaining(self) -> float | None:
        """Return the seconds until something is to be done; ``None`` if nothing is."""
        return None if self.empty() else max(0.0, self.queue[0].time - self.timefunc())


@dataclass(eq=False)
class Supervisor:
    """Watches ``workers`` until all have ended, then ends ``services``.

    Attributes:
        workers: the running workers, by rank; one that replaces another takes its place here.
        signals: what the launcher received.
        services: the running services; one that is restarted takes its predecessor's place here.
        rendezvous: where they all find one another; a job that loses it ends. The caller ends it.
        start: restarts one.
        returns: called when one has ended that is to be restarted.
        members: decides which workers may leave the job; without it none may.
        screen: rank 0's output, if it is shown.
        waits: reports long waits to the user.
        patience: how long processes may take to end.
        seconds: the job's time; ``None`` for as long as it takes.
        tell: called with each line that a user should see at once.
        interrupted: the signal that ended the job.
        timed_out: whether its time was over.
    """

    workers: MutableSequence[RoleProcess]
    signals: SignalBox
    _: KW_ONLY
    services: MutableSequence[RoleProcess] = field(default_factory=list)
    rendezvous: RoleProcess | None = None
    start: Callable[[ProcessSpec, int], RoleProcess] = RoleProcess
    returns: Callable[[ProcessSpec], None] = lambda spec: None
    members: Members | None = None
    screen: Screen | None = None
    waits: LongWaits | None = None
    patience: Patience = field(default_factory=Patience)
    seconds: float | None = None
    tell: Callable[[str], None] = lambda line: None
    interrupted: signal.Signals | None = field(default=None, init=False)
    timed_out: bool = field(default=False, init=False)
    _failed: bool = field(default=False, init=False)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector, init=False)
    _timers: _Timers = field(default_factory=_Timers, init=False)

    def __post_init__(self) -> None:
        if self.seconds is not None:
            self._timers.after(self.seconds, self._time_out)
        if self.waits is not None:
            self._look(self.waits)
        if self.members is not None:
            self._look_at_members(self.members)

    def run(self) -> None:
        """Return when every process has ended and was reaped."""
        with self._selector:
            self._selector.register(self.signals.descriptor, selectors.EVENT_READ, self._on_signal)
            for process in self._everyone():
                self._watch(process)
            while _running(self.workers) or _running(self.services):
                if not _running(self.workers) and not self._timers.has(id(self.services)):
                    self._stop_services()
                for key, _ in self._selector.select(self._timers.remaining()):
                    key.data()
                self._timers.run(blocking=False)

    def kill(self) -> None:
        """End all processes at once."""
        _send(self.workers, signal.SIGKILL)
        _send(self.services, signal.SIGKILL)

    def _everyone(self) -> list[RoleProcess]:
        return [*self.workers, *self.services, *filter(None, [self.rendezvous])]

    def _watch(self, process: RoleProcess) -> None:
        self._selector.register(process.pidfd, selectors.EVENT_READ, partial(self._on_end, process))

    def _on_end(self, process: RoleProcess) -> None:
        self._selector.unregister(process.pidfd)
        process.reap()
        self._on_signal()  # one that was sent to all processes at once ended this one
        if self.interrupted is not None and process.code == -self.interrupted:
            process.stopped = True
        if process is self.rendezvous:
            process.early = True
            self._fail(process)
        elif process.role != "worker":
            self._on_service_end(process)
        else:
            self._on_worker_end(process)

    def _on_worker_end(self, worker: RoleProcess) -> None:
        members, well = self.members, worker.code == 0 or worker.stopped
        if members is not None and not self._failed and (well or members.may_leave(worker)):
            worker.forgiven = not well or members.awaits(worker)
            if self.screen and not well and (heir := members.heir(worker)) is not None:
                self.screen.follow(heir.log)
            text = members.leave(worker)
            if not well:
                pause, restarts = None if self.interrupted else members.replaces(worker), worker.spec.restarts
                if pause is not None and restarts is not None:
                    when = f" in {pause:g} s" if pause else ""
                    text += f"; another takes its place{when} ({restarts.used} of {restarts.times})"
                    self.returns(worker.spec)
                    self._timers.after(pause, partial(self._replace, members, worker))
                self.tell(f"{worker.describe()}; {text}")
        elif not well:
            self._fail(worker)

    def _replace(self, members: Members, worker: RoleProcess) -> None:
        """Start another in place of a lost worker, if it is still needed."""
        spec = members.newcomer(worker.spec)
        if spec is not None and not self._failed and not self.interrupted:
            successor = self.start(spec, worker.restarted + 1)
            self.workers[self.workers.index(worker)] = successor
            self._await(successor, members)

    def _await(self, newcomer: RoleProcess, members: Members) -> None:
        self._watch(newcomer)
        if not self._timers.has(id(members)):
            self._look_for_newcomers(members)

    def _look_for_newcomers(self, members: Members) -> None:
        members.admit()
        if newcomers := members.newcomers():
            pause = CALL_SECONDS if any(one.pid for one in newcomers) else LOOK_SECONDS
            self._timers.after(pause, partial(self._look_for_newcomers, members), id(members))

    def _on_service_end(self, service: RoleProcess) -> None:
        if service.stopped or self._failed or not _running(self.workers):
            return
        spec = service.spec
        served = service.restarted > 0 or service.has_served()
        restarts = spec.restarts if served else None
        if self.interrupted:  # the workers drain: too late for another
            service.forgiven = True
            if service.code:
                self.tell(service.describe())
        elif restarts is not None and (pause := restarts.take()) is not None:
            when = f" in {pause:g} s" if pause else ""
            self.tell(f"{service.describe()}; restarted{when} ({restarts.used} of {restarts.times})")
            self.returns(spec)
            service.forgiven = True  # the workers may have ended before it is back
            self._timers.after(pause, partial(self._bring_back, service))
        elif spec.role == "expert" and served:
            service.forgiven = True
            self.tell(f"{service.describe()}; the job continues without it")
        else:
            service.early = True
            if service.code == 0:
                self.tell(f"{service.describe()}: the script never called job.serve()")
            self._fail(service)

    def _bring_back(self, service: RoleProcess) -> None:
        """Restart a service whose pause is over, if it is still needed."""
        if not self._failed and not self.interrupted and _running(self.workers):
            successor = self.start(service.spec, service.restarted + 1)
            self.services[self.services.index(service)] = successor
            self._watch(successor)

    def _fail(self, process: RoleProcess) -> None:
        """End the job because of ``process``, after giving the others a moment to report."""
        if self._failed:
            return
        self._failed = True
        if self.members is not None:
            self.members.end(process)
        others = len(_running(self.workers))
        if others and not self._timers.has(id(self.workers)):
            count, other = f"{others} " if others > 1 else "", "other " if process.role == "worker" else ""
            self.tell(f"{process.who} failed; stopping the {count}{other}worker{'s' * (others > 1)}")
            self._send_after(self.workers, self.patience.failure, signal.SIGTERM)
            self._end_after(self.workers, self.patience.failure + self.patience.stop)

    def _stop_services(self) -> None:
        """Request that they finish, save and exit: no worker is left to call them.

        The second signal is for those that linger, because somebody from elsewhere is connected.
        """
        _send(self.services, signal.SIGTERM)
        self._send_after(self.services, _LINGER_SECONDS, signal.SIGTERM)
        failed = self._failed or self.timed_out
        self._end_after(self.services, self.patience.stop if failed else self.patience.drain)

    def _send_after(self, processes: Sequence[RoleProcess], seconds: float, number: signal.Signals) -> None:
        self._timers.after(seconds, partial(_send, processes, number), id(processes))

    def _end_after(self, processes: Sequence[RoleProcess], seconds: float, what: str = "did not stop in time") -> None:
        """Kill those that still run then; ``what`` says what they did."""
        self._timers.after(seconds, partial(self._kill, processes, what), id(processes))
        self._timers.after(seconds + _KERNEL_SECONDS, partial(self._give_up, processes), id(processes))

    def _kill(self, processes: Sequence[RoleProcess], what: str) -> None:
        for process in _running(processes):
            self.tell(f"{process.who} {what}; killing it")
        _send(processes, signal.SIGKILL)

    def _give_up(self, processes: Sequence[RoleProcess]) -> None:
        for process in _running(processes):
            self.tell(f"{process.who} (pid {process.pid}) does not die from SIGKILL: it hangs in the kernel")
            process.abandon()

    def _on_signal(self) -> None:
        for number, again in self.signals.take():
            if number == signal.SIGWINCH:
                if self.screen:
                    self.screen.fit()
            elif number == signal.SIGTSTP:
                self._pause()
            elif self.interrupted and not again:
                continue
            elif self.interrupted:
                self.tell(f"{number.name} again: killing the workers")
                for processes in (self.workers, self.services):
                    self._timers.clear(id(processes))
                    self._end_after(processes, 0.0, "did not stop")
            else:
                self.interrupted = number
                self.tell(f"{number.name}: stopping the workers (send it again to kill them)")
                if self.members is not None:
                    self.members.wait_no_longer()
                self._stop_workers(number, self.patience.drain)

    def _stop_workers(self, number: signal.Signals, patience: float) -> None:
        _send(self.workers, number)
        self._timers.clear(id(self.workers))
        self._end_after(self.workers, patience)

    def _pause(self) -> None:
        """Ctrl-Z: stop all processes, and this one, until the shell lets it continue; that time is nobody's."""
        for process in self._everyone():
            process.signal_group(signal.SIGSTOP)
        before = time.monotonic()
        signal_box.suspend()
        self._timers.postpone(time.monotonic() - before)
        if self.waits:
            self.waits.begin()
        for process in self._everyone():
            process.signal_group(signal.SIGCONT)
        if self.screen:
            self.screen.fit()

    def _look(self, waits: LongWaits) -> None:
        waits.check()
        self._timers.after(waits.every, partial(self._look, waits))

    def _look_at_members(self, members: Members) -> None:
        """Kill those that are frozen, let those leave that have closed, and let more join."""
        frozen, goes_on = members.frozen(self.services), self.interrupted is None and not self._failed
        for worker in frozen if goes_on else ():
            self.tell(f"{worker.who} (pid {worker.pid}) is frozen; killing it")
            worker.signal_group(signal.SIGKILL)
        members.leave_closed()
        while goes_on and (spec := members.one_more()) is not None:
            self.workers.append(self.start(spec, 0))
            self._await(self.workers[-1], members)
        self._timers.after(LOOK_SECONDS, partial(self._look_at_members, members))

    def _time_out(self) -> None:
        self.timed_out = True
        self._stop_workers(signal.SIGABRT, self.patience.stop)


def _running(processes: Sequence[RoleProcess]) -> list[RoleProcess]:
    return [process for process in processes if process.running]


def _send(processes: Sequence[RoleProcess], number: signal.Signals) -> None:
    for process in _running(processes):
        process.signal(number)
