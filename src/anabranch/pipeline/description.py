"""A table of a pipe: the layers of each stage, its times, and the bytes sent to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from anabranch.autodiff.moved_parameter import Switch
from anabranch.pipeline.stage.partition import Route
from anabranch.pipeline.stage.stage import OUTSIDE, Stage

__all__ = ["Observed", "StageCosts", "costs_of", "describe"]


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
    return [
        StageCosts(
            stage.index,
            rank_of[stage.index],
            _layers(stage),
            _parameters(stage),
            {phase: seconds for (at, phase), seconds in observed.seconds.items() if at == stage.index},
            {
                target: size
                for (at, target), size in observed.sent_bytes.items()
                if at == stage.index and target != OUTSIDE and size
            },
        )
        for stage in stages
    ]


def _layers(stage: Stage) -> str:
    names = [layer.name for layer in stage.layers]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _parameters(stage: Stage) -> int:
    unique = {id(parameter): parameter for layer in stage.layers for parameter in layer.module.parameters()}
    return sum(parameter.numel() for parameter in unique.values() if type(parameter) is not Switch)


_HEADINGS = ("stage", "rank", "device", "layers", "parameters", "forward", "backward", "to next", "skips")


def describe(stages: Sequence[Stage], rank_of: Sequence[int], observed: Observed, title: str) -> str:
    """Return the table; times and bytes are those of the last call, and missing before the first."""
    rows = [_row(stage, rank_of[stage.index], observed) for stage in stages]
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    heading = "  ".join(cell.ljust(width) for cell, width in zip(_HEADINGS, widths, strict=True)).rstrip()
    return "\n".join([title, heading, *lines])


def _row(stage: Stage, rank: int, observed: Observed) -> tuple[str, ...]:
    backward = [_add(observed.seconds, stage.index, phases) for phases in (("forward",), _BACKWARD)]
    return (
        str(stage.index),
        str(rank),
        str(stage.device),
        _layers(stage),
        f"{_parameters(stage):,}",
        *("-" if seconds is None else f"{1000 * seconds:.1f} ms" for seconds in backward),
        _show_bytes(observed.sent_bytes.get((stage.index, stage.index + 1))),
        "; ".join(_skips(stage)) or "-",
    )


_BACKWARD = ("recompute", "backward", "weight")


def _add(seconds: Mapping[tuple[int, str], float], stage: int, phases: Sequence[str]) -> float | None:
    found = [seconds[stage, phase] for phase in phases if (stage, phase) in seconds]
    return sum(found) if found else None


def _show_bytes(size: int | None) -> str:
    if size is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024  # type: ignore[assignment]
    return f"{size:.4g} GiB"


def _skips(stage: Stage) -> list[str]:
    sent = Counter(
        f"{_name(route)} to stage {target}"
        for target, routes in stage.targets.items()
        for route in routes
        if target != OUTSIDE and route is not None
    )
    return [text if count == 1 else f"{count} x {text}" for text, count in sent.items()]


def _name(route: Route) -> str:
    return route[1] if isinstance(route, tuple) else str(route)
