"""``Task``: one request, or a part of one, that waits in a pool and is computed in a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from anabranch.deadline import Deadline

__all__ = ["StateSeen", "Task"]


def _ignore(outcome: object) -> None:
    """Finish a task whose outcome is set in its future."""


class StateSeen(msgspec.Struct, eq=False):
    """The state of the expert that a request has met; apart from its task, whose inputs an answer must not keep.

    Attributes:
        changes: how often the expert had changed before it was the one that the outputs belong to; of parts the latest.
        changed: the request's own forward has changed the expert.
    """

    changes: int = 0
    changed: bool = False

    def note(self, changes: int, *, changed: bool = False) -> None:
        """Note what the request, or a part of it, has met."""
        self.changes = max(self.changes, changes)
        self.changed |= changed


class Task(msgspec.Struct, eq=False):
    """One request, or a part of one that was too large for a batch.

    Attributes:
        inputs: the tensors, agreeing in rows (dim 0).
        rows: the number of rows.
        deadline: after it the answer is useless.
        finish: called once, with the outputs or the error, on the thread that has it; again with the error, if it
            raised one.
        unwanted: returns true if the caller has gone; called before compute, and may abandon the request for good.
        arrived: arrival time, in ``time.monotonic`` seconds.
        nbytes: bytes of the inputs.
        ticket: the name of the activations that ``process_tasks`` keeps for it, or has kept.
        copied: the event of the inputs' arrival on the pool's device; ``None`` without a copy in progress.
        evaluating: run in eval mode; only tasks of one mode share a batch.
        updates: a backward that updates the parameters; only those share a batch that do, or that do not.
        sizes: those dimensions of the inputs that tasks of one batch must have in common.
        length: the size of the dimension that is padded to the longest of a batch; 0 for none.
        caller: its name; callers take turns. Empty: served in the order of arrival.
        priority: tasks of a higher one run first.
        seen: what it, or a part of it, has met.
    """

    inputs: Sequence[Tensor | None]
    rows: int
    deadline: Deadline
    finish: Callable[[Sequence[Tensor | None] | BaseException], None] = _ignore
    unwanted: Callable[[], bool] = lambda: False
    arrived: float = msgspec.field(default_factory=time.monotonic)
    ticket: bytes = b""
    copied: torch.cuda.Event | None = None
    nbytes: int = 0
    evaluating: bool = False
    updates: bool = True
    sizes: tuple[int, ...] = ()
    length: int = 0
    caller: str = ""
    priority: int = 0
    seen: StateSeen = msgspec.field(default_factory=StateSeen)

    @property
    def group(self) -> tuple[bool, bool, tuple[int, ...]]:
        """The mode and sizes that the tasks of one batch have in common."""
        return self.evaluating, self.updates, self.sizes

    def __post_init__(self) -> None:
        for tensor in self.inputs:
            if tensor is not None:
                self.nbytes += tensor.nbytes
