"""Runs a schedule on paper: in what order, how long, how much idle, how many activations at once.

What the clock says here is what a pipeline of stages that take these times shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from anabranch.pipeline.actions import Action, Kind
from anabranch.pipeline.clock import Clock, Interval
from anabranch.pipeline.schedule import Lowered, Schedule

__all__ = ["Interval", "Simulation", "simulate"]


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
    clock = Clock(lowered.actions, _as_function(costs, lowered.schedule))
    if clock.stuck:
        raise ValueError(f"{lowered.schedule.name} never ends, its ranks wait for one another: {clock.stuck}")
    makespan = max(clock.times)
    busy = sum(interval.end - interval.start for row in clock.intervals for interval in row)
    return Simulation(
        tuple(map(tuple, clock.intervals)),
        makespan,
        1.0 - busy / (makespan * len(clock.times)) if makespan else 0.0,
        tuple(map(_peak_activations, lowered.actions)),
    )


def _as_function(
    costs: Mapping[Kind, float] | Callable[[Action], float] | None, schedule: Schedule
) -> Callable[[Action], float]:
    if costs is None:
        costs = {Kind.F: 1.0, Kind.B: 1.0 if schedule.splits_backward else 2.0, Kind.W: 1.0, Kind.R: 1.0}
    if isinstance(costs, Mapping):
        table = costs
        return lambda action: table.get(action.kind, 0.0)
    return costs


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
