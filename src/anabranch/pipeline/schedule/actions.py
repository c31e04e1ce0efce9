"""A rank's part in a step, as data: one ``Action`` after the other.

Index letters, here and in the whole package: ``i`` of ``m`` microbatches, ``j`` of ``n`` stages, ``r`` of ``p`` ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Action", "Kind", "PHASES"]


class Kind(StrEnum):
    """The kinds of action on a stage and microbatch.

    >>> Kind.F.value, Kind.SEND_F.computes
    ('F', False)
    """

    F = "F"  # forward
    B = "B"  # backward: of inputs and weights at once, or of the inputs alone where the schedule splits it
    W = "W"  # backward of the weights, where the schedule splits it
    R = "R"  # forward again, for a stage and microbatch that kept no activations
    SEND_F = "SF"  # an output, or skips, to a later stage
    RECV_F = "RF"
    SEND_B = "SB"  # their gradients, to the stage they came from
    RECV_B = "RB"

    @property
    def computes(self) -> bool:
        """True if it runs a stage rather than moving values between two."""
        return self in _COMPUTING


_COMPUTING = frozenset({Kind.F, Kind.B, Kind.W, Kind.R})


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank.

    >>> str(Action(Kind.F, 1, 0)), str(Action(Kind.SEND_F, 1, 0, 3))
    ('F1.0', 'SF1.0>3')

    Attributes:
        kind: the kind of action.
        stage: its stage.
        microbatch: its microbatch.
        peer: the stage at the other end, for actions that send or receive.
    """

    kind: Kind
    stage: int
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        text = f"{self.kind.value}{self.stage}.{self.microbatch}"
        if self.peer is None:
            return text
        arrow = ">" if self.kind in (Kind.SEND_F, Kind.SEND_B) else "<"
        return f"{text}{arrow}{self.peer}"


PHASES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight", Kind.R: "recompute"}
"""The names of computing actions in errors and events."""
