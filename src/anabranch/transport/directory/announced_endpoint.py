"""Endpoints in announcements: others must be able to connect to them.

Host names are not resolved, because other hosts may resolve them differently.
"""

from __future__ import annotations

import re
import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, ip_address

from anabranch.transport.network.endpoints import TcpEndpoint, parse_endpoint
from anabranch.transport.network.streams import Peer

__all__ = ["check_announced"]

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\.?")
_LONGEST_NAME = 253
# The C library parses this as part of an address; host names do not end like this.
_NUMBER = re.compile(r"(\d+|0[xX][0-9a-fA-F]*)\.?")
_THIS_NETWORK = IPv4Network("0.0.0.0/8")
_EVERYONE = IPv4Address("255.255.255.255")
_EVERYWHERE = "*"


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
    address = _address_of(endpoint.host)
    if address is None:
        if endpoint.host == _EVERYWHERE:
            return "is where a server listens, not where others find it"
        last = endpoint.host.removesuffix(".").rpartition(".")[2]
        fits = len(endpoint.host) <= _LONGEST_NAME and _NAME.fullmatch(endpoint.host) and not _NUMBER.fullmatch(last)
        return None if fits and endpoint.port else "names no host and port"
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if not endpoint.port or address.is_unspecified or (isinstance(address, IPv4Address) and address in _THIS_NETWORK):
        return "is where a server listens, not where others find it"
    if address.is_multicast or address == _EVERYONE:
        return "is an address of many hosts, not of one"
    return None


def _address_of(host: str) -> IPv4Address | IPv6Address | None:
    """Return ``host`` as an address, in any form that the C library accepts: ``0`` is ``0.0.0.0``."""
    if not host.isascii() or any(letter.isspace() for letter in host):
        return None
    try:
        return IPv4Address(socket.inet_aton(host))
    except (OSError, ValueError):
        pass
    try:
        return ip_address(host)
    except ValueError:
        return None
