"""``Executor.on``: the user's callbacks for events, and the records they get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from anabranch.checkpoint.storage import Place


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
        lost: pushes of this worker that the server has lost; ``None`` if the number is unknown.
    """

    step: int
    attempt: int = 0
    path: Place | None = None
    peer: str | None = None
    lost: int | None = 0


Record: TypeAlias = StepRecord | SaveRecord | PeerLostRecord | RestartRecord

_EVENTS = ("step", "save", "peer_lost", "restart")


class Subscription(AbstractContextManager["Subscription"]):
    """One callback given to ``Executor.on``; a context manager that removes it on exit.

    >>> called = []
    >>> callbacks = Callbacks()
    >>> with callbacks.on("restart", called.append):
    ...     callbacks.call("restart", RestartRecord(step=3, attempt=1))
    >>> callbacks.call("restart", RestartRecord(step=4, attempt=2))
    >>> [record.step for record in called]
    [3]
    """

    def __init__(self, listed: list[Subscription], function: Callable[..., object]) -> None:
        self._listed = listed
        self.function = function

    def remove(self) -> None:
        """Remove the callback. Does nothing the second time."""
        if self in self._listed:
            self._listed.remove(self)

    def __exit__(self, *_: object) -> None:
        self.remove()


class Callbacks:
    """The functions of one executor, by event.

    Attributes:
        listed: the subscriptions of each event, in their order.
    """

    def __init__(self) -> None:
        self.listed: dict[str, list[Subscription]] = {event: [] for event in _EVENTS}

    def on(self, event: str, fn: Callable[..., object]) -> Subscription:
        """Call ``fn(record)`` at each ``event`` from now on.

        Raises:
            ValueError: no such event.
            TypeError: ``fn`` cannot be called.
        """
        if event not in self.listed:
            raise ValueError(f"the events of an Executor are {', '.join(map(repr, _EVENTS))}, got {event!r}")
        if not callable(fn):
            raise TypeError(f"the callback for {event!r} is a function of one record, got {fn!r}")
        subscription = Subscription(self.listed[event], fn)
        self.listed[event].append(subscription)
        return subscription

    def call(self, event: str, record: Record) -> None:
        """Call the callbacks in registration order; the first error is raised to the caller."""
        for subscription in tuple(self.listed[event]):
            try:
                subscription.function(record)
            except BaseException as error:
                name = getattr(subscription.function, "__qualname__", repr(subscription.function))
                error.add_note(f"raised by {name}, which executor.on({event!r}, ...) had called with {record}")
                raise
