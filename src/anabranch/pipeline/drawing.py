"""Schedules as text and as a picture: time to the right, a row per rank, a colour per stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from anabranch.pipeline.schedule import (
    PHASES,
    Action,
    Interval,
    Kind,
    Schedule,
    Simulation,
    makespan_and_bubble,
    run_on_clock,
    simulate,
    usual_costs,
)

Costs = Mapping[Kind, float] | Callable[[Action], float] | None


def draw(schedule: Schedule, costs: Costs = None) -> str:
    """Return the schedule as text: a letter and a microbatch for each unit of time, dots where a rank is idle.

    >>> from anabranch.pipeline import make_schedule
    >>> print(draw(make_schedule("1F1B", 2, 2)))
    1F1B: 2 stages, 2 microbatches, 33 % bubble
    rank 0   F0 F1 .. .. B0 B0 .. B1 B1   holds 2
    rank 1   .. F0 B0 B0 F1 B1 B1 .. ..   holds 1

    With several stages a rank the stage comes first: ``2F0``. Times that are not whole numbers are rounded; where some
    action takes less than one, the shortest is the unit.
    """
    simulation = simulate(schedule, costs)
    every = [interval for row in simulation.intervals for interval in row]
    unit = min([1.0, *(length for one in every if (length := one.end - one.start) > 0)])
    several = schedule.stages > schedule.ranks
    longest = max(len(_label(one.action, several)) for one in every)
    lines = [_title(schedule, simulation)]
    for rank, row in enumerate(simulation.intervals):
        cells = ["." * longest] * round(simulation.makespan / unit)
        for one in row:
            for column in range(round(one.start / unit), round(one.end / unit)):
                cells[column] = _label(one.action, several).ljust(longest)
        lines.append(f"rank {rank}".ljust(9) + f"{' '.join(cells)}   holds {simulation.peak_activations[rank]}")
    return "\n".join(lines)


def save_picture(schedule: Schedule, path: str | Path, costs: Costs = None) -> None:
    """Write the schedule to ``path`` as an SVG picture, which any browser shows.

    Forwards are light, backwards darker, weights darkest; hovering over an action names it and its time.
    """
    simulation = simulate(schedule, costs)
    rows = {f"rank {rank}": row for rank, row in enumerate(simulation.intervals)}
    Path(path).write_text(_svg(_title(schedule, simulation), rows, simulation.makespan))


def pictures_of_step(ran: Mapping[int, Sequence[tuple[int, str, float, float]]]) -> tuple[str, str]:
    """Return two pictures of a step, a row per stage: as simulated with the usual costs, and as it ran.

    Args:
        ran: for each stage, in the order in which they ran, microbatch, phase, start and end (in milliseconds) of its
            actions; where a trace begins or ends within a step, some of them.
    """
    kinds = {phase: kind for kind, phase in PHASES.items()}
    measured = [
        [Interval(Action(kinds[phase], stage, i), start, end) for i, phase, start, end in ran[stage] if phase in kinds]
        for stage in sorted(ran)
    ]
    actions = [[interval.action for interval in row] for row in measured]
    costs = usual_costs(actions)
    simulated, _ = run_on_clock(actions, lambda action: costs[action.kind])

    def picture(name: str, intervals: list[list[Interval]], unit: str = "") -> str:
        makespan, bubble = makespan_and_bubble(intervals)
        rows = {f"stage {stage}": row for stage, row in zip(sorted(ran), intervals, strict=True)}
        return _svg(f"{name}: {makespan:g}{unit}, {100 * bubble:.0f} % bubble", rows, makespan, unit)

    return picture("as planned", simulated), picture("as it ran", measured, " ms")


def _title(schedule: Schedule, simulation: Simulation) -> str:
    return (
        f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches, "
        f"{100 * simulation.bubble:.0f} % bubble"
    )


def _label(action: Action, several: bool) -> str:
    return f"{action.stage if several else ''}{action.kind.value}{action.microbatch}"


_ROW, _BAR, _TOP, _WIDTH = 44, 26, 26, 1180
_LIGHTNESS = {Kind.F: 82, Kind.B: 66, Kind.W: 50, Kind.R: 90}  # black letters can be read on them


def _svg(title: str, rows: Mapping[str, Sequence[Interval]], makespan: float, unit: str = "") -> str:
    """Return a picture whose letters keep their size at every width: in a page it may be as narrow as a phone."""
    title = escape(title)
    height = _TOP + _ROW * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" role="img" aria-label="{title}" '
        'font-family="sans-serif" font-size="13" style="background:var(--paper,white)">',  # the colour of a page
        f'<text y="16">{title}</text>',
    ]
    stages = sorted({interval.action.stage for row in rows.values() for interval in row})
    for number, (name, row) in enumerate(rows.items()):
        y = _TOP + _ROW * number
        parts.append(f'<text y="{y + 10}" font-size="11">{name}</text>')
        parts.append(f'<rect y="{y + 14}" width="100%" height="{_BAR}" fill="#8882"/>')
        for interval in row:
            kind, stage, i = interval.action
            start, length = interval.start, interval.end - interval.start
            x, width = (100 * time / (makespan or 1.0) for time in (start, length))
            # A nested picture clips a label that it has no room for.
            parts.append(
                f'<svg x="{x:.2f}%" y="{y + 14}" width="{max(width, 0.1):.2f}%" height="{_BAR}">'
                f"<title>{PHASES[kind]} of microbatch {i} on stage {stage}: "
                f"{length:g}{unit} from {start:g}{unit}</title>"
                f'<rect width="100%" height="100%" stroke="white" stroke-opacity=".6" '
                f'fill="hsl({360 * stages.index(stage) // len(stages)},65%,{_LIGHTNESS[kind]}%)"/>'
                f'<text x="3" y="18" style="fill:black">{kind.value}{i}</text></svg>'
            )
    return "\n".join([*parts, "</svg>", ""])
