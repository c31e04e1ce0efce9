"""Rules of announcements, for every directory: who may announce what, for how long, and how much at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anabranch.errors import Unauthorized
from anabranch.transport.directory.uids import check_uid
from anabranch.transport.network.streams import Peer

__all__ = ["LONGEST_TTL", "check_kind", "check_ttl", "portions"]

LONGEST_TTL = 24 * 3600.0
"""The longest time to live of an announcement, in seconds."""
# This many names of the greatest length fit into a header.
_NAMES_A_REQUEST = 500


def check_ttl(ttl: float) -> None:
    """Refuse a time to live that is not a number of seconds from 0 to a day."""
    if not 0 < ttl <= LONGEST_TTL:
        raise ValueError(f"ttl is a number of seconds above 0 and at most {LONGEST_TTL:.0f}, got {ttl!r}")


def check_kind(uids: Iterable[str], peer: Peer) -> None:
    """Role experts may announce, others not; names of parameter servers are nobody's."""
    for uid in uids:
        if check_uid(uid).startswith("parameters."):
            raise Unauthorized(f"nobody may announce {uid}, a name of parameter servers")
        if peer.role not in ("experts", None):
            raise Unauthorized(f"role {peer.role!r} may not announce {uid}")


def portions(names: Iterable[str]) -> Iterable[Sequence[str]]:
    """Split names into lists of which each fits into a request."""
    every = list(names)
    return [every[start : start + _NAMES_A_REQUEST] for start in range(0, len(every), _NAMES_A_REQUEST)]
