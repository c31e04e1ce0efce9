"""``Profile``: how quick this machine and its links are, as the few numbers that a plan is computed from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["LinkSpeed", "Profile", "Update"]


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The time of a message: so much for each, so much for each byte and each row of a table in it.

    >>> link = LinkSpeed.through([(1_000, 0.002), (101_000, 0.003)])
    >>> round(link.cost(51_000), 6)
    0.0025

    Attributes:
        latency: seconds of a message of nothing.
        per_byte: seconds of a byte.
        per_row: seconds of a table's row, whatever its width: to find it and to move it.
    """

    latency: float
    per_byte: float
    per_row: float = 0.0

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> LinkSpeed:
        """Return the link that fits these pairs of bytes and seconds: those of the smallest and the largest message."""
        (few, quick), (many, slow) = min(points), max(points)
        per_byte = max(0.0, (slow - quick) / (many - few))
        return cls(max(0.0, quick - few * per_byte), per_byte)

    @classmethod
    def of_rows(cls, width: int, small: tuple[int, float], large: tuple[int, float], wide: float) -> LinkSpeed:
        """Return the link of a table's rows.

        Args:
            width: bytes per row, its id included.
            small: a number of rows, and the seconds that they took.
            large: the same of more rows.
            wide: the seconds of as many rows as ``large`` has, each four times as wide.
        """
        per_whole_row = max(0.0, (large[1] - small[1]) / (large[0] - small[0]))
        per_byte = min(per_whole_row / width, max(0.0, (wide - large[1]) / (3 * width * large[0])))
        return cls(max(0.0, small[1] - small[0] * per_whole_row), per_byte, per_whole_row - width * per_byte)

    def cost(self, nbytes: int, rows: int = 0, messages: int = 1) -> float:
        """Return the seconds of ``messages`` with these bytes and rows in them together."""
        return messages * self.latency + nbytes * self.per_byte + rows * self.per_row


@dataclass(frozen=True, slots=True)
class Update:
    """The time of an optimizer's step.

    Attributes:
        per_parameter: seconds of a parameter, however small.
        per_element: seconds of one of its numbers.
    """

    per_parameter: float
    per_element: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Times of this machine and its links, while all workers are busy.

    Attributes:
        copy: seconds to copy a byte from memory to memory.
        fresh: seconds to fill a byte of memory that was not in use before: pages come from the system.
        distinct: seconds to sort an id among others.
        updates: of each kind of optimizer, by its class's name.
        workers: an all-reduce; ``None`` with one worker.
        pull, push: messages about tables' rows to all servers; ``None`` without servers.
        pull_whole, push_whole: messages about whole parameters.
    """

    copy: float
    fresh: float
    distinct: float
    updates: Mapping[str, Update] = field(default_factory=dict)
    workers: LinkSpeed | None = None
    pull: LinkSpeed | None = None
    push: LinkSpeed | None = None
    pull_whole: LinkSpeed | None = None
    push_whole: LinkSpeed | None = None
