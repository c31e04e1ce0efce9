"""Runs a schedule on paper: in what order, how long, how much idle, how many activations at once.

Every rank runs its list in order; a receive waits for its send; that is the whole model, and the whole runtime. So a
schedule that ends here ends there, and what the clock says here is what a pipeline of stages that take these times
shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from anabranch.pipeline.actions import Action, Kind
from anabranch.pipeline.schedule import Lowered, Schedule

__all__ = ["Interval", "Simulation", "simulate"]


@dataclass(frozen=True, slots=True)
class Interval:
    """When a computing action ran, in the units of its costs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """What came of a schedule.

    Attributes:
        intervals: the computing actions of each rank, in order.
        makespan: from the first action to the end of the last.
        bubble: the idle part of all ranks' time, from 0 to 1.
        peak_activations: for each rank the most (stage, microbatch) whose activations it held at once.
    """

    intervals: tuple[tuple[Interval, ...], ...]
    makespan: float
    bubble: float
    peak_activations: tuple[int, ...]


def simulate(
    schedule: Schedule | Lowered, costs: Mapping[Kind, float] | Callable[[Action], float] | None = None
) -> Simulation:
    """Runs ``schedule`` on paper.

    >>> from anabranch.pipeline import make_schedule
    >>> simulate(make_schedule("1F1B", 2, 4)).makespan
    15.0

    Args:
        schedule: as made, or as lowered for a pipeline.
        costs: the time of each kind of action, or of each action; what is left out takes none. A send's cost is the
            time until it arrives, its rank goes on at once. By default F takes 1, B 2, or B and W 1 each, R 1.

    Raises:
        ValueError: it never ends; names the actions that wait for one another.
    """
    lowered = schedule.with_transfers() if isinstance(schedule, Schedule) else schedule
    return _Run(lowered, _as_function(costs, lowered.schedule)).run()


def _as_function(
    costs: Mapping[Kind, float] | Callable[[Action], float] | None, schedule: Schedule
) -> Callable[[Action], float]:
    if costs is None:
        costs = {Kind.F: 1.0, Kind.B: 1.0 if schedule.splits_backward else 2.0, Kind.W: 1.0, Kind.R: 1.0}
    if isinstance(costs, Mapping):
        table = costs
        return lambda action: table.get(action.kind, 0.0)
    return costs


_SENT_AS = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}


class _Run:
    def __init__(self, lowered: Lowered, cost: Callable[[Action], float]) -> None:
        self._lowered = lowered
        self._cost = cost
        self._arrivals: dict[tuple[Kind, int, int, int], float] = {}
        self._clock = [0.0] * len(lowered.actions)
        self._done = [0] * len(lowered.actions)
        self._intervals: list[list[Interval]] = [[] for _ in lowered.actions]

    def run(self) -> Simulation:
        moved = True
        while moved:
            moved = max([self._advance(rank) for rank in range(len(self._done))])
        stuck = [
            f"rank {rank} at {actions[done]}"
            for rank, (actions, done) in enumerate(zip(self._lowered.actions, self._done, strict=True))
            if done < len(actions)
        ]
        if stuck:
            raise ValueError(f"{self._lowered.schedule.name} never ends, its ranks wait for one another: {stuck}")
        makespan = max(self._clock)
        busy = sum(interval.end - interval.start for row in self._intervals for interval in row)
        return Simulation(
            tuple(map(tuple, self._intervals)),
            makespan,
            1.0 - busy / (makespan * len(self._done)) if makespan else 0.0,
            tuple(map(_peak_activations, self._lowered.actions)),
        )

    def _advance(self, rank: int) -> bool:
        """Runs the rank until it has to wait; whether it got anywhere."""
        start = self._done[rank]
        for action in self._lowered.actions[rank][start:]:
            if not self._step(rank, action):
                break
            self._done[rank] += 1
        return self._done[rank] > start

    def _step(self, rank: int, action: Action) -> bool:
        now = self._clock[rank]
        if action.kind.computes:
            self._clock[rank] = now + self._cost(action)
            self._intervals[rank].append(Interval(action, now, self._clock[rank]))
            return True
        assert action.peer is not None
        if action.kind in _SENT_AS:
            arrival = self._arrivals.get((_SENT_AS[action.kind], action.peer, action.stage, action.microbatch))
            if arrival is None:
                return False
            self._clock[rank] = max(now, arrival)
            return True
        self._arrivals[action.kind, action.stage, action.peer, action.microbatch] = now + self._cost(action)
        return True


def _peak_activations(actions: tuple[Action, ...]) -> int:
    frees = Kind.W if any(action.kind is Kind.W for action in actions) else Kind.B
    recomputed = {(action.stage, action.microbatch) for action in actions if action.kind is Kind.R}
    held = peak = 0
    for action in actions:
        kept = (action.stage, action.microbatch) not in recomputed
        if action.kind is Kind.R or (action.kind is Kind.F and kept):
            held += 1
        elif action.kind is frees:
            held -= 1
        peak = max(peak, held)
    return peak
