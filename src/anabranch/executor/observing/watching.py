"""``Watching``: reports each step, checkpoint, lost peer and restart to an executor's sinks and callbacks.

First the records that callbacks get.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import TypeAlias

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from anabranch.checkpoint.storage import Place
from anabranch.errors import PeerLost, RolledBack
from anabranch.executor.observing.run_facts import RunFacts
from anabranch.executor.observing.sinks import Sink, SinkFeed


@dataclass(frozen=True, slots=True)
class StepRecord:
    """An optimizer step that was taken.

    Attributes:
        step: the number of optimizer steps taken so far, from 1; ``executor.step``.
        name: the ``TrainStep``'s.
        rows: rows of this worker's batch.
        seconds: of the run that ended with the step.
        learning_rates: those that the step was taken with, one per parameter group, in the optimizers' order.
        values: the result of ``run``: ``"loss"`` and the fetched values, as tensors, on their device.
    """

    step: int
    name: str
    rows: float
    seconds: float
    learning_rates: tuple[float, ...]
    values: Mapping[str, Tensor] = field(repr=False)


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """A checkpoint that was completely written.

    Attributes:
        step: optimizer steps taken so far.
        path: the directory.
        seconds: the time of saving; in the background, until it was known to be written.
    """

    step: int
    path: Place
    seconds: float


@dataclass(frozen=True, slots=True)
class PeerLostRecord:
    """A worker or server that died, froze or closed the connection; the ``PeerLost`` is raised next.

    Attributes:
        step: optimizer steps taken so far.
        peer: a rank or an endpoint, as the error names it.
        operation: the operation in progress.
        message: the error's text.
    """

    step: int
    peer: str | None
    operation: str | None
    message: str


@dataclass(frozen=True, slots=True)
class RestartRecord:
    """The job continues after a restart: of the whole job, from a checkpoint, or of a server that lost changes.

    Attributes:
        step: optimizer steps taken so far: those of the checkpoint.
        attempt: how often the job was restarted; 0 where a server was.
        path: the checkpoint's directory; ``None`` where a server was restarted.
        peer: the server; ``None`` where the job was restarted. ``RolledBack`` is raised next.
        lost: pushes of this worker that the server has lost.
    """

    step: int
    attempt: int = 0
    path: Place | None = None
    peer: str | None = None
    lost: int = 0


@dataclass(frozen=True, slots=True)
class MembershipRecord:
    """The job goes on with other workers than before.

    Attributes:
        step: optimizer steps taken so far.
        rank: this worker's from now on, which may have been another.
        world_size: how many workers there are now.
        left: the ranks that those who left had before.
        joined: the ranks of those who are new.
    """

    step: int
    rank: int
    world_size: int
    left: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()


Record: TypeAlias = StepRecord | SaveRecord | PeerLostRecord | RestartRecord | MembershipRecord


class Subscription(AbstractContextManager["Subscription"]):
    """One callback given to ``Executor.on``; a context manager that removes it on exit.

    >>> subscriptions = []
    >>> with Subscription(subscriptions, print):
    ...     len(subscriptions)
    1
    >>> subscriptions
    []
    """

    def __init__(self, listed: list[Subscription], function: Callable[..., object]) -> None:
        self._listed = listed
        self.function = function
        listed.append(self)

    def remove(self) -> None:
        """Remove the callback. Does nothing the second time."""
        if self in self._listed:
            self._listed.remove(self)

    def __exit__(self, *_: object) -> None:
        self.remove()


_EVENTS = ("step", "save", "peer_lost", "restart", "membership")


def rates_of(optimizers: Iterable[Optimizer]) -> tuple[float, ...]:
    """Return the learning rate of each parameter group, in order."""
    return tuple(float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group)


class Watching:
    """The sinks, callbacks and reports of one executor.

    Args:
        sinks: get numbers and events, once ``begin`` has said on which rank this is.
        prefixed: metrics begin with their step's name, because the executor has several steps.

    Attributes:
        subscriptions: the callbacks of each event, in their order.
        active: there was something to report a step to.
        facts: written for a launcher, if there is one.
    """

    def __init__(self, sinks: Iterable[Sink], *, prefixed: bool) -> None:
        self.subscriptions: dict[str, list[Subscription]] = {event: [] for event in _EVENTS}
        self._sinks = tuple(sinks)
        self._feed = SinkFeed(self._sinks, 0)
        self._prefixed = prefixed
        self._reported = {"loss", "grad_norm", "learning_rate", "steps_per_second", "rows_per_second"}
        self.facts: RunFacts | None = None
        self.active = False

    def on(self, event: str, fn: Callable[..., object]) -> Subscription:
        """Call ``fn(record)`` at each ``event`` from now on.

        Raises:
            ValueError: no such event.
            TypeError: ``fn`` cannot be called.
        """
        if event not in self.subscriptions:
            raise ValueError(f"the events of an Executor are {', '.join(map(repr, _EVENTS))}, got {event!r}")
        if not callable(fn):
            raise TypeError(f"the callback for {event!r} is a function of one record, got {fn!r}")
        self.active = True
        return Subscription(self.subscriptions[event], fn)

    def _call(self, event: str, record: Record) -> None:
        """Call the callbacks in the order of their subscriptions; the first error is raised to the caller."""
        for subscription in tuple(self.subscriptions[event]):
            try:
                subscription.function(record)
            except BaseException as error:
                name = getattr(subscription.function, "__qualname__", repr(subscription.function))
                error.add_note(f"raised by {name}, which executor.on({event!r}, ...) had called with {record}")
                raise

    def begin(self, rank: int, facts: RunFacts | None) -> None:
        """Start to report to the sinks of this rank, and write ``facts`` if a launcher wants them."""
        self._feed.flush()
        if facts is not None:
            facts.rank = rank
        self._feed = SinkFeed(self._sinks if facts is None else (*self._sinks, facts), rank)
        self.facts, self.active = facts, self.active or not self._feed.idle

    @property
    def of_steps(self) -> bool:
        """True if the next step is reported to anything."""
        return bool(self.subscriptions["step"]) or self._feed.due

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Pass on the user's numbers at once."""
        if not isinstance(values, Mapping):
            raise TypeError(f"log takes a dict of numbers by name, such as {{'accuracy': 0.9}}, got {values!r}")
        numbers: dict[str, float] = {}
        for name, value in values.items():
            if isinstance(value, Tensor) and _single(value):
                value = value.item()
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise TypeError(f"log takes numbers and tensors of one element, got {name}={value!r}")
            if name in self._reported:
                raise ValueError(f"{name!r} is a name that the step reports itself; log it under another one")
            numbers[str(name)] = float(value)
        self._feed.log(step, numbers)

    def stepped(self, record: StepRecord, numbers: Mapping[str, object]) -> None:
        """Report an optimizer step; sinks get the ``numbers`` that have one element."""
        if not self._feed.idle:
            prefix = f"{record.name}/" if self._prefixed else ""
            values: dict[str, Tensor | float] = {
                prefix + name: value for name, value in numbers.items() if isinstance(value, Tensor) and _single(value)
            }
            values.update((prefix + name, rate) for name, rate in _named_rates(record.learning_rates))
            self._reported.update(values)
            self._feed.step(record.step, values, record.rows)
        self._call("step", record)

    def met(self, record: MembershipRecord) -> None:
        """Report another membership."""
        self.begin(record.rank, self.facts)
        self._report("membership", record)

    def saved(self, record: SaveRecord) -> None:
        """Report a checkpoint."""
        self._report("save", record)

    def loaded(self, step: int, path: Place) -> None:
        """Report a restart if this job was restarted and has now loaded its checkpoint."""
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
        if attempt:
            self._report("restart", RestartRecord(step, attempt, path))

    def failed(self, error: BaseException, step: int) -> None:
        """Report a lost peer, or a server that lost changes, if ``error`` is one of these."""
        if isinstance(error, PeerLost):
            self._report("peer_lost", PeerLostRecord(step, error.peer, error.operation, str(error)))
        elif isinstance(error, RolledBack):
            self._report("restart", RestartRecord(step, peer=error.peer, lost=error.lost))

    def _report(self, event: str, record: Record) -> None:
        if not self._feed.idle:
            facts = {key: str(value) if isinstance(value, Place) else value for key, value in asdict(record).items()}
            self._feed.event(event, facts)
        self._call(event, record)

    def close(self) -> None:
        """Flush and close the sinks."""
        self._feed.close()


def _single(value: Tensor) -> bool:
    return value.numel() == 1 and not value.is_complex() and not value.is_sparse and value.device.type != "meta"


def _named_rates(rates: tuple[float, ...]) -> list[tuple[str, float]]:
    if len(rates) == 1:
        return [("learning_rate", rates[0])]
    return [(f"learning_rate/{index}", rate) for index, rate in enumerate(rates)]
