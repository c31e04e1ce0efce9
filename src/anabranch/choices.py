"""Words in errors: arguments that are one of a few, and the names that an error lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

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


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return the names with commas, the first ones of many.

    >>> listed(["a", "b", "c", "d"], most=2)
    'a, b and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more
