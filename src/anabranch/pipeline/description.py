"""A table of a pipe: the layers of each stage, its times, and the bytes sent to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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


_HEADINGS = ("stage", "rank", "device", "layers", "parameters", "forward", "backward", "to next", "skips")


def describe(stages: Sequence[Stage], rank_of: Sequence[int], observed: Observed, title: str) -> str:
    """Return the table; times and bytes are those of the last call, and missing before the first."""
    rows = [_row(stage, rank, observed) for stage, rank in zip(stages, rank_of, strict=True)]
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    table = [_HEADINGS, *rows]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([title, *lines])


def _row(stage: Stage, rank: int, observed: Observed) -> tuple[str, ...]:
    names, j = [layer.name for layer in stage.layers], stage.index
    span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    unique = {id(parameter): parameter for layer in stage.layers for parameter in layer.module.parameters()}
    numbers = sum(parameter.numel() for parameter in unique.values() if type(parameter) is not Switch)
    cells = [str(j), str(rank), str(stage.device), span, f"{numbers:,}"]
    for phases in (("forward",), ("recompute", "backward", "weight")):
        seconds = [observed.seconds[j, phase] for phase in phases if (j, phase) in observed.seconds]
        cells.append(f"{1000 * sum(seconds):.1f} ms" if seconds else "-")
    sent = Counter(
        f"{route[1] if isinstance(route, tuple) else route} to stage {target}"
        for target, routes in stage.targets.items()
        for route in routes
        if target != OUTSIDE and route is not None
    )
    skips = [text if count == 1 else f"{count} x {text}" for text, count in sent.items()]
    return *cells, _show_bytes(observed.sent_bytes.get((j, j + 1)) or None), "; ".join(skips) or "-"


def _show_bytes(size: float | None) -> str:
    if size is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
