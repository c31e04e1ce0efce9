"""Who serves which expert, until when: announced with a time to live, looked up by uid, searched by prefix.

An expert's server announces its uids again and again; what is not announced any more is forgotten when its time is
over, so a server that dies needs nobody to notice. The table is one process's memory; ``DirectoryServer`` serves it to
others.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from anabranch.deadline import Deadline
from anabranch.experts.uids import check_prefix, check_uid, prefixes_of
from anabranch.job import DirectoryLike
from anabranch.transport import Call, Client, Request, Server, Transport, Verb, pack, unpack

__all__ = ["Directory", "DirectoryLike", "DirectoryServer", "as_directory", "within"]

# So many names, at the most characters a name has, fit into a header.
_NAMES_A_REQUEST = 500
_SERVICES = frozenset({"experts", "parameters", "directory"})
_T = TypeVar("_T")


@dataclass(slots=True)
class _Entry:
    endpoint: str
    expires: float


class _Table:
    """The announcements of one process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._below: dict[str, dict[int, set[str]]] = {}

    def announce(self, uids: Iterable[str], endpoint: str, ttl: float) -> None:
        _check_ttl(ttl)
        checked = [check_uid(uid) for uid in uids]
        with self._lock:
            expires = self._clock() + ttl
            for uid in checked:
                self._entries[uid] = _Entry(endpoint, expires)
                for prefix, index in prefixes_of(uid):
                    self._below.setdefault(prefix, {}).setdefault(index, set()).add(uid)

    def withdraw(self, uids: Iterable[str], endpoint: str) -> None:
        with self._lock:
            for uid in uids:
                entry = self._entries.get(uid)
                if entry is not None and entry.endpoint == endpoint:
                    self._remove(uid)

    def lookup(self, uids: Iterable[str]) -> dict[str, str]:
        with self._lock:
            return {uid: self._entries[uid].endpoint for uid in uids if self._alive(uid)}

    def active(self, prefixes: Iterable[str]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        with self._lock:
            for prefix in prefixes:
                below = self._below.get(check_prefix(prefix), {})
                # Copies, because whoever is found not to be alive is removed.
                found[prefix] = sorted(
                    index for index, uids in list(below.items()) if any(self._alive(uid) for uid in list(uids))
                )
        return found

    def _alive(self, uid: str) -> bool:
        entry = self._entries.get(uid)
        if entry is None:
            return False
        if entry.expires <= self._clock():
            self._remove(uid)
            return False
        return True

    def _remove(self, uid: str) -> None:
        del self._entries[uid]
        for prefix, index in prefixes_of(uid):
            below = self._below[prefix]
            below[index].discard(uid)
            if not below[index]:
                del below[index]
            if not below:
                del self._below[prefix]


class Directory:
    """Who serves which expert: this process's own table, or the one that a ``DirectoryServer`` serves.

    >>> directory = Directory()
    >>> directory.announce(["ffn.0.1", "ffn.2.0"], "unix:/run/experts", ttl=30.0)
    >>> directory.lookup(["ffn.0.1", "ffn.9.9"])
    {'ffn.0.1': 'unix:/run/experts'}
    >>> directory.active(["ffn", "ffn.2"])
    {'ffn': [0, 2], 'ffn.2': [0]}

    Args:
        endpoint: of a ``DirectoryServer``; ``None`` for a table of this process.
        timeout: seconds that a question to a server may take.
        clock: seconds for times to live, of a table of this process.
        client: asks the server; one of its own by default, with ``keys`` and ``insecure``.

    Raises:
        ValueError: from every method, for what is no uid, prefix or time to live.
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
        self.endpoint = endpoint
        self._timeout = timeout
        self._within: Deadline | None = None
        self._table = _Table(clock)
        if client is None and endpoint is not None:
            from anabranch.experts.connections import shared_client

            client = shared_client(role=role, keys=keys, insecure=insecure)
        self._client = client

    def within(self, deadline: Deadline) -> Directory:
        """The same directory, whose answers are not waited for beyond ``deadline``."""
        same = copy.copy(self)
        same._within = deadline
        return same

    def announce(self, uids: Iterable[str], endpoint: str, ttl: float) -> None:
        """``endpoint`` serves ``uids`` for the next ``ttl`` seconds; the last to announce a uid has it."""
        if self.endpoint is None:
            self._table.announce(uids, endpoint, ttl)
            return
        _check_ttl(ttl)
        for some in _portions(check_uid(uid) for uid in uids):
            self._ask("directory.announce", (some, endpoint, ttl), type(None))

    def withdraw(self, uids: Iterable[str], endpoint: str) -> None:
        """``endpoint`` does not serve ``uids`` any more."""
        if self.endpoint is None:
            self._table.withdraw(uids, endpoint)
            return
        for some in _portions(uids):
            self._ask("directory.withdraw", (some, endpoint), type(None))

    def lookup(self, uids: Iterable[str]) -> dict[str, str]:
        """The endpoint of each of ``uids`` that somebody serves; the others are left out."""
        if self.endpoint is None:
            return self._table.lookup(uids)
        found: dict[str, str] = {}
        for some in _portions(uids):
            found.update(self._ask("directory.lookup", some, dict[str, str]))
        return found

    def active(self, prefixes: Iterable[str]) -> dict[str, list[int]]:
        """For each prefix the indices, in order, that follow it in the uids that somebody serves."""
        if self.endpoint is None:
            return self._table.active(prefixes)
        found: dict[str, list[int]] = {}
        for some in _portions(check_prefix(prefix) for prefix in prefixes):
            found.update(self._ask("directory.active", some, dict[str, list[int]]))
        return found

    def _ask(self, verb: str, question: object, kind: type[_T]) -> _T:
        assert self.endpoint is not None
        assert self._client is not None
        request = Request(self.endpoint, verb, payload=pack(question))
        whole = self._within
        deadline = Deadline.after(self._timeout) if whole is None else whole.sooner(self._timeout)
        return unpack(self._client.call(request, deadline).payload, kind)


def as_directory(directory: DirectoryLike | str, **client: object) -> DirectoryLike:
    """``directory`` itself, or the one that is served at the endpoint it names."""
    return Directory(directory, **client) if isinstance(directory, str) else directory  # type: ignore[arg-type]


def within(directory: DirectoryLike, deadline: Deadline) -> DirectoryLike:
    """``directory``, which keeps to ``deadline`` if it is one of ours."""
    return directory.within(deadline) if isinstance(directory, Directory) else directory


def _check_ttl(ttl: float) -> None:
    if not 0 < ttl < float("inf"):
        raise ValueError(f"ttl is a finite number of seconds above 0, got {ttl!r}")


def _portions(names: Iterable[str]) -> Iterable[Sequence[str]]:
    every = list(names)
    return [every[start : start + _NAMES_A_REQUEST] for start in range(0, len(every), _NAMES_A_REQUEST)]


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
        ValueError: an endpoint that is none or is taken; TCP without keys.
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
        self._table = _Table(clock)
        verbs = [
            Verb("directory.announce", self._announce, roles=_SERVICES, quick=True),
            Verb("directory.withdraw", self._withdraw, roles=_SERVICES, quick=True),
            Verb("directory.lookup", self._lookup, quick=True),
            Verb("directory.active", self._active, quick=True),
        ]
        self._server = Server(
            verbs,
            listen=listen,
            role="directory",
            keys=keys,
            insecure=insecure,
            heartbeat=heartbeat,
            transport=transport,
        )

    @property
    def endpoint(self) -> str:
        """Where ``Directory(endpoint)`` finds it."""
        return self._server.endpoint

    @property
    def directory(self) -> Directory:
        """The same table, for this process."""
        mine = Directory()
        mine._table = self._table
        return mine

    def __enter__(self) -> DirectoryServer:
        self._server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.__exit__(kind, error, trace)

    def _announce(self, call: Call) -> None:
        uids, endpoint, ttl = unpack(call.payload, tuple[list[str], str, float])
        self._table.announce(uids, endpoint, ttl)
        call.reply(payload=pack(None))

    def _withdraw(self, call: Call) -> None:
        uids, endpoint = unpack(call.payload, tuple[list[str], str])
        self._table.withdraw(uids, endpoint)
        call.reply(payload=pack(None))

    def _lookup(self, call: Call) -> None:
        call.reply(payload=pack(self._table.lookup(unpack(call.payload, list[str]))))

    def _active(self, call: Call) -> None:
        call.reply(payload=pack(self._table.active(unpack(call.payload, list[str]))))
