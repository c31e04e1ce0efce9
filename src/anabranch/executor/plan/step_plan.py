"""``Plan``: the traffic of one training step across each boundary and its estimated cost, as a printable value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Plan", "PlanRow"]

_NAME = 27  # columns; with the others a line has 80
_PLACE = 25
_SIZE = 14
_TIME = 11
_MANY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One parameter, or one layer that is across a boundary. ``str`` of it is a line of the table.

    Attributes:
        name: the parameter's, or the far side's: an expert.
        shape: of the whole parameter; empty for an expert; of a pipe's stage, how many numbers its parameters are.
        place: where it lives.
        boundary: the one it crosses in a step, ``"workers"``, ``"servers"``, ``"experts"`` or ``"pipeline"``; empty if
            none.
        bytes: those that this worker sends and receives for it in a step; ``None`` if a batch is needed to know. Those
            that a pipe's stage sends to others, on whichever rank it is.
        seconds: the estimated time of that crossing, without the latency of messages that it shares with others. The
            computing time of a pipe's stage.
    """

    name: str
    shape: tuple[int, ...]
    place: str
    boundary: str
    bytes: int | None
    seconds: float

    def __str__(self) -> str:
        crosses = "?" if self.bytes is None else f"{self.bytes:,}" if self.boundary else "-"
        seconds = _seconds_in_words(self.seconds) if self.boundary else "-"
        return _line(self.name, self.place, crosses, seconds)


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a training step: ``print(plan)`` shows a table of at most 80 columns.

    Attributes:
        step: the step's name.
        comm_mode: the mode that it is planned for.
        workers, servers: of the job.
        rows: every parameter, then every layer that runs in another process.
        bytes: of one worker in a step, by boundary, headers included: all that ``Executor.statistics()`` counts.
        parts: the expected seconds of a step, by cause.
        notes: costs that the figures do not include.
    """

    step: str
    comm_mode: str | None
    workers: int
    servers: int
    rows: tuple[PlanRow, ...]
    bytes: Mapping[str, int]
    parts: Mapping[str, float]
    notes: tuple[str, ...] = field(default=())

    @property
    def step_seconds(self) -> float:
        """Seconds that an optimizer step should take."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        title = f"step {self.step!r}, comm_mode={self.comm_mode!r}: {_count(self.workers, 'worker')}"
        if self.servers:
            title += f", {_count(self.servers, 'server')}"
        lines = [title, _line("parameter or layer", "where it lives", "bytes a step", "time"), *map(str, self.rows)]
        lines += ["", _line("a step should take", "", "", _seconds_in_words(self.step_seconds))]
        for part, seconds in self.parts.items():
            size = f"{self.bytes[part]:,}" if part in self.bytes else ""
            lines.append(_line(f"  {part}", "", size, _seconds_in_words(seconds)))
        return "\n".join([*lines, *self.notes])


def _line(name: str, place: str, size: str, time: str) -> str:
    return f"{_shortened(name, _NAME):<{_NAME}} {_shortened(place, _PLACE):<{_PLACE}} {size:>{_SIZE}} {time:>{_TIME}}"


def _shortened(name: str, width: int) -> str:
    """Return ``name`` with its middle left out if it is too long."""
    if len(name) <= width:
        return name
    kept = width - 3
    return f"{name[: kept // 2]}...{name[len(name) - (kept - kept // 2) :]}"


def _seconds_in_words(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms" if seconds < _MANY_SECONDS else f"{seconds:,.1f} s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
