"""The records that the user's callbacks get, and a callback's ``Subscription``."""

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
