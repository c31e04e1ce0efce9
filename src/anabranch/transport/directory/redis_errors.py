"""Errors of the package ``redis`` as anabranch's errors, each with the address and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError, Overloaded, PeerLost, ProtocolError, RemoteError, Unauthorized
from anabranch.transport.directory.redis_address import PASSWORD_VARIABLE

__all__ = ["translated_errors"]


@contextmanager
def translated_errors(url: str, operation: str, deadline: Deadline) -> Iterator[None]:
    """Replace an error of the package ``redis`` in the block with one of anabranch's."""
    from redis import exceptions

    try:
        yield
    except exceptions.TimeoutError:
        raise deadline.error(peer=url, operation=operation) from None
    except exceptions.RedisError as error:
        make = next(make for kinds, make in _table(exceptions) if isinstance(error, kinds))
        raise make(str(error), url, operation, deadline) from error


_Make = Callable[[str, str, str, Deadline], BoundaryError]


@cache
def _table(exceptions: Any) -> Sequence[tuple[tuple[type, ...], _Make]]:
    """Return the errors to raise for those of the package ``redis``; the first match is used."""
    return [
        (
            (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError),
            _raising(
                Unauthorized,
                "Redis rejected this user or password ({}); put them into the URL, redis://USER:PASSWORD@HOST, or the "
                f"password into {PASSWORD_VARIABLE}",
            ),
        ),
        ((exceptions.BusyLoadingError,), _raising(Overloaded, "Redis is still loading its data ({}); try again later")),
        (
            (exceptions.ConnectionError,),
            _raising(
                PeerLost, "no Redis server answers there ({}); start redis-server, or give the address of a running one"
            ),
        ),
        ((exceptions.OutOfMemoryError,), _raising(Overloaded, "Redis is out of memory ({}); raise its maxmemory")),
        (
            (exceptions.ReadOnlyError,),
            _raising(RemoteError, "this Redis is a replica, which is read-only ({}); name the primary"),
        ),
        (
            (exceptions.AskError, exceptions.ClusterError),
            _raising(RemoteError, "this Redis is a member of a cluster ({}); name one that is not"),
        ),
        ((exceptions.InvalidResponse,), _raising(ProtocolError, "the server there is not Redis ({}); check the port")),
        ((exceptions.RedisError,), _raising(RemoteError, "Redis answered with an error: {}")),
    ]


def _raising(kind: type[BoundaryError], text: str) -> _Make:
    def make(said: str, url: str, operation: str, deadline: Deadline) -> BoundaryError:
        return kind(text.format(said), peer=url, operation=operation, elapsed=deadline.elapsed())

    return make
