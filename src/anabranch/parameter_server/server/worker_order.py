"""The order of the steps of a job's workers, and the pushes that wait for those of other workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from anabranch.parameter_server.messages import PushMessage

__all__ = ["CheckedPush", "Consistency", "WorkerOrder"]


@dataclass(frozen=True, slots=True)
class Consistency:
    """The order of the steps of a job's workers.

    >>> Consistency.parse("ssp:3").lag, Consistency.parse("bsp").merges, Consistency.parse("asp").lag
    (3, True, None)

    Attributes:
        merges: the pushes of a step are merged over the workers and applied at once (bsp).
        lag: steps that a worker may be ahead of the slowest; ``None`` for any.
    """

    name: str
    merges: bool
    lag: int | None

    @classmethod
    def parse(cls, name: str) -> Consistency:
        """Return the consistency called ``"bsp"``, ``"ssp:K"`` or ``"asp"``; anything else is a ``ValueError``."""
        name = name.lower() if isinstance(name, str) else name
        if name == "bsp":
            return cls(name, True, 0)
        if name == "asp":
            return cls(name, False, None)
        kind, _, steps = str(name).partition(":")
        if kind == "ssp" and steps.isascii() and steps.isdigit():
            return cls(name, False, int(steps))
        raise ValueError(f"consistency is 'bsp', 'asp' or 'ssp:K' with K steps, such as 'ssp:4', got {name!r}")


class CheckedPush(NamedTuple):
    """A push that ``check_push`` has checked."""

    message: PushMessage
    tensors: Sequence[Tensor]


@dataclass(slots=True)
class WorkerOrder:
    """The workers of a job: steps pushed by each, pushes that wait for the others', and merged pushes to release."""

    world: int
    consistency: Consistency
    clocks: list[int]
    pending: dict[int, dict[int, CheckedPush]] = field(default_factory=dict)
    held: dict[int, dict[int, CheckedPush]] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)  # squared, of the last steps; may be read after the release
    total: float | None = None  # the sum of the weights of the workers' pushes in the last step
