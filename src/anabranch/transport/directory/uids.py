"""Names of services: ``prefix.i[.j...]``, a point in a grid."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["UID", "check_prefix", "check_uid", "prefixes_of"]

UID = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.(0|[1-9][0-9]*))+")
"""The form of a uid."""
_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.(0|[1-9][0-9]*))*")
_LONGEST = 100


def check_uid(uid: object) -> str:
    """Return ``uid`` if it is valid.

    >>> check_uid("ffn.3.14")
    'ffn.3.14'

    Raises:
        ValueError: it is invalid; the message shows the form.
    """
    if isinstance(uid, str) and len(uid) <= _LONGEST and UID.fullmatch(uid):
        return uid
    raise ValueError(
        f"{uid!r} is not a uid; use prefix.i or prefix.i.j..., with a name as prefix, whole numbers without leading "
        f"zeros as indices, at most {_LONGEST} characters"
    )


def check_prefix(prefix: object) -> str:
    """Return ``prefix`` if it is a name, with or without indices; a ``ValueError`` otherwise."""
    if isinstance(prefix, str) and len(prefix) <= _LONGEST and _PREFIX.fullmatch(prefix):
        return prefix
    raise ValueError(f"{prefix!r} is not a prefix of uids; use a name, such as ffn, or one with indices, ffn.3")


def prefixes_of(uid: str) -> Iterator[tuple[str, int]]:
    """Each prefix of ``uid``, with the index that follows it.

    >>> list(prefixes_of("ffn.3.14"))
    [('ffn', 3), ('ffn.3', 14)]
    """
    parts = uid.split(".")
    for length in range(1, len(parts)):
        yield ".".join(parts[:length]), int(parts[length])
