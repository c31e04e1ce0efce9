"""Rules of announcements, for every directory: who may announce what, for how long, and how much at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anabranch.errors import Unauthorized
from anabranch.transport.directory.uids import check_uid
from anabranch.transport.network.streams import Peer

__all__ = ["LONGEST_TTL", "check_kind", "check_ttl", "portions"]

LONGEST_TTL = 24 * 3600.0
"""The longest time to live of an announcement, in seconds."""
# The prefixes of shards; any other name is an expert's.
_SHARDS = "parameters"
# This many names of the greatest length fit into a header.
_NAMES_A_REQUEST = 500


def check_ttl(ttl: float) -> None:
    """Refuse a time to live that is not a number of seconds from 0 to a day."""
    if not 0 < ttl <= LONGEST_TTL:
        raise ValueError(f"ttl is a number of seconds above 0 and at most {LONGEST_TTL:.0f}, got {ttl!r}")


def check_kind(uids: Iterable[str], peer: Peer) -> None:
    """Role parameters may announce shards, role experts experts, others nothing; this host's user may announce both."""
    for uid in uids if peer.role is not None else ():
        of_shard = check_uid(uid).startswith(f"{_SHARDS}.")
        if peer.role != ("parameters" if of_shard else "experts"):
            kind = "shards of parameters" if of_shard else "experts"
            raise Unauthorized(f"role {peer.role!r} may not announce {uid}, a name of {kind}")


def portions(names: Iterable[str]) -> Iterable[Sequence[str]]:
    """Split names into lists of which each fits into a request."""
    every = list(names)
    return [every[start : start + _NAMES_A_REQUEST] for start in range(0, len(every), _NAMES_A_REQUEST)]
