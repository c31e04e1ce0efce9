"""``RedisDirectory``: the directory of services in a Redis, which outlives every anabranch process.

::

    announce ──> Redis, where it expires by itself
    look up  <── an endpoint that could be announced <── Redis

    SPACE:uid:ffn.3.14     text     the endpoint                                  expires with the announcement
    SPACE:below:ffn        sorted   ffn.3.14, by the time at which it expires     expires with the last
    SPACE:below:ffn.3      sorted   ffn.3.14

``SPACE`` is a name in braces, so that a cluster would keep all of it in one place. Times are milliseconds by Redis'
own clock. The sets answer "which indices follow this prefix" without a walk over all keys; what has expired is left out
by its time.

Redis stores any entry, and knows no certificates. With keys, each job has its own space, and whoever is called then
still proves role and job by its certificate. Without keys there is one space.
"""

from __future__ import annotations

import copy
import functools
import ipaddress
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from operator import methodcaller
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from anabranch.deadline import Deadline, check_seconds
from anabranch.errors import BoundaryError, Overloaded, PeerLost, RemoteError, Unauthorized
from anabranch.transport.announcements import (
    UID,
    Announcement,
    check_announced,
    check_kind,
    check_prefix,
    check_ttl,
    check_uid,
    portions,
)
from anabranch.transport.certificates import EVERY_JOB, check_keys, job_of_keys, resolve_keys
from anabranch.transport.streams import Peer

_PASSWORD_VARIABLE = "ANABRANCH_REDIS_PASSWORD"  # noqa: S105 - its name
_SCHEMES = ("redis://", "rediss://", "unix://")
_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8)
_log = logging.getLogger("anabranch.transport")


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


def is_local(url: str) -> bool:
    """Return True for a Redis that only processes of this host reach.

    >>> [is_local(url) for url in ("redis://[::1]/2", "redis://", "unix:///run/redis.sock", "rediss://db.example.org")]
    [True, True, True, False]
    """
    host = "localhost" if url.startswith("unix://") else urlsplit(url).hostname or "localhost"
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class RedisLink:
    """One Redis, through its own client: a wait ends by its timeout, and its errors are anabranch's.

    Args:
        url: ``redis://``, ``rediss://`` (TLS) or ``unix://PATH``, as the package ``redis`` reads it.
        timeout: seconds that a request may take.

    Attributes:
        url: the address without user, password and options, for messages.

    Raises:
        ValueError: the URL is malformed.
        ModuleNotFoundError: without the ``redis`` extra.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url = shown_url(url)
        if find_spec("redis") is None:
            raise ModuleNotFoundError(
                f"{self.url}: a directory in Redis needs the package redis: pip install 'anabranch[redis]'",
                name="redis",
            )
        self._url, self._timeout = url, timeout
        base = urlsplit(url).path.strip("/")
        try:
            if not is_redis_url(url) or "," in self.url:
                raise ValueError("name one Redis server")
            if url.startswith("unix://") and not base:
                raise ValueError("the path is missing")
            if not url.startswith("unix://") and base and not base.isdecimal():
                raise ValueError(f"{base!r} is not a database number")
            self._client = self._connect(timeout)
            weakref.finalize(self, self._client.connection_pool.disconnect)
        except ValueError as error:
            raise ValueError(
                f"{self.url!r} is not a Redis address ({error}); use redis://HOST:PORT/DATABASE, rediss://... for "
                "TLS, or unix://PATH"
            ) from None

    def _connect(self, seconds: float) -> Any:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        options: dict[str, Any] = {}
        password = os.environ.get(_PASSWORD_VARIABLE)
        if password and urlsplit(self._url).password is None and "password=" not in self._url:
            options["password"] = password
        # Without its health check: a lost connection is replaced, and PING would be one more right of the user.
        return Redis.from_url(
            self._url, socket_timeout=seconds, socket_connect_timeout=seconds,
            retry=Retry(NoBackoff(), 0), protocol=2, **options,
        )  # fmt: skip

    def run(self, ask: Callable[[Any], Any], operation: str, within: Deadline | None = None) -> Any:
        """Return what ``ask`` gets from the client; it is asked again for a while if the connection is lost.

        Args:
            ask: may run twice: if its answer was lost, it is run again.
            operation: for messages.
            within: ends the waits sooner than the timeout.

        Raises:
            BoundaryError: it was lost, refused, or not answered in time; names the URL.
        """
        from redis import exceptions

        deadline = Deadline.after(self._timeout) if within is None else within.sooner(self._timeout)
        short = within is not None and within.remaining() < self._timeout
        pauses = iter(_PAUSES)
        while True:
            deadline.check(peer=self.url, operation=operation)
            client = self._connect(deadline.remaining()) if short else self._client
            try:
                return ask(client)
            except exceptions.TimeoutError:
                raise deadline.error(peer=self.url, operation=operation) from None
            except exceptions.RedisError as error:
                problem = self._explain(error)
                problem.peer, problem.operation, problem.elapsed = self.url, operation, deadline.elapsed()
                pause = next(pauses, None) if isinstance(problem, (PeerLost, Overloaded)) else None
                if pause is None or pause >= deadline.remaining():
                    raise problem from error
            finally:
                if short:
                    client.connection_pool.disconnect()
            self.close()  # those were made before the server went away
            time.sleep(pause)

    def close(self) -> None:
        """Close the connections; the next call makes new ones."""
        self._client.connection_pool.disconnect()

    @staticmethod
    def _explain(error: Exception) -> BoundaryError:
        from redis import exceptions

        if isinstance(
            error, (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError)
        ):
            return Unauthorized(
                f"Redis rejected this user or password ({error}); put them into the URL, redis://USER:PASSWORD@HOST, "
                f"or the password into {_PASSWORD_VARIABLE}"
            )
        if isinstance(error, (exceptions.BusyLoadingError, exceptions.OutOfMemoryError)):
            return Overloaded(f"Redis has no room or still loads its data ({error}); try again later")
        if isinstance(error, exceptions.ConnectionError):
            return PeerLost(
                f"no Redis server answers there ({error}); start redis-server, or give the address of a running one"
            )
        return RemoteError(f"Redis answered with an error: {error}")


# The prefixes of a uid, longest first.
_PREFIXES = """
local function prefixes(uid)
  local found = {}
  local prefix = string.match(uid, '^(.*)%.%d+$')
  while prefix do
    found[#found + 1] = prefix
    prefix = string.match(prefix, '^(.*)%.%d+$')
  end
  return found
end
"""
# (space, endpoint, ttl, then uids)
_ANNOUNCE = (
    _PREFIXES
    + """
local space, endpoint, ttl = ARGV[1], ARGV[2], ARGV[3]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
for i = 4, #ARGV do
  redis.call('SET', space .. ':uid:' .. ARGV[i], endpoint, 'PX', ttl)
  for _, prefix in ipairs(prefixes(ARGV[i])) do
    local below = space .. ':below:' .. prefix
    redis.call('ZADD', below, string.format('%d', now + ttl), ARGV[i])
    redis.call('ZREMRANGEBYSCORE', below, '-inf', string.format('%d', now))
    local last = redis.call('ZREVRANGE', below, 0, 0, 'WITHSCORES')
    if last[2] then redis.call('PEXPIREAT', below, string.format('%d', last[2])) end
  end
end
return 0
"""
)
# (space, endpoint, then uids)
_WITHDRAW = (
    _PREFIXES
    + """
local space, endpoint = ARGV[1], ARGV[2]
for i = 3, #ARGV do
  local key = space .. ':uid:' .. ARGV[i]
  if redis.call('GET', key) == endpoint then
    redis.call('DEL', key)
    for _, prefix in ipairs(prefixes(ARGV[i])) do redis.call('ZREM', space .. ':below:' .. prefix, ARGV[i]) end
  end
end
return 0
"""
)


class RedisDirectory:
    """Endpoints of services by uid, kept in a Redis.

    Used like a ``Directory``, for any ``directory`` argument::

        directory = ab.RedisDirectory("redis://10.0.0.5:6379", keys="keys")
        with ab.ExpertServer(
            backends, listen="tcp://10.0.0.1:0", directory=directory, keys="keys"
        ):
            ...

    Args:
        url: ``redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE]``, ``rediss://...`` with TLS, or ``unix://PATH`` of Redis'
            own socket. Without a password in it, the one in ``ANABRANCH_REDIS_PASSWORD``.
        timeout: seconds that a request may take.
        role: whose certificate names the job; ``"experts"`` announces, others look up.
        keys: the directory of certificates; by default the one in ``ANABRANCH_KEYS``.
        insecure: ignore ``ANABRANCH_KEYS``.

    It can be pickled, with its password.

    Raises:
        ValueError: a malformed URL; keys that are missing or damaged.
        ModuleNotFoundError: without the ``redis`` extra.
        Unauthorized: from the methods, for a wrong password, or a role that may not announce.
        BoundaryError: from the methods, if Redis does not answer or refuses.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 10.0,
        role: str = "worker",
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        check_seconds(timeout=timeout)
        folder = None if insecure and keys is None else resolve_keys(keys)
        self._arguments = url, timeout, role, folder
        self._within: Deadline | None = None
        self._parts  # noqa: B018 - makes them, which checks the arguments

    @property
    def endpoint(self) -> str:
        """The URL, without user, password and options."""
        return self._parts.link.url

    def within(self, deadline: Deadline) -> RedisDirectory:
        """Return the same directory, with every wait ended by ``deadline``."""
        same = copy.copy(self)
        same._within, same._parts = deadline, self._parts
        return same

    def announce(self, uids: Iterable[str], endpoint: str, ttl: float) -> None:
        """Announce that ``endpoint`` serves ``uids`` for the next ``ttl`` seconds.

        Raises:
            Unauthorized: our role may not announce one of ``uids``; none is announced.
        """
        check_ttl(ttl)
        checked = [check_uid(uid) for uid in uids]
        check_kind(checked, self._parts.peer)
        check_announced(endpoint, self._parts.peer)
        for some in portions(checked):
            self._eval("announce", _ANNOUNCE, self._parts.own, endpoint, max(1, round(ttl * 1000)), *some)

    def withdraw(self, uids: Iterable[str], endpoint: str) -> None:
        """Announce that ``endpoint`` no longer serves ``uids``."""
        for some in portions(uids):
            self._eval("withdraw", _WITHDRAW, self._parts.own, endpoint, *some)

    def lookup(self, uids: Iterable[str]) -> dict[str, str]:
        """Return the endpoint of each of ``uids`` that is announced; the others are left out."""
        parts = self._parts
        endpoints: dict[str, str] = {}
        for some in portions(uids):
            keys = [f"{space}:uid:{uid}" for space in parts.spaces for uid in some]
            entries = self._run("lookup", methodcaller("mget", keys)) if keys else []
            for uid, entry in zip([*some] * len(parts.spaces), entries, strict=True):
                if entry is not None:
                    try:
                        endpoint = entry.decode(errors="replace")
                        check_announced(endpoint, parts.peer)
                        endpoints[uid] = endpoint
                    except ValueError as error:  # written past announce
                        _log.warning("the directory's entry of %s is not used: %s", uid, error)
        return endpoints

    def active(self, prefixes: Iterable[str]) -> dict[str, list[int]]:
        """Return for each prefix the indices, in order, that follow it in the announced uids."""
        names = [check_prefix(prefix) for prefix in prefixes]
        spaces = self._parts.spaces

        def ask(client: Any) -> list[Any]:
            pipeline = client.pipeline(transaction=False).time()
            for space in spaces:
                for name in names:
                    pipeline.zrange(f"{space}:below:{name}", 0, -1, withscores=True)
            return list(pipeline.execute())

        (seconds, micros), *members = self._run("active", ask)
        now = seconds * 1000 + micros // 1000
        indices: dict[str, set[int]] = {name: set() for name in names}
        for name, uids in zip(names * len(spaces), members, strict=True):
            indices[name] |= {int(uid[len(name) + 1 :].split(b".")[0]) for uid, expires in uids if expires > now}
        return {name: sorted(some) for name, some in indices.items()}

    def announced(self) -> list[Announcement]:
        """Return what is announced, by uid."""
        spaces = self._parts.spaces

        def ask(client: Any) -> dict[str, int]:
            keys = [key for space in spaces for key in client.scan_iter(f"{space}:uid:*", 1000)]
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                pipeline.pttl(key)
            uids = [key.rpartition(b":")[2].decode(errors="replace") for key in keys]
            return dict(zip(uids, pipeline.execute(), strict=True))

        left = self._run("announced", ask)
        endpoints = self.lookup(uid for uid in sorted(left) if UID.fullmatch(uid))
        return [Announcement(uid, endpoint, max(left[uid], 0) / 1000) for uid, endpoint in endpoints.items()]

    def close(self) -> None:
        """Close the connections; the next call makes new ones."""
        if "_parts" in vars(self):
            self._parts.link.close()

    def _eval(self, what: str, script: str, *words: object) -> Any:
        return self._run(what, methodcaller("eval", script, 0, *words))

    def _run(self, what: str, ask: Callable[[Any], Any]) -> Any:
        return self._parts.link.run(ask, f"directory.{what}", self._within)

    @functools.cached_property
    def _parts(self) -> _Parts:
        # Made again by whoever unpickles it and uses it: where a model is only loaded, there may be no keys.
        return _Parts(*self._arguments)

    def __repr__(self) -> str:
        return f"RedisDirectory({self.endpoint!r})"

    def __deepcopy__(self, memo: dict[int, object]) -> RedisDirectory:
        # A copied model uses the same services.
        return self

    def __getstate__(self) -> dict[str, object]:
        return {"_arguments": self._arguments, "_within": None}


class _Parts:
    """The parts of a directory that belong to one process.

    Attributes:
        spaces: the visible spaces; a later one takes precedence.
        own: the space of our announcements.
    """

    def __init__(self, url: str, timeout: float, role: str, keys: Path | None) -> None:
        if keys is not None:
            check_keys(keys, role)
        self.link = RedisLink(url, timeout)
        self.peer = Peer("", role=None if keys is None else role, plain=not is_local(url))
        jobs = [] if keys is None else dict.fromkeys([EVERY_JOB, job_of_keys(keys, role)])
        self.spaces = [f"{{anabranch:{name}}}" for name in jobs] or ["{anabranch}"]
        self.own = self.spaces[-1]
