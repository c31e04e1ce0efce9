"""A table of a pipe: the layers of each stage, its times, and the bytes sent to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from anabranch.pipeline.stage.partition import Route
from anabranch.pipeline.stage.stage import OUTSIDE, Stage

__all__ = ["Observed", "describe"]


@dataclass(slots=True)
class Observed:
    """Measurements of the stages in the last call.

    Attributes:
        seconds: of computing, by (stage, phase), all microbatches together.
        sent_bytes: of the largest microbatch, by (stage, target).
    """

    seconds: dict[tuple[int, str], float] = field(default_factory=dict)
    sent_bytes: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, other: Observed) -> None:
        """Add the measurements of ``other``."""
        self.seconds |= other.seconds
        self.sent_bytes |= other.sent_bytes

    def as_plain(self) -> object:
        """Return the measurements in lists of numbers and strings, to be sent to other ranks."""
        return [
            [[stage, phase, seconds] for (stage, phase), seconds in self.seconds.items()],
            [[stage, target, size] for (stage, target), size in self.sent_bytes.items()],
        ]

    @classmethod
    def from_plain(cls, lists: object) -> Observed:
        """Rebuild the measurements from the lists of ``as_plain``."""
        seconds, sizes = cast("tuple[list[tuple[int, str, float]], list[tuple[int, int, int]]]", lists)
        return cls(
            {(stage, phase): second for stage, phase, second in seconds},
            {(stage, target): size for stage, target, size in sizes},
        )


_HEADINGS = ("stage", "rank", "device", "layers", "parameters", "forward", "backward", "to next", "skips")


def describe(stages: Sequence[Stage], rank_of: Sequence[int], observed: Observed, title: str) -> str:
    """Return the table; times and bytes are those of the last call, and missing before the first."""
    rows = [_row(stage, rank_of[stage.index], observed) for stage in stages]
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    heading = "  ".join(cell.ljust(width) for cell, width in zip(_HEADINGS, widths, strict=True)).rstrip()
    return "\n".join([title, heading, *lines])


def _row(stage: Stage, rank: int, observed: Observed) -> tuple[str, ...]:
    names = [layer.name for layer in stage.layers]
    unique = {id(parameter): parameter for layer in stage.layers for parameter in layer.module.parameters()}
    backward = [_add(observed.seconds, stage.index, phases) for phases in (("forward",), _BACKWARD)]
    return (
        str(stage.index),
        str(rank),
        str(stage.device),
        names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}",
        f"{sum(parameter.numel() for parameter in unique.values()):,}",
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
