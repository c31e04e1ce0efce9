"""Announcing a shard to a directory: in this process, served at an endpoint, or kept in Redis."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Protocol

from anabranch.deadline import Deadline
from anabranch.transport import Client, Transport
from anabranch.transport.directory.redis_address import is_redis_url
from anabranch.transport.directory.redis_directory import RedisDirectory
from anabranch.transport.replicas import Replicas

__all__ = ["Announcer", "ServedDirectory", "named_directory"]


class Announcer(Protocol):
    """The interface of a directory that a server needs."""

    def announce(self, uids: Iterable[str], endpoint: str, ttl: float) -> None:
        """Announce that ``endpoint`` serves ``uids`` for the next ``ttl`` seconds."""

    def withdraw(self, uids: Iterable[str], endpoint: str) -> None:
        """Announce that ``endpoint`` no longer serves ``uids``."""


class ServedDirectory:
    """The directory behind an ``anabranch.DirectoryServer``, as a shard calls it; several all get each announcement."""

    def __init__(
        self,
        endpoint: str,
        *,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        transport: Transport | None = None,
        timeout: float = 10.0,
    ) -> None:
        self._replicas = Replicas(endpoint)
        self._timeout = timeout
        self._client = Client(role="parameters", keys=keys, insecure=insecure, transport=transport)

    def announce(self, uids: Iterable[str], endpoint: str, ttl: float) -> None:
        """Announce that ``endpoint`` serves ``uids`` for the next ``ttl`` seconds."""
        self._tell("directory.announce", (list(uids), endpoint, ttl))

    def withdraw(self, uids: Iterable[str], endpoint: str) -> None:
        """Announce that ``endpoint`` no longer serves ``uids``."""
        self._tell("directory.withdraw", (list(uids), endpoint))

    def _tell(self, verb: str, what: object) -> None:
        self._replicas.ask(self._client, verb, what, Deadline.after(self._timeout))

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def named_directory(
    name: str, *, keys: str | os.PathLike[str] | None, insecure: bool, transport: Transport | None
) -> ServedDirectory | RedisDirectory:
    """Return the directory at ``name``, an endpoint or the URL of a Redis."""
    if is_redis_url(name):
        return RedisDirectory(name, role="parameters", keys=keys, insecure=insecure)
    return ServedDirectory(name, keys=keys, insecure=insecure, transport=transport)
