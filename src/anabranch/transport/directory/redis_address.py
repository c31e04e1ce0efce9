"""Addresses of a Redis: distinguished from anabranch's endpoints, parsed, and shown without password."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

__all__ = ["PASSWORD_VARIABLE", "host_and_port", "is_loopback", "is_redis_url", "parse_url", "shown_url"]

PASSWORD_VARIABLE = "ANABRANCH_REDIS_PASSWORD"  # noqa: S105 - its name
"""The environment variable with the password where the URL has none."""

_PORT = 6379
_SCHEMES = ("redis://", "rediss://", "unix://")


def is_redis_url(text: str) -> bool:
    """Return True if ``text`` is a Redis URL, not an endpoint of anabranch.

    >>> is_redis_url("redis://db:6379/0"), is_redis_url("unix:///run/redis.sock"), is_redis_url("unix:/run/directory")
    (True, True, False)
    """
    return text.startswith(_SCHEMES)


def shown_url(url: str) -> str:
    """Return ``url`` without user, password and options."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"


def parse_url(url: str) -> Mapping[str, Any]:
    """Return the arguments of a connection, its class among them.

    Raises:
        ValueError: the URL is malformed.
        ModuleNotFoundError: without the ``redis`` extra.
    """
    shown = shown_url(url)
    if find_spec("redis") is None:
        raise ModuleNotFoundError(
            f"{shown}: a directory in Redis needs the package redis: pip install 'anabranch[redis]'", name="redis"
        )
    from redis.connection import Connection
    from redis.connection import parse_url as parse

    try:
        if not is_redis_url(url) or "," in shown:
            raise ValueError("name one Redis server")
        facts: dict[str, Any] = {"connection_class": Connection, **parse(url)}  # type: ignore[no-untyped-call]
        base = urlsplit(url).path.strip("/")
        if "path" not in facts and base and not base.isdecimal():
            raise ValueError(f"{base!r} is not a database number")
        if url.startswith("unix://") and not facts.get("path"):
            raise ValueError("the path is missing")
    except ValueError as error:
        raise ValueError(
            f"{shown!r} is not a Redis address ({error}); use redis://HOST:PORT/DATABASE, rediss://... for "
            "TLS, or unix://PATH"
        ) from None
    if "password" not in facts and (password := os.environ.get(PASSWORD_VARIABLE)):
        facts["password"] = password
    return facts


def host_and_port(url: str) -> tuple[str | None, int]:
    """Return where a Redis listens; no host for a Unix socket.

    >>> host_and_port("rediss://:secret@db.example.org/2"), host_and_port("unix:///run/redis.sock")
    (('db.example.org', 6379), (None, 0))
    """
    if url.startswith("unix://"):
        return None, 0
    parts = urlsplit(url)
    return parts.hostname or "localhost", parts.port or _PORT


def is_loopback(host: str) -> bool:
    """Return True if ``host`` is a name or address of this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
