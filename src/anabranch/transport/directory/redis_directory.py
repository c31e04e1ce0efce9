"""``RedisDirectory``: the directory of services in a Redis, which outlives every anabranch process.

::

    announce ──> Redis, where it expires by itself
    look up  <── an endpoint that could be announced <── Redis

Redis stores any entry, and knows no certificates. With keys, each job has its own space, and whoever is called then
still proves role and job by its certificate. Without keys there is one space.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from anabranch.deadline import Deadline, check_seconds
from anabranch.transport.directory import redis_scripts as scripts
from anabranch.transport.directory.announced_endpoint import check_announced
from anabranch.transport.directory.redis_link import RedisLink, Script
from anabranch.transport.directory.rules import check_kind, check_ttl, portions
from anabranch.transport.directory.uids import check_prefix, check_uid
from anabranch.transport.network.certificates import EVERY_JOB, check_keys, job_of_keys, resolve_keys
from anabranch.transport.network.streams import Peer

__all__ = ["RedisDirectory"]

_PLAIN = "{anabranch}"
_log = logging.getLogger("anabranch.transport")


class RedisDirectory:
    """Endpoints of services by uid, kept in a Redis.

    Used like a ``Directory``, for any ``directory`` argument::

        directory = ab.RedisDirectory("redis://10.0.0.5:6379", keys="keys")
        with ab.ExpertServer(backends, listen="tcp://10.0.0.1:0", directory=directory, keys="keys"):
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
        BoundaryError: from the methods, if Redis does not answer, is too old or refuses.
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
        self._options = _Options(url, role, None if insecure and keys is None else resolve_keys(keys))
        self._timeout = timeout
        self._within: Deadline | None = None
        self._made: _Parts | None = self._options.make()

    @property
    def endpoint(self) -> str:
        """The URL, without user, password and options."""
        return self._parts.link.url

    def within(self, deadline: Deadline) -> RedisDirectory:
        """Return the same directory, with every wait ended by ``deadline``."""
        same = copy.copy(self)
        same._within = deadline
        return same

    def announce(self, uids: Iterable[str], endpoint: str, ttl: float) -> None:
        """Announce that ``endpoint`` serves ``uids`` for the next ``ttl`` seconds.

        Raises:
            Unauthorized: our role may not announce one of ``uids``; none is announced.
        """
        check_ttl(ttl)
        parts = self._parts
        checked = [check_uid(uid) for uid in uids]
        check_kind(checked, parts.peer)
        parts.check_endpoint(endpoint)
        milliseconds = max(1, round(ttl * 1000))
        for some in portions(checked):
            self._run(scripts.ANNOUNCE, [parts.own, endpoint, milliseconds, *some], "announce")

    def withdraw(self, uids: Iterable[str], endpoint: str) -> None:
        """Announce that ``endpoint`` no longer serves ``uids``."""
        for some in portions(uids):
            self._run(scripts.WITHDRAW, [self._parts.own, endpoint, *some], "withdraw")

    def claim(self, uids: Iterable[str], claimer: str, ttl: float) -> list[str]:
        """Claim for ``claimer`` those of ``uids`` that are neither announced nor claimed, and return them."""
        check_ttl(ttl)
        parts = self._parts
        checked = [check_uid(uid) for uid in uids]
        check_kind(checked, parts.peer)
        found: list[str] = []
        for some in portions(checked):
            words = [parts.own, parts.spaces[0], claimer, max(1, round(ttl * 1000)), *some]
            found += [uid.decode() for uid in self._run(scripts.CLAIM, words, "claim")]
        return found

    def release(self, uids: Iterable[str], claimer: str) -> None:
        """Release those of ``uids`` that ``claimer`` has claimed."""
        for some in portions(uids):
            self._run(scripts.RELEASE, [self._parts.own, claimer, *some], "release")

    def lookup(self, uids: Iterable[str]) -> dict[str, str]:
        """Return the endpoint of each of ``uids`` that is announced; the others are left out."""
        found: dict[str, str] = {}
        for some in portions(uids):
            for space in self._parts.spaces:
                found |= self._looked_up(some, space)
        return found

    def active(self, prefixes: Iterable[str]) -> dict[str, list[int]]:
        """Return for each prefix the indices, in order, that follow it in the announced uids."""
        found: dict[str, list[int]] = {}
        for some in portions(check_prefix(prefix) for prefix in prefixes):
            for space in self._parts.spaces:
                for prefix, indices in zip(some, self._run(scripts.ACTIVE, [space, *some], "active"), strict=True):
                    found[prefix] = sorted({*found.get(prefix, ()), *(int(index) for index in indices)})
        return found

    def close(self) -> None:
        """Close the connections; the next call makes new ones."""
        if self._made is not None:
            self._made.link.close()

    def _looked_up(self, uids: Sequence[str], space: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for uid, entry in zip(uids, self._run(scripts.LOOKUP, [space, *uids], "lookup"), strict=True):
            if entry is not None:
                endpoint = entry.decode(errors="replace")
                try:
                    self._parts.check_endpoint(endpoint)
                    found[uid] = endpoint
                except ValueError as error:  # written past announce
                    _log.warning("the directory's entry of %s is not used: %s", uid, error)
        return found

    def _run(self, script: Script, arguments: Sequence[object], what: str) -> Any:
        whole = self._within
        deadline = Deadline.after(self._timeout) if whole is None else whole.sooner(self._timeout)
        return self._parts.link.run(script, arguments, f"directory.{what}", deadline)

    @property
    def _parts(self) -> _Parts:
        if self._made is None:  # unpickled: where a model is only loaded, there may be no keys
            self._made = self._options.make()
        return self._made

    def __repr__(self) -> str:
        return f"RedisDirectory({self.endpoint!r})"

    def __deepcopy__(self, memo: dict[int, object]) -> RedisDirectory:
        # A copied model uses the same services.
        return self

    def __reduce__(self) -> tuple[Callable[..., RedisDirectory], tuple[_Options, float]]:
        return _unpickled, (self._options, self._timeout)


def _unpickled(options: _Options, timeout: float) -> RedisDirectory:
    made = RedisDirectory.__new__(RedisDirectory)
    made._options, made._timeout, made._within, made._made = options, timeout, None, None
    return made


@dataclass(frozen=True, slots=True, repr=False)
class _Options:
    url: str
    role: str
    keys: Path | None

    def make(self) -> _Parts:
        if self.keys is None:
            return _Parts(RedisLink(self.url), None, None)
        check_keys(self.keys, self.role)
        return _Parts(RedisLink(self.url), self.role, job_of_keys(self.keys, self.role))


class _Parts:
    """The parts of a directory that belong to one process.

    Attributes:
        spaces: the visible spaces; a later one takes precedence.
        own: the space of our announcements.
    """

    def __init__(self, link: RedisLink, role: str | None, job: str | None) -> None:
        self.link = link
        self.peer = Peer("", role=role, plain=not link.is_local)
        self.check_endpoint = partial(check_announced, peer=self.peer)
        jobs = [] if job is None else dict.fromkeys([EVERY_JOB, job])
        self.spaces = [f"{{anabranch:{name}}}" for name in jobs] or [_PLAIN]
        self.own = self.spaces[-1]
