"""Simulates lists of actions: every rank runs its own in order, a receive after its send has arrived.

The runtime follows the same two rules: lists that end here end there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anabranch.pipeline.schedule.actions import Action, Kind

__all__ = ["Interval", "SimulatedRun"]


@dataclass(frozen=True, slots=True)
class Interval:
    """Start and end of a computing action, in the units of its costs."""

    action: Action
    start: float
    end: float


_SENT_AS = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}


class SimulatedRun:
    """One run of every rank's ``actions``.

    >>> clock = SimulatedRun([[Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)]], lambda action: 1.0)
    >>> clock.times, clock.stuck
    ([2.0], [])

    Args:
        actions: of each rank.
        cost: the time of an action; of one that sends, the time until it arrives.

    Attributes:
        times: the time at which each rank was done.
        intervals: the computing actions of each rank, in order.
        stuck: ranks that wait for one another for ever, each with the action that it waits in.
    """

    def __init__(self, actions: Sequence[Sequence[Action]], cost: Callable[[Action], float]) -> None:
        self._actions = actions
        self._cost = cost
        self._arrivals: dict[tuple[Kind, int, int, int], float] = {}
        self._done = [0] * len(actions)
        self.times = [0.0] * len(actions)
        self.intervals: list[list[Interval]] = [[] for _ in actions]
        while max([self._advance(rank) for rank in range(len(actions))], default=False):
            pass
        self.stuck = [
            f"rank {rank} at {todo[done]}"
            for rank, (todo, done) in enumerate(zip(actions, self._done, strict=True))
            if done < len(todo)
        ]

    def _advance(self, rank: int) -> bool:
        """Run the rank until it has to wait; true if it ran any action."""
        start = self._done[rank]
        for action in self._actions[rank][start:]:
            if not self._step(rank, action):
                break
            self._done[rank] += 1
        return self._done[rank] > start

    def _step(self, rank: int, action: Action) -> bool:
        now = self.times[rank]
        if action.kind.computes:
            self.times[rank] = now + self._cost(action)
            self.intervals[rank].append(Interval(action, now, self.times[rank]))
            return True
        assert action.peer is not None
        if action.kind in _SENT_AS:
            arrival = self._arrivals.get((_SENT_AS[action.kind], action.peer, action.stage, action.microbatch))
            if arrival is None:
                return False
            self.times[rank] = max(now, arrival)
            return True
        self._arrivals[action.kind, action.stage, action.peer, action.microbatch] = now + self._cost(action)
        return True
