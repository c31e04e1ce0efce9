"""The rules of every directory of services: the form of a uid, who may announce it, where, and for how long.

A uid is ``prefix.i[.j...]``, a point in a grid. Others must be able to connect to an announced endpoint; host names are
not resolved, because other hosts may resolve them differently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import ip_address
from typing import NamedTuple

from anabranch.errors import Unauthorized
from anabranch.transport.endpoints import TcpEndpoint, parse_endpoint
from anabranch.transport.streams import Peer

UID = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.(0|[1-9][0-9]*))+")
_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.(0|[1-9][0-9]*))*")
_LONGEST_UID = 100
_LONGEST_TTL = 24 * 3600.0
# This many names of the greatest length fit into a header.
_NAMES_A_REQUEST = 500
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")


class Announcement(NamedTuple):
    """An announced uid, the endpoint that serves it, and the seconds until it expires."""

    uid: str
    endpoint: str
    seconds: float


def check_uid(uid: object) -> str:
    """Return ``uid`` if it is valid.

    >>> check_uid("ffn.3.14")
    'ffn.3.14'

    Raises:
        ValueError: it is invalid; the message shows the form.
    """
    if isinstance(uid, str) and len(uid) <= _LONGEST_UID and UID.fullmatch(uid):
        return uid
    raise ValueError(
        f"{uid!r} is not a uid; use prefix.i or prefix.i.j..., with a name as prefix, whole numbers without leading "
        f"zeros as indices, at most {_LONGEST_UID} characters"
    )


def check_prefix(prefix: object) -> str:
    """Return ``prefix`` if it is a name, with or without indices; a ``ValueError`` otherwise."""
    if isinstance(prefix, str) and len(prefix) <= _LONGEST_UID and _PREFIX.fullmatch(prefix):
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


def check_ttl(ttl: float) -> None:
    """Refuse a time to live that is not a number of seconds from 0 to a day."""
    if not 0 < ttl <= _LONGEST_TTL:
        raise ValueError(f"ttl is a number of seconds above 0 and at most {_LONGEST_TTL:.0f}, got {ttl!r}")


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


def check_announced(endpoint: str, peer: Peer) -> None:
    """Refuse a Unix socket from a remote peer, and from every peer anything but an address of one host.

    Raises:
        ValueError: names what to announce instead.
    """
    if peer.on_this_host and endpoint.startswith("memory:"):
        return
    parsed = parse_endpoint(endpoint)
    if not endpoint.isprintable():
        raise ValueError(
            f"{endpoint!r} holds characters that are not allowed in an endpoint; announce unix:PATH or tcp://HOST:PORT"
        )
    if isinstance(parsed, TcpEndpoint):
        if why := _why_unreachable(parsed):
            raise ValueError(f"{endpoint!r} {why}; announce its address")
    elif not peer.on_this_host:
        raise ValueError(
            f"{endpoint!r} is a socket on one host, but the peer connected over a network; announce tcp://..."
        )


def _why_unreachable(endpoint: TcpEndpoint) -> str | None:
    """Return why ``endpoint`` is unreachable for others; ``None`` if it may be reachable."""
    try:
        everywhere = ip_address(endpoint.host).is_unspecified or not endpoint.port
    except ValueError:
        everywhere = endpoint.host == "*"
        if not everywhere and not (_NAME.fullmatch(endpoint.host) and endpoint.port):
            return "names no host and port"
    return "is where a server listens, not where others find it" if everywhere else None
