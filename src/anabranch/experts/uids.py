"""Names of experts: ``prefix.i[.j...]``, a point in a grid; and patterns for many of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

__all__ = ["check_prefix", "check_uid", "expand_uids", "prefixes_of"]

_UID = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.(0|[1-9][0-9]*))+")
_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.(0|[1-9][0-9]*))*")
_RANGE = re.compile(r"\[(0|[1-9][0-9]*):(0|[1-9][0-9]*)\]")
_LONGEST = 100


def check_uid(uid: object) -> str:
    """Return ``uid`` if it is valid.

    >>> check_uid("ffn.3.14")
    'ffn.3.14'

    Raises:
        ValueError: it is invalid; the message shows the form.
    """
    if isinstance(uid, str) and len(uid) <= _LONGEST and _UID.fullmatch(uid):
        return uid
    raise ValueError(
        f"{uid!r} is no uid; write prefix.i or prefix.i.j..., with a name as prefix, whole numbers without leading "
        f"zeros as indices, at most {_LONGEST} characters"
    )


def check_prefix(prefix: object) -> str:
    """Return ``prefix`` if it is a name, with or without indices; a ``ValueError`` otherwise."""
    if isinstance(prefix, str) and len(prefix) <= _LONGEST and _PREFIX.fullmatch(prefix):
        return prefix
    raise ValueError(f"{prefix!r} is no prefix of uids; write a name, such as ffn, or one with indices, ffn.3")


def prefixes_of(uid: str) -> Iterator[tuple[str, int]]:
    """Each prefix of ``uid``, with the index that follows it.

    >>> list(prefixes_of("ffn.3.14"))
    [('ffn', 3), ('ffn.3', 14)]
    """
    parts = uid.split(".")
    for length in range(1, len(parts)):
        yield ".".join(parts[:length]), int(parts[length])


def expand_uids(pattern: str) -> list[str]:
    """Expand ``pattern`` into uids: ``[a:b]`` is each index from a up to, not including, b.

    >>> expand_uids("ffn.[0:2].[5:7]")
    ['ffn.0.5', 'ffn.0.6', 'ffn.1.5', 'ffn.1.6']

    Raises:
        ValueError: the pattern gives an invalid uid, or none.
    """
    choices: list[list[str]] = []
    for part in pattern.split("."):
        match = _RANGE.fullmatch(part)
        choices.append([str(index) for index in range(int(match[1]), int(match[2]))] if match else [part])
    uids = [check_uid(".".join(parts)) for parts in product(*choices)]
    if not uids:
        raise ValueError(f"{pattern!r} stands for no uid: a range is empty; write [first:last+1]")
    return uids
