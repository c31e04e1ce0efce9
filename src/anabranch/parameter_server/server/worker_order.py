"""The order of a job's steps on a shard: what is held of each, and when it is applied.

A step of ``bsp`` is *held* until every worker's push of it is here, and until every worker has *released* it: only
then is it *applied*, and the shards apply the same steps although none of them talks to another::

    push, held ──> push, held ──> all shards have all pushes, the workers vote ──> released by each ──> applied
                                                                     └ dropped, if any shard refused a push

Every message of a worker carries its ``WorkerProgress``, which releases the steps that it has the outcome of. A worker
that has one may die before its message; so the steps that it releases stay as they are, and whoever goes on decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from anabranch.errors import NonFinite, Overloaded, SchemaError
from anabranch.parameter_server.messages import WorkerProgress
from anabranch.parameter_server.server.requests import RowRequest


@dataclass(frozen=True, slots=True)
class Consistency:
    """The order of the steps of a job's workers.

    >>> [Consistency.parse(mode).lag for mode in ("bsp", "ssp:3", "asp")]
    [0, 3, None]

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


@dataclass(slots=True)
class HeldStep:
    """The workers' pushes of one step, by rank, until it is applied.

    Attributes:
        world: how many there will be.
        waits: it is applied only once released.
        norm: their squared norm, once it was asked for.
    """

    world: int
    waits: bool
    pushes: dict[int, RowRequest] = field(default_factory=dict)
    norm: float | None = None

    @property
    def complete(self) -> bool:
        """True if every worker's push is here."""
        return len(self.pushes) == self.world

    def in_order(self) -> list[RowRequest]:
        """Return the pushes in the order of ranks."""
        return [self.pushes[rank] for rank in sorted(self.pushes)]


class WorkerOrder:
    """The workers of a job on one shard.

    Attributes:
        number, world: of the membership.
        clocks: by rank, the steps that it has pushed.
        released: by rank, the steps that it has the outcome of.
        applied: the steps that are applied or dropped (bsp).
        moved: those of them up to the last one that was applied; members of a later number may do the others again.
        gone: ranks that no read waits for (ssp): closed, lost, or not heard yet under this number.
        held: by step.
        scales: the factors of released steps that are to be applied.
        turn: the one that is furthest, of all that were heard; at least that of the last held step that is done.
        total: the sum of the weights of the workers' pushes in the last step.
        broken: why no step may follow, if the last one failed after it had begun.
    """

    def __init__(self, world: int, consistency: Consistency, step: int = 0, number: int = 0) -> None:
        self.number, self.world, self.consistency = number, world, consistency
        self.clocks, self.released, self.applied, self.moved = [step] * world, [step] * world, step, step
        self.gone: set[int] = set()
        self.held: dict[int, HeldStep] = {}
        self.scales: dict[int, float] = {}
        self.turn = WorkerProgress(number, world, step)
        self.total: float | None = None
        self.broken = ""

    def check_whole(self) -> None:
        """Raise ``Overloaded`` if a step was applied in part: it must not be applied again, nor another."""
        if self.broken:
            raise Overloaded(f"{self.broken}, as this server lacked memory; restart it, and the job from a checkpoint")

    def check_number(self, number: int) -> None:
        """Raise ``SchemaError`` for the number of an older membership."""
        if number < self.number:
            raise SchemaError(f"a message of membership {number} of the workers; they are at {self.number}")

    def join(self, rank: int, step: int, number: int) -> None:
        """Count the steps of ``rank`` from ``step``; what others hold from there on stays, as they may be ahead."""
        self.number, self.applied, self.moved = number, step, step
        self.gone.discard(rank)
        self.clocks[rank] = self.released[rank] = step
        self.scales.clear()
        self.turn = WorkerProgress(number, self.world, step)
        for held in self.held.values():
            held.pushes.pop(rank, None)
            held.norm = None
        self.held = {at: held for at, held in self.held.items() if at >= step and held.pushes}

    def hear(self, rank: int, turn: WorkerProgress) -> None:
        """Take note of how far a worker is.

        Raises:
            SchemaError: it is of a lower number, or says another number of workers.
            NonFinite: a scale that is NaN or Inf.
        """
        if not (math.isfinite(turn.scale) and turn.scale >= 0):
            raise NonFinite(f"a scale is a finite number >= 0, got {turn.scale}")
        self.check_number(turn.number)
        if turn.number > self.number:
            self.number, self.world = turn.number, turn.world
            self.clocks, self.released = [turn.done] * turn.world, [0] * turn.world
            if not self.consistency.merges:  # each is at a step of its own
                self.clocks, self.gone = [0] * turn.world, {*range(turn.world)}
            # The members do these steps again, others than before with other samples, and may drop what was released.
            self.held = {step: held for step, held in self.held.items() if step < turn.done}
            self.applied = max(self.moved, min(self.applied, turn.done))
            self.scales.clear()  # also of earlier steps: a restarted shard may have heard what was never the result
        if turn.world != self.world or rank >= self.world:
            raise SchemaError(f"this job has {self.world} workers; rank {rank} says {turn.world}")
        if rank in self.gone:
            self.gone.discard(rank)
            self.clocks[rank] = max(self.clocks[rank], turn.done)
        self.released[rank] = max(self.released[rank], turn.done)
        if turn.last >= self.applied:
            self.scales[turn.last] = turn.scale
        if turn.done >= self.turn.done or turn.number > self.turn.number:
            self.turn = turn

    @property
    def slowest(self) -> int:
        """The steps that every worker has pushed."""
        return min((clock for rank, clock in enumerate(self.clocks) if rank not in self.gone), default=max(self.clocks))

    def hold(self, push: RowRequest) -> HeldStep:
        """Keep a worker's push of its next step."""
        message = push.message
        step = self.held.setdefault(message.step, HeldStep(self.world, message.merging.hold))
        step.pushes[message.rank] = push
        self.clocks[message.rank] = message.step + 1
        return step

    def due(self) -> tuple[HeldStep | None, float | None] | None:
        """Return the next step, if it is to be applied now, and its scale; ``None`` as the scale drops it.

        Raises:
            SchemaError: it was released, and not all pushes are here.
        """
        held = self.held.get(self.applied)
        if held is not None and held.complete and not held.waits:
            return held, 1.0
        if min(self.released) <= self.applied:
            return None
        scale = self.scales.get(self.applied)
        if scale is not None and (held is None or not held.complete):
            raise SchemaError(f"step {self.applied} was released, but not every worker's push of it is on this shard")
        return held, scale

    def past(self, step: int, scale: float | None) -> None:
        """Go on to the step after ``step``, and over those that are dropped and never came here."""
        held = self.held.pop(step, None)
        if held is not None and held.waits and self.turn.done <= step:  # the log has the step, and no word of a release
            last, scale = (self.turn.last, self.turn.scale) if scale is None else (step, scale)
            self.turn = WorkerProgress(self.number, self.world, step + 1, last, scale)
        if held is not None:
            self.total = sum(push.message.merging.weight for push in held.pushes.values()) or self.total
        if scale is not None:
            self.moved = step + 1
        self.scales.pop(step, None)
        self.applied = max(step + 1, min([*self.held, *self.scales, *self.released]))

    def late(self, step: int) -> list[int]:
        """Return the ranks that a read at ``step`` waits for."""
        if not self.consistency.merges:
            return [rank for rank, clock in enumerate(self.clocks) if clock < step and rank not in self.gone]
        if self.applied >= step:
            return []
        held = self.held.get(self.applied)
        if held is None or not held.complete:
            return [rank for rank in range(self.world) if held is None or rank not in held.pushes]
        return [rank for rank, done in enumerate(self.released) if done <= self.applied]
