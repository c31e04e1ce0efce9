"""A pipeline's schedule as it was planned and as it ran, from the actions of a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

Action: TypeAlias = tuple[int, int, int, str, float, float]
"""Step, stage, microbatch, phase, start and duration."""

Key: TypeAlias = tuple[int, int, str]
"""Stage, microbatch and phase."""

Simulate: TypeAlias = Callable[[Mapping[int, Sequence[Key]]], Mapping[Key, tuple[float, float]]]
"""Returns start and duration of each action, from the order of each stage's actions."""

_MOST_STEPS = 50


def schedules_of(actions: Iterable[Action], simulate: Simulate) -> list[dict[str, Any]]:
    """Return the schedule of each step: rows of stages, each with microbatch, phase, start and duration.

    Of a step that accumulates several runs it is that of the first.

    ``ran`` is in microseconds from the step's first action; ``planned`` has each stage's actions in the same order, in
    units of a forward, as they lie where every forward takes one, every backward two, and nothing waits for a network.
    """
    steps: dict[int, list[Action]] = {}
    for action in actions:
        if action[0] in steps or len(steps) < _MOST_STEPS:
            steps.setdefault(action[0], []).append(action)
    return [_of_step(step, found, simulate) for step, found in sorted(steps.items())]


def _of_step(step: int, actions: list[Action], simulate: Simulate) -> dict[str, Any]:
    first = min(start for *_, start, _ in actions)
    orders: dict[int, list[Key]] = {}
    ran: dict[int, list[list[Any]]] = {}
    seen: set[Key] = set()
    for _, stage, microbatch, phase, start, duration in sorted(actions, key=lambda action: action[4]):
        if (stage, microbatch, phase) in seen:
            continue
        seen.add((stage, microbatch, phase))
        orders.setdefault(stage, []).append((stage, microbatch, phase))
        ran.setdefault(stage, []).append([microbatch, phase, round(start - first, 2), round(duration, 2)])
    stages = sorted(orders)
    plan = simulate(orders)
    return {
        "step": step,
        "stages": stages,
        "ran": [ran[stage] for stage in stages],
        "planned": [[[key[1], key[2], *plan[key]] for key in orders[stage] if key in plan] for stage in stages],
    }
