"""Patterns for the names of many experts, and drawing from them."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Collection, Sequence

from anabranch.transport.announcements import UID, check_uid

__all__ = ["UidPattern", "draw_uids", "expand_uids"]

_RANGE = re.compile(r"\[(0|[1-9][0-9]*):(0|[1-9][0-9]*)\]")
# Python's ranges can count up to this many.
_MOST_UIDS = 1 << 62
# Uids drawn at first: a directory is asked about this many at once.
_FIRST_DRAWS = 256


def expand_uids(pattern: str) -> list[str]:
    """Expand ``pattern`` into uids: ``[a:b]`` is each index from a up to, not including, b.

    >>> expand_uids("ffn.[0:2].[5:7]")
    ['ffn.0.5', 'ffn.0.6', 'ffn.1.5', 'ffn.1.6']

    Raises:
        ValueError: the pattern gives an invalid uid, or none.
    """
    return list(UidPattern(pattern))


class UidPattern(Sequence[str]):
    """The uids of a pattern, in order, each created only when requested.

    >>> many = UidPattern("ffn.[0:4096].[0:4096].[0:4096]")
    >>> many[4097], "ffn.7.8.9" in many, "ffn.7.8.4096" in many, many.size
    ('ffn.0.1.1', True, False, 68719476736)

    Args:
        pattern: as of ``expand_uids``.

    Raises:
        ValueError: the pattern gives an invalid uid, or none.
    """

    def __init__(self, pattern: str) -> None:
        self._parts: list[str | range] = []
        for part in pattern.split("."):
            match = _RANGE.fullmatch(part)
            self._parts.append(range(int(match[1]), int(match[2])) if match else part)
        self.size = math.prod(len(part) for part in self._parts if isinstance(part, range))
        """The number of uids."""
        if not self.size:
            raise ValueError(f"{pattern!r} matches no uid: a range is empty; write [first:last+1]")
        if self.size > _MOST_UIDS:
            raise ValueError(f"{pattern!r} matches {self.size} uids, more than {_MOST_UIDS}; narrow a range")
        # The last one is the longest.
        check_uid(".".join(part if isinstance(part, str) else str(part[-1]) for part in self._parts))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        if not 0 <= index < self.size:
            raise IndexError(index)
        parts: list[str] = []
        for part in reversed(self._parts):
            if isinstance(part, range):
                index, place = divmod(index, len(part))
                parts.append(str(part[place]))
            else:
                parts.append(part)
        return ".".join(reversed(parts))

    def __contains__(self, uid: object) -> bool:
        if not isinstance(uid, str) or not UID.fullmatch(uid):
            return False
        parts = uid.split(".")
        return len(parts) == len(self._parts) and all(
            part == mine if isinstance(mine, str) else part.isdecimal() and int(part) in mine
            for part, mine in zip(parts, self._parts, strict=True)
        )


def draw_uids(
    pattern: str,
    count: int,
    *,
    taken: Callable[[Sequence[str]], Collection[str]] = lambda uids: (),
    seed: int | None = None,
) -> list[str]:
    """Draw ``count`` different uids of a pattern at random.

    >>> draw_uids("ffn.[0:32].[0:256]", 2, seed=0)
    ['ffn.24.167', 'ffn.26.234']

    Args:
        pattern: as of ``expand_uids``.
        count: the number of uids.
        taken: called with some uids, returns those of them that are not to be drawn.
        seed: draws the same again while the same are taken; by default any.

    Raises:
        ValueError: an invalid pattern, or fewer uids that are not taken.
    """
    uids = UidPattern(pattern)
    draws = random.Random(seed)  # noqa: S311 - draws may repeat
    drawn: list[str] = []
    seen: set[int] = set()
    some = max(_FIRST_DRAWS, 4 * count)
    while len(drawn) < count and len(seen) < uids.size:
        found = [index for index in draws.sample(range(uids.size), min(some, uids.size)) if index not in seen]
        seen.update(found)
        candidates = [uids[index] for index in found]
        refused = set(taken(candidates))
        drawn += [uid for uid in candidates if uid not in refused]
        some *= 2
    if len(drawn) < count:
        raise ValueError(
            f"cannot draw {count} uids from {pattern!r}, which matches {uids.size}, of which {len(drawn)} are "
            "free; widen a range, or draw fewer"
        )
    return drawn[:count]
