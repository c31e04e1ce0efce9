"""A table of a pipe: the layers of each stage, its times, and the bytes sent to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from anabranch.autodiff.moved_parameter import Switch
from anabranch.pipeline.stage.stage import OUTSIDE, Stage


@dataclass(slots=True)
class Observed:
    """Measurements of the stages in the last call.

    Attributes:
        seconds: of computing, by (stage, phase), all microbatches together.
        sent_bytes: of the largest microbatch, by (stage, target): activations forward, and gradients back.
    """

    seconds: dict[tuple[int, str], float] = field(default_factory=dict)
    sent_bytes: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageCosts:
    """One stage in the last call.

    Attributes:
        stage: its number.
        rank: the rank that runs it.
        layers: the name of its only layer, or ``"first to last"``.
        parameters: their numbers, one that it uses twice counted once.
        seconds: of computing by phase, ``"forward"``, ``"recompute"``, ``"backward"`` or ``"weight"``, all microbatches
            together.
        sends: bytes of the largest microbatch, by the stage that they go to: activations, and gradients back.
    """

    stage: int
    rank: int
    layers: str
    parameters: int
    seconds: Mapping[str, float]
    sends: Mapping[int, int]


def costs_of(stages: Sequence[Stage], rank_of: Sequence[int], observed: Observed) -> list[StageCosts]:
    """Return the costs of each stage, as far as they were observed."""
    costs = []
    for j, stage in enumerate(stages):
        names = [layer.name for layer in stage.layers]
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        unique = {id(parameter): parameter for layer in stage.layers for parameter in layer.module.parameters()}
        numbers = sum(parameter.numel() for parameter in unique.values() if type(parameter) is not Switch)
        seconds = {phase: value for (at, phase), value in observed.seconds.items() if at == j}
        sends = {target: size for (at, target), size in observed.sent_bytes.items() if at == j and size}
        costs.append(StageCosts(j, rank_of[j], span, numbers, seconds, sends))
    return costs


_HEADINGS = ("stage", "rank", "device", "layers", "parameters", "forward", "backward", "to next", "skips")


def describe(stages: Sequence[Stage], rank_of: Sequence[int], observed: Observed, title: str) -> str:
    """Return the table; times and bytes are those of the last call, and missing before the first."""
    rows = list(map(_row, stages, costs_of(stages, rank_of, observed)))
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    table = [_HEADINGS, *rows]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([title, *lines])


def _row(stage: Stage, costs: StageCosts) -> tuple[str, ...]:
    cells = [str(costs.stage), str(costs.rank), str(stage.device), costs.layers, f"{costs.parameters:,}"]
    for phases in (("forward",), ("recompute", "backward", "weight")):
        seconds = [costs.seconds[phase] for phase in phases if phase in costs.seconds]
        cells.append(f"{1000 * sum(seconds):.1f} ms" if seconds else "-")
    sent = Counter(
        f"{route[1] if isinstance(route, tuple) else route} to stage {target}"
        for target, routes in stage.targets.items()
        for route in routes
        if target != OUTSIDE and route is not None
    )
    skips = [text if count == 1 else f"{count} x {text}" for text, count in sent.items()]
    return *cells, _show_bytes(costs.sends.get(stage.index + 1)), "; ".join(skips) or "-"


def _show_bytes(size: float | None) -> str:
    if size is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
