"""Schedules as text and as a picture: time to the right, a row per rank, a colour per stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

from anabranch.pipeline.schedule import Action, Kind, Schedule, Simulation, simulate

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
    Path(path).write_text(_svg(schedule, simulate(schedule, costs)))


def _title(schedule: Schedule, simulation: Simulation) -> str:
    return (
        f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches, "
        f"{100 * simulation.bubble:.0f} % bubble"
    )


def _label(action: Action, several: bool) -> str:
    return f"{action.stage if several else ''}{action.kind.value}{action.microbatch}"


_ROW, _BAR, _LEFT, _TOP, _WIDTH = 34, 26, 70, 34, 1100
_LIGHTNESS = {Kind.F: 78, Kind.B: 60, Kind.W: 44, Kind.R: 88}


def _svg(schedule: Schedule, simulation: Simulation) -> str:
    scale = _WIDTH / (simulation.makespan or 1.0)
    height = _TOP + _ROW * schedule.ranks + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 20} {height}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20">{escape(_title(schedule, simulation))}</text>',
    ]
    for rank, row in enumerate(simulation.intervals):
        y = _TOP + _ROW * rank
        parts.append(f'<text x="10" y="{y + 18}">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_BAR}" fill="#f2f2f2"/>')
        for interval in row:
            x, width = _LEFT + interval.start * scale, (interval.end - interval.start) * scale
            hue = 360 * interval.action.stage // schedule.stages
            label = _label(interval.action, several=False) if width > 20 else ""
            parts.append(
                f"<g><title>{interval.action}: {interval.start:g} to {interval.end:g}</title>"
                f'<rect x="{x:.2f}" y="{y}" width="{max(width - 0.5, 0.5):.2f}" height="{_BAR}" '
                f'fill="hsl({hue},65%,{_LIGHTNESS[interval.action.kind]}%)"/>'
                f'<text x="{x + width / 2:.2f}" y="{y + 18}" text-anchor="middle">{label}</text></g>'
            )
    return "\n".join([*parts, "</svg>", ""])
