"""``Plan``: the traffic of one training step across each boundary and its estimated time, as a printable value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_NAME = 27  # columns; with the others a line has 80
_PLACE = 25
_SIZE = 14
_TIME = 11
_MANY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The measured speed of a boundary.

    >>> round(LinkCost(latency=0.001, seconds_per_byte=1e-9).seconds(1_000_000, messages=2), 6)
    0.003

    Attributes:
        latency: seconds of a message of nothing.
        seconds_per_byte: the inverse of the bandwidth; 0 if nothing could be sent to measure it.
    """

    latency: float
    seconds_per_byte: float

    def seconds(self, nbytes: int, messages: int = 0) -> float:
        """Return the seconds of so many messages with these bytes in them together."""
        return messages * self.latency + nbytes * self.seconds_per_byte

    def __str__(self) -> str:
        bandwidth = f", {1e-6 / self.seconds_per_byte:,.1f} MB/s" if self.seconds_per_byte else ""
        return f"{1000 * self.latency:.2f} ms{bandwidth}"


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One parameter, or one layer that is across a boundary. ``str`` of it is a line of the table.

    Attributes:
        name: the parameter's, or an expert's.
        shape: of the whole parameter; empty for an expert.
        place: where it lives.
        boundary: the one it crosses in a step, ``"workers"``, ``"servers"`` or ``"experts"``; empty if none.
        bytes: those that this worker sends and receives for it in a step; ``None`` if a batch is needed to know.
        seconds: the estimated time of its bytes; the latency of messages is that of the boundary.
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
class ModeCost:
    """The traffic and time of the step in one ``comm_mode``. ``str`` of it is a line of the table.

    Attributes:
        comm_mode: the mode.
        bytes: of one worker in a step, by boundary.
        seconds: that a step should take.
    """

    comm_mode: str | None
    bytes: Mapping[str, int]
    seconds: float

    def __str__(self) -> str:
        return _line(
            str(self.comm_mode), ", ".join(self.bytes), f"{sum(self.bytes.values()):,}", _seconds_in_words(self.seconds)
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a training step: ``print(plan)`` shows a table of at most 80 columns.

    Attributes:
        step: the step's name.
        comm_mode: the mode in use.
        workers, servers: of the job.
        rows: every parameter, then every layer that runs in another process.
        bytes: of one worker in a step, by boundary, headers included: all that ``Executor.statistics()`` counts.
        parts: the expected seconds of a step, by cause: ``"compute"``, and each boundary.
        links: the measured speed of each boundary.
        modes: the same step in every mode that is possible here, the one in use included.
        notes: what the figures do not include.
    """

    step: str
    comm_mode: str | None
    workers: int
    servers: int
    rows: tuple[PlanRow, ...]
    bytes: Mapping[str, int]
    parts: Mapping[str, float]
    links: Mapping[str, LinkCost] = field(default_factory=dict)
    modes: tuple[ModeCost, ...] = ()
    notes: tuple[str, ...] = ()

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
            lines.append(_line(f"  {part}", str(self.links.get(part, "")), size, _seconds_in_words(seconds)))
        lines += ["", _line("comm_mode", "what is crossed", "bytes a step", "time"), *map(str, self.modes)]
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
