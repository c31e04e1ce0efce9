"""The directory of experts: announced with a time to live, looked up by uid, searched by prefix.

An expert's server renews the announcement of its uids; a uid that is no longer announced expires, so nobody needs to
notice that a server died. The table is in one process's memory; ``DirectoryServer`` serves it to others.

Over a network no announcement is trusted unchecked: a role announces only its own kind, at an endpoint that others can
reach; a uid belongs to the certificate that announced it first, until it expires; and each job sees its own uids
and those of servers that serve every job.
"""

from __future__ import annotations

import copy
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import nsmallest
from types import TracebackType
from typing import Any

from anabranch.deadline import Deadline
from anabranch.errors import SchemaError, Unauthorized
from anabranch.job import DirectoryLike as DirectoryLike
from anabranch.transport import Call, Client, Peer, Request, Server, ServerStatistics, Transport, Verb, pack, unpack
from anabranch.transport.announcements import (
    Announcement,
    check_announced,
    check_kind,
    check_prefix,
    check_ttl,
    check_uid,
    portions,
    prefixes_of,
)
from anabranch.transport.certificates import EVERY_JOB, resolve_keys
from anabranch.transport.client import ModuleClient
from anabranch.transport.endpoints import TcpEndpoint, parse_endpoint
from anabranch.transport.redis_directory import RedisDirectory, is_redis_url, shown_url

_SERVICES = frozenset({"experts"})
# This many announcements, whatever their endpoints, fit into an answer.
_PAGE = 128


@dataclass(slots=True)
class _Entry:
    endpoint: str
    expires: float
    owner: str | None = None


class _Table:
    """The announcements of one job."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.token = uuid.uuid4().hex
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._indices: dict[str, list[int]] | None = None
        """The indices behind each prefix, in order; ``None`` once uids have come or gone."""
        # A lower bound of all expiries, not the exact minimum, because every renewal extends one.
        self._sweep_at = float("inf")

    def __reduce__(self) -> tuple[Callable[[str], _Table | None], tuple[str]]:
        _pickled[self.token] = self
        return _unpickled, (self.token,)

    def announce(self, uids: Iterable[str], endpoint: str, ttl: float, owner: str | None = None) -> None:
        check_ttl(ttl)
        checked = [check_uid(uid) for uid in uids]
        with self._lock:
            now = self._sweep()
            for uid in checked:
                entry = self._entries.get(uid)
                # ``None`` is this host's user, who may replace any.
                if owner is not None and entry is not None and entry.owner != owner:
                    left = f"{entry.expires - now:.0f} s more"
                    raise Unauthorized(f"{uid} was announced with another certificate, which holds it for {left}")
            self._sweep_at = min(self._sweep_at, now + ttl)
            for uid in checked:
                if uid not in self._entries:
                    self._indices = None
                self._entries[uid] = _Entry(endpoint, now + ttl, owner)

    def withdraw(self, uids: Iterable[str], endpoint: str, owner: str | None = None) -> None:
        with self._lock:
            for uid in uids:
                entry = self._entries.get(uid)
                if entry is not None and entry.endpoint == endpoint and owner in (None, entry.owner):
                    del self._entries[uid]
                    self._indices = None

    def lookup(self, uids: Iterable[str]) -> dict[str, str]:
        with self._lock:
            self._sweep()
            return {uid: self._entries[uid].endpoint for uid in uids if uid in self._entries}

    def active(self, prefixes: Iterable[str]) -> dict[str, list[int]]:
        with self._lock:
            self._sweep()
            if self._indices is None:
                below: dict[str, set[int]] = {}
                for uid in self._entries:
                    for prefix, index in prefixes_of(uid):
                        below.setdefault(prefix, set()).add(index)
                self._indices = {prefix: sorted(indices) for prefix, indices in below.items()}
            return {prefix: [*self._indices.get(check_prefix(prefix), [])] for prefix in prefixes}

    def announced(self, after: str) -> list[Announcement]:
        """Return the first announcements of uids behind ``after``, by uid."""
        with self._lock:
            now = self._sweep()
            uids = nsmallest(_PAGE, [uid for uid in self._entries if uid > after])
            entries = [(uid, self._entries[uid]) for uid in uids]
            return [Announcement(uid, entry.endpoint, entry.expires - now) for uid, entry in entries]

    def _sweep(self) -> float:
        """Drop expired entries, which may never be looked up; return the time."""
        now = self._clock()
        if now >= self._sweep_at:
            self._entries = {uid: entry for uid, entry in self._entries.items() if entry.expires > now}
            self._sweep_at = min((entry.expires for entry in self._entries.values()), default=float("inf"))
            self._indices = None
        return now


_pickled: weakref.WeakValueDictionary[str, _Table] = weakref.WeakValueDictionary()
"""The tables that were pickled in this process: unpickled here they are the same."""


def _unpickled(token: str) -> _Table | None:
    return _pickled.get(token)


class Directory:
    """Endpoints of experts by uid: this process's own table, or that of a ``DirectoryServer``.

    >>> directory = Directory()
    >>> directory.announce(["ffn.0.1", "ffn.2.0"], "unix:/run/experts", ttl=30.0)
    >>> directory.lookup(["ffn.0.1", "ffn.9.9"])
    {'ffn.0.1': 'unix:/run/experts'}
    >>> directory.active(["ffn", "ffn.2"])
    {'ffn': [0, 2], 'ffn.2': [0]}

    Args:
        endpoint: of a ``DirectoryServer``; ``None`` for a table of this process.
        timeout: seconds that a request to a server may take.
        clock: seconds for times to live, of a table of this process.
        client: sends the requests to the server; a new one by default, with ``keys`` and ``insecure``.

    One that has an endpoint can be pickled. One of this process's memory is the same where it is unpickled in this
    process, and refuses to be used in another.

    Raises:
        ValueError: the URL of a Redis; from every method, for an invalid uid, prefix or time to live.
        BoundaryError: from every method, if the server does not answer.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        timeout: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        client: Client | None = None,
        role: str = "worker",
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        if endpoint is not None and is_redis_url(endpoint):
            raise ValueError(f"{shown_url(endpoint)} is a Redis server; use anabranch.RedisDirectory(url)")
        if endpoint is not None:
            secured = client is not None or insecure or resolve_keys(keys) is not None
            if isinstance(parse_endpoint(endpoint), TcpEndpoint) and not secured:
                raise ValueError(
                    f"{endpoint} is reached over TCP, which takes certificates: give keys=DIR of `anabranch keys DIR`, "
                    "or set ANABRANCH_KEYS; on a network that you trust insecure=True"
                )
        self.endpoint = endpoint
        self._timeout = timeout
        self._within: Deadline | None = None
        self._memory = _Table(clock) if endpoint is None else None
        self._module_client = (
            None if endpoint is None else ModuleClient(client, role=role, keys=keys, insecure=insecure)
        )

    def within(self, deadline: Deadline) -> Directory:
        """Return the same directory, with every wait ended by ``deadline``."""
        same = copy.copy(self)
        same._within = deadline
        return same

    def __deepcopy__(self, memo: dict[int, object]) -> Directory:
        # A copied model calls the same experts.
        return self

    def announce(self, uids: Iterable[str], endpoint: str, ttl: float) -> None:
        """Announce that ``endpoint`` serves ``uids`` for the next ``ttl`` seconds; a later announcement of a uid
        replaces it.
        """
        check_ttl(ttl)
        for some in portions(check_uid(uid) for uid in uids):
            self._ask("announce", some, endpoint, ttl)

    def withdraw(self, uids: Iterable[str], endpoint: str) -> None:
        """Announce that ``endpoint`` no longer serves ``uids``."""
        for some in portions(uids):
            self._ask("withdraw", some, endpoint)

    def lookup(self, uids: Iterable[str]) -> dict[str, str]:
        """Return the endpoint of each of ``uids`` that is announced; the others are left out."""
        answers = [self._ask("lookup", some, answer=dict[str, str]) for some in portions(uids)]
        return {uid: endpoint for answer in answers for uid, endpoint in answer.items()}

    def active(self, prefixes: Iterable[str]) -> dict[str, list[int]]:
        """Return for each prefix the indices, in order, that follow it in the announced uids."""
        some = portions(check_prefix(prefix) for prefix in prefixes)
        answers = [self._ask("active", one, answer=dict[str, list[int]]) for one in some]
        return {prefix: indices for answer in answers for prefix, indices in answer.items()}

    def announced(self) -> Iterator[Announcement]:
        """Return what is announced, by uid."""
        page = [Announcement("", "", 0.0)]
        while page:
            page = self._ask("announced", page[-1].uid, answer=list[Announcement])
            yield from page

    def _ask(self, verb: str, *question: object, answer: Any = None) -> Any:
        """Return what the table, or the server, answers, of the type ``answer``."""
        if self._module_client is None or self.endpoint is None:
            if self._memory is None:
                cure = "give modules that go to other processes the endpoint of a DirectoryServer"
                raise ValueError(f"this directory was in the memory of the process that pickled it; {cure}")
            return getattr(self._memory, verb)(*question)
        whole = self._within
        deadline = Deadline.after(self._timeout) if whole is None else whole.sooner(self._timeout)
        payload = pack(question[0] if len(question) == 1 else question)
        request = Request(self.endpoint, f"directory.{verb}", payload=payload, role="directory")
        return unpack(self._module_client.client.call(request, deadline).payload, answer)


def as_directory(directory: DirectoryLike | str, **client: object) -> DirectoryLike:
    """Return ``directory`` itself, or the one at the endpoint or Redis URL that it names."""
    if not isinstance(directory, str):
        check_directory(directory)
        return directory
    return (RedisDirectory if is_redis_url(directory) else Directory)(directory, **client)  # type: ignore[arg-type]


def check_directory(directory: object) -> None:
    """Raise ``TypeError`` for what is no directory."""
    if not hasattr(directory, "lookup"):
        raise TypeError(
            f"experts are found by a Directory or an endpoint, got {directory!r}; in a job that is what "
            "job.serve(make_backends) returns"
        )


def within(directory: DirectoryLike, deadline: Deadline) -> DirectoryLike:
    """Return ``directory``, bounded by ``deadline`` if it is one of anabranch's."""
    return directory.within(deadline) if isinstance(directory, Directory | RedisDirectory) else directory


class DirectoryServer:
    """Serves a directory while its ``with`` block runs.

    >>> with DirectoryServer() as server:
    ...     directory = Directory(server.endpoint)
    ...     directory.announce(["ffn.0"], "unix:/run/experts", ttl=30.0)
    ...     directory.active(["ffn"])
    {'ffn': [0]}

    Args:
        listen: ``unix:PATH``, ``tcp://HOST:PORT``, or ``None`` for a new Unix socket.
        keys: the directory of certificates, for TCP.
        insecure: allow TCP without certificates.
        heartbeat: seconds between beats.
        transport: the network; sockets by default.
        clock: seconds for times to live.

    Raises:
        ValueError: an endpoint that is malformed or taken; TCP without keys.
    """

    def __init__(
        self,
        listen: str | None = None,
        *,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        heartbeat: float = 1.0,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._verbs = _DirectoryVerbs(clock)
        self._server = Server(
            self._verbs.verbs(),
            listen=listen,
            role="directory",
            keys=keys,
            insecure=insecure,
            heartbeat=heartbeat,
            transport=transport,
        )

    @property
    def endpoint(self) -> str:
        """The address for ``Directory(endpoint)``."""
        return self._server.endpoint

    @property
    def directory(self) -> Directory:
        """A directory of this table, for use in this process."""
        mine = Directory()
        mine._memory = self._verbs.tables[EVERY_JOB]
        return mine

    def transport_statistics(self) -> ServerStatistics:
        """Counters of its requests and connections since it started."""
        return self._server.statistics()

    def checkpoint(self) -> None:
        """Nothing: experts announce themselves again to a directory that was restarted."""

    def __enter__(self) -> DirectoryServer:
        self._server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.__exit__(kind, error, trace)


class _DirectoryVerbs:
    """The verbs of a server, and a table for each job; apart from the server, which has them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.tables: dict[str, _Table] = {EVERY_JOB: _Table(clock)}

    def verbs(self) -> list[Verb]:
        return [
            Verb("directory.announce", self._announce, roles=_SERVICES, quick=True),
            Verb("directory.withdraw", self._withdraw, roles=_SERVICES, quick=True),
            Verb("directory.lookup", self._lookup, quick=True),
            Verb("directory.active", self._active, quick=True),
            Verb("directory.announced", self._announced, quick=True),
        ]

    def _announce(self, call: Call) -> None:
        uids, endpoint, ttl = unpack(call.payload, tuple[list[str], str, float])
        peer = call.peer
        try:
            check_kind(uids, peer)
            check_announced(endpoint, peer)
            self._table_of(peer).announce(uids, endpoint, ttl, peer.certificate)
        except ValueError as error:
            raise SchemaError(str(error)) from None
        call.reply(payload=pack(None))

    def _withdraw(self, call: Call) -> None:
        uids, endpoint = unpack(call.payload, tuple[list[str], str])
        self._table_of(call.peer).withdraw(uids, endpoint, call.peer.certificate)
        call.reply(payload=pack(None))

    def _lookup(self, call: Call) -> None:
        uids = unpack(call.payload, list[str])
        endpoints = [table.lookup(uids) for table in self._seen_by(call.peer)]
        call.reply(payload=pack(endpoints[0] | endpoints[-1]))

    def _active(self, call: Call) -> None:
        prefixes = unpack(call.payload, list[str])
        tables = self._seen_by(call.peer)
        by_table = [table.active(prefixes) for table in tables]
        joined = {prefix: sorted({i for mine in by_table for i in mine[prefix]}) for prefix in prefixes}
        call.reply(payload=pack(joined))

    def _announced(self, call: Call) -> None:
        after = unpack(call.payload, str)
        seen = {one.uid: one for table in self._seen_by(call.peer) for one in table.announced(after)}
        call.reply(payload=pack([seen[uid] for uid in sorted(seen)[:_PAGE]]))

    def _table_of(self, peer: Peer) -> _Table:
        """Return the announcements of the peer's job."""
        return self.tables.setdefault(peer.job or EVERY_JOB, _Table(self._clock))

    def _seen_by(self, peer: Peer) -> list[_Table]:
        """Return the tables that ``peer`` sees: that of every job, then its own job's, which takes precedence."""
        every = self.tables[EVERY_JOB]
        own = self.tables.get(peer.job or EVERY_JOB, every)
        return [every] if own is every else [every, own]
