"""Simulates a schedule: its order, its time, the idle part, and the activations held at once.

A pipeline of stages that take these times behaves as the clock shows here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from anabranch.pipeline.schedule.schedule import Action, Interval, Kind, Lowered, Schedule, SimulatedRun


@dataclass(frozen=True, slots=True)
class Simulation:
    """Results of simulating a schedule.

    Attributes:
        intervals: the computing actions of each rank, in order.
        makespan: from the first action to the end of the last.
        bubble: the idle part of all ranks' time, from 0 to 1.
        peak_activations: for each rank the most (stage, microbatch) whose activations it held at once.
        peak_bytes: the most bytes of them, and of inputs kept to run forward again; zeros where no bytes were given.
    """

    intervals: tuple[tuple[Interval, ...], ...]
    makespan: float
    bubble: float
    peak_activations: tuple[int, ...]
    peak_bytes: tuple[int, ...]


def simulate(
    schedule: Schedule | Lowered,
    costs: Mapping[Kind, float] | Callable[[Action], float] | None = None,
    *,
    activation_bytes: Sequence[int] = (),
    input_bytes: Sequence[int] = (),
) -> Simulation:
    """Simulate ``schedule``.

    >>> from anabranch.pipeline import make_schedule
    >>> simulate(make_schedule("1F1B", 2, 4)).makespan
    15.0

    Args:
        schedule: as made, or as lowered for a pipeline.
        costs: the time of each kind of action, or of each action; 0 for those left out. A send's cost is the
            time until it arrives, its rank goes on at once. By default F takes 1, B 2, or B and W 1 each, R 1.
        activation_bytes: the bytes of a microbatch's activations in each stage.
        input_bytes: the bytes of a microbatch's input that a stage keeps to run forward again.

    Raises:
        ValueError: it never ends; names the actions that wait for one another. Or bytes not given for every stage.
    """
    stages = (schedule if isinstance(schedule, Schedule) else schedule.schedule).stages
    for sizes in (activation_bytes, input_bytes):
        if len(sizes) not in (0, stages):
            raise ValueError(
                f"bytes were given for {len(sizes)} stages, but the schedule has {stages}; give one value each"
            )
    lowered = schedule.with_transfers() if isinstance(schedule, Schedule) else schedule
    clock = SimulatedRun(lowered.actions, _as_function(costs, lowered.schedule))
    if clock.stuck:
        raise ValueError(f"{lowered.schedule.name} never ends because its ranks wait for each other: {clock.stuck}")
    makespan = max(clock.times)
    busy = sum(interval.end - interval.start for row in clock.intervals for interval in row)
    return Simulation(
        tuple(map(tuple, clock.intervals)),
        makespan,
        1.0 - busy / (makespan * len(clock.times)) if makespan else 0.0,
        tuple(_peak(actions, [1] * stages, [0] * stages) for actions in lowered.actions),
        tuple(
            _peak(actions, activation_bytes or [0] * stages, input_bytes or [0] * stages) for actions in lowered.actions
        ),
    )


def _as_function(
    costs: Mapping[Kind, float] | Callable[[Action], float] | None, schedule: Schedule
) -> Callable[[Action], float]:
    if costs is None:
        costs = {
            Kind.F: 1.0,
            Kind.B: 1.0 if schedule.splits_backward else 2.0,
            Kind.W: 1.0,
            Kind.R: 1.0,
        }
    if isinstance(costs, Mapping):
        table = costs
        return lambda action: table.get(action.kind, 0.0)
    return costs


def _peak(actions: Sequence[Action], activations: Sequence[int], inputs: Sequence[int]) -> int:
    """Return the most that a rank holds at once, by the stages' sizes."""
    frees = Kind.W if any(action.kind is Kind.W for action in actions) else Kind.B
    recomputed = {(action.stage, action.microbatch) for action in actions if action.kind is Kind.R}
    held = peak = 0
    for action in actions:
        j, again = action.stage, (action.stage, action.microbatch) in recomputed
        match action.kind:
            case Kind.F:
                held += inputs[j] if again else activations[j]
            case Kind.R:
                held += activations[j]
            case kind if kind is frees:
                held -= activations[j] + (inputs[j] if again else 0)
        peak = max(peak, held)
    return peak
