"""A pipeline's schedule as it was planned and as it ran, from the actions of a trace."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

__all__ = ["Action", "planned", "schedules_of"]

Action: TypeAlias = tuple[int, int, int, str, float, float]
"""Step, stage, microbatch, phase, start and duration."""

_COSTS = {"forward": 1.0, "recompute": 1.0, "backward": 2.0, "weight": 1.0}
_MOST_STEPS = 50
_Key: TypeAlias = tuple[int, int, str]


def schedules_of(actions: Iterable[Action]) -> list[dict[str, Any]]:
    """Return the schedule of each step: rows of stages, each with microbatch, phase, start and duration.

    Of a step that accumulates several runs it is that of the first.

    ``ran`` is in microseconds from the step's first action; ``planned`` has each stage's actions in the same order, in
    units of a forward, as they lie where every forward takes one, every backward two, and nothing waits for a network.
    """
    steps: dict[int, list[Action]] = {}
    for action in actions:
        if action[0] in steps or len(steps) < _MOST_STEPS:
            steps.setdefault(action[0], []).append(action)
    return [_of_step(step, found) for step, found in sorted(steps.items())]


def _of_step(step: int, actions: list[Action]) -> dict[str, Any]:
    first = min(start for *_, start, _ in actions)
    orders: dict[int, list[_Key]] = {}
    ran: dict[int, list[list[Any]]] = {}
    seen: set[_Key] = set()
    for _, stage, microbatch, phase, start, duration in sorted(actions, key=lambda action: action[4]):
        if (stage, microbatch, phase) in seen:
            continue
        seen.add((stage, microbatch, phase))
        orders.setdefault(stage, []).append((stage, microbatch, phase))
        ran.setdefault(stage, []).append([microbatch, phase, round(start - first, 2), round(duration, 2)])
    stages = sorted(orders)
    plan = planned(orders)
    return {
        "step": step,
        "stages": stages,
        "ran": [ran[stage] for stage in stages],
        "planned": [[[key[1], key[2], *plan[key]] for key in orders[stage] if key in plan] for stage in stages],
    }


def planned(orders: Mapping[int, list[_Key]]) -> dict[_Key, tuple[float, float]]:
    """Return start and duration of each action, run in each stage's order once its inputs are available.

    A forward needs that of the previous stage, a backward that of the next stage.

    >>> orders = {0: [(0, 0, "forward"), (0, 0, "backward")], 1: [(1, 0, "forward"), (1, 0, "backward")]}
    >>> planned(orders)[0, 0, "backward"]
    (4.0, 2.0)
    """
    stages = sorted(orders)
    neighbours = {
        "forward": dict(zip(stages[1:], stages, strict=False)),
        "backward": dict(itertools.pairwise(stages)),
    }
    known = {key for order in orders.values() for key in order}
    done: dict[_Key, tuple[float, float]] = {}
    free = dict.fromkeys(stages, 0.0)
    following = dict.fromkeys(stages, 0)
    moved = True
    while moved:
        moved = False
        for stage in stages:
            while following[stage] < len(orders[stage]):
                key = orders[stage][following[stage]]
                needed = neighbours.get(key[2], {}).get(stage)
                source = None if needed is None else (needed, key[1], key[2])
                if source in known and source not in done:
                    break
                ready = sum(done[source]) if source in done else 0.0
                cost = _COSTS.get(key[2], 1.0)
                done[key] = max(free[stage], ready), cost
                free[stage] = done[key][0] + cost
                following[stage] += 1
                moved = True
    return done
