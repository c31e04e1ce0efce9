"""Arguments that are one of a few words: found whatever their case, or refused in one sentence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

__all__ = ["choice"]

_C = TypeVar("_C", bound="str | None")


def choice(argument: str, given: object, known: Iterable[_C]) -> _C:
    """Return the one of ``known`` that ``given`` means.

    >>> choice("schedule", "1f1b", ["GPipe", "1F1B"])
    '1F1B'

    Raises:
        ValueError: it means none of them; lists them.
    """
    known = list(known)
    for one in known:
        if given == one or (isinstance(given, str) and isinstance(one, str) and given.lower() == one.lower()):
            return one
    *others, last = map(repr, known)
    raise ValueError(f"{argument} is {', '.join(others)} or {last}, got {given!r}")
