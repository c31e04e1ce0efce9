"""The server of experts: its devices, its saved states, and its announcements; ``verbs.py`` answers the requests."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch

from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError
from anabranch.experts import wire
from anabranch.experts.directory import DirectoryLike, as_directory
from anabranch.experts.server.backend import ExpertBackend
from anabranch.experts.server.persistence import Persistence
from anabranch.experts.server.scheduler import PoolStatistics
from anabranch.experts.server.sessions import Sessions
from anabranch.experts.server.verbs import ExpertVerbs
from anabranch.periodic import periodic
from anabranch.record.spans import mark
from anabranch.transport import Answer, Client, Limits, Request, Server, ServerStatistics, Transport
from anabranch.transport.failures import note_failure

_log = logging.getLogger("anabranch.experts")

# Announcements are renewed three times within their time to live.
_RENEWALS = 3
# Seconds for asking another server of an announced expert whether it is alive.
_GLANCE = 2.0


@dataclass(frozen=True, slots=True)
class ExpertServerStatistics:
    """Counters of an expert server since it started.

    Attributes:
        pools: statistics of each pool, by name.
        not_finite: requests refused for NaN or Inf, by peer.
        updates: updates of each expert, by uid.
        transport: requests, errors, bytes.
        sessions: open sessions of each expert, by uid.
        session_bytes: what they count of the budget.
    """

    pools: dict[str, PoolStatistics]
    not_finite: dict[str, int]
    updates: dict[str, int]
    transport: ServerStatistics
    sessions: dict[str, int] = field(default_factory=dict)
    session_bytes: int = 0


_T = TypeVar("_T")
_R = TypeVar("_R")


class ExpertServer:
    """Serves experts while its ``with`` block runs.

    >>> from anabranch.experts import ExpertBackend, RemoteExpert
    >>> from anabranch.tensors import TensorSpec
    >>> backend = ExpertBackend("double.0", torch.nn.Identity(), args_schema=[TensorSpec(2)])
    >>> with ExpertServer([backend]) as server:
    ...     RemoteExpert("double.0", server.endpoint)(torch.ones(1, 2)).detach()
    tensor([[1., 1.]])

    Args:
        backends: the experts; those on one device share its thread.
        listen: ``unix:PATH``, ``tcp://HOST:PORT``, or ``None`` for a new Unix socket.
        directory: the place to announce them: a ``Directory``, the endpoint of a ``DirectoryServer``, or the URL of a
            Redis.
        checkpoint_dir: the directory of their saved states, loaded after a restart; ``None``: no checkpoints.
        device: moves all experts there.
        checkpoint_seconds: between two savings.
        ttl: seconds for which an announcement holds; renewed three times as often.
        keys: the directory of certificates, for TCP.
        insecure: allow TCP without certificates.
        heartbeat: seconds between the beats that tell a waiting caller that the server lives.
        transport: the network; sockets by default.
        max_connections: a caller beyond it gets ``Overloaded``.
        limits: the sizes accepted from a caller in one frame.
        drain_seconds: how long leaving the block waits for calls in flight.
        session_bytes: the budget of all inference sessions: what their caches and last answers hold, at least 64 KiB
            each. Beyond it callers get ``Overloaded``.
        clock: seconds for the times to live of sessions.

    Raises:
        ValueError: no backend, two of one uid, an endpoint that is malformed or taken, TCP without keys.
        CheckpointError: a checkpoint that is damaged or of other experts, or another server saves one of them there.

    Entering announces the uids, and warns once in the log ``anabranch.experts`` if the directory lists one of them at
    another server that answers; leaving withdraws them, finishes the calls in flight, and saves.
    """

    def __init__(
        self,
        backends: Iterable[ExpertBackend],
        *,
        listen: str | None = None,
        directory: DirectoryLike | str | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        device: torch.device | str | None = None,
        checkpoint_seconds: float = 60.0,
        ttl: float = 30.0,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        heartbeat: float = 1.0,
        transport: Transport | None = None,
        max_connections: int = 512,
        limits: Limits | None = None,
        drain_seconds: float = 5.0,
        session_bytes: int = 4 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backends: dict[str, ExpertBackend] = {}
        for backend in backends:
            if backend.uid in self._backends:
                raise ValueError(f"two backends are called {backend.uid!r}")
            self._backends[backend.uid] = backend.to(device) if device is not None else backend
        if not self._backends:
            raise ValueError("a server without experts has nothing to serve; give it backends")
        if not 0 < ttl < float("inf"):
            raise ValueError(f"ttl is a finite number of seconds above 0, got {ttl!r}")
        self._directory = (
            None if directory is None else as_directory(directory, role="experts", keys=keys, insecure=insecure)
        )
        self._make_client = partial(
            Client, role="experts", retries=0, keys=keys, insecure=insecure, transport=transport
        )
        self._ttl = ttl
        self._sessions = Sessions(session_bytes, clock)
        self._verbs = ExpertVerbs(self._backends, self._sessions)
        if checkpoint_dir is not None:
            self._verbs.persistence = Persistence(
                Path(checkpoint_dir), self._backends, paused=self._verbs.paused, every=checkpoint_seconds
            )
        # The last step that may fail: it listens from here on.
        self._server = Server(
            self._verbs.verbs(),
            listen=listen,
            role="experts",
            keys=keys,
            insecure=insecure,
            heartbeat=heartbeat,
            transport=transport,
            limits=limits,
            max_connections=max_connections,
            drain_seconds=drain_seconds,
            healthy=self._verbs.healthy,
            after_round=self._verbs.submit_round,
            facts=self._verbs.facts,
        )
        self._verbs.serve_by(self._server)
        self._stack = ExitStack()

    def __repr__(self) -> str:
        """Return where it listens."""
        return f"ExpertServer({self.endpoint!r})"

    @property
    def endpoint(self) -> str:
        """The address for ``RemoteExpert``."""
        return self._server.endpoint

    def __enter__(self) -> ExpertServer:
        with ExitStack() as stack:
            # The server has listened since it was made, so close it if entering fails.
            stack.callback(self._server.close)
            if (persistence := self._verbs.persistence) is not None:
                stack.enter_context(persistence.claim())
                self._server.once.restore(persistence.load())
                stack.enter_context(persistence)
            for runtime in self._verbs.runtimes:
                stack.enter_context(runtime)
            if any(backend.session_pool is not None for backend in self._backends.values()):
                stack.enter_context(self._sessions)
            stack.enter_context(self._server)
            if self._directory is not None:
                others = _or_none(self._directory.lookup, self._backends) or {}
                self._announce()
                stack.callback(self._withdraw)
                renewing = periodic(
                    self._renew,
                    self._ttl / _RENEWALS,
                    name="anabranch-announce",
                    patience=15.0,
                    at_start=partial(_or_none, self._warn_of_others, others),
                )
                stack.enter_context(renewing)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._stack.__exit__(kind, error, trace)
        finally:
            self._verbs.close()

    def statistics(self) -> ExpertServerStatistics:
        """Counters since the start."""
        pools = [pool for backend in self._backends.values() for pool in backend.get_pools()]
        return ExpertServerStatistics(
            {pool.name: pool.statistics() for pool in pools},
            dict(self._verbs.not_finite),
            {uid: backend.updates for uid, backend in self._backends.items()},
            self._server.statistics(),
            {uid: backend.open_sessions for uid, backend in self._backends.items()},
            self._sessions.nbytes,
        )

    def transport_statistics(self) -> ServerStatistics:
        """Counters of its requests and connections since it started."""
        return self._server.statistics()

    def checkpoint(self) -> None:
        """Save every expert that was updated since it was last saved, if there is a directory for that."""
        if (persistence := self._verbs.persistence) is not None:
            persistence.save()

    # --- announcing

    def _announce(self) -> None:
        assert self._directory is not None
        self._directory.announce(self._backends, self.endpoint, self._ttl)

    def _warn_of_others(self, endpoints: Mapping[str, str]) -> None:
        """Warn of uids that other live servers had announced: updates of one expert would go to two places.

        A server restarted at a new address finds its old address listed, but nothing answers there.
        """
        others = [(uid, endpoint) for uid, endpoint in endpoints.items() if endpoint != self.endpoint]
        requests = [Request(endpoint, wire.INFO, uid, role="experts") for uid, endpoint in others]
        with self._make_client() as client:
            # Well before the announcements are to be renewed.
            outcomes = client.gather(requests, Deadline.after(min(_GLANCE, self._ttl / _RENEWALS / 2)))
        twice = [one for one, outcome in zip(others, outcomes, strict=True) if isinstance(outcome, Answer)]
        if twice:
            mark("experts.announced_twice", uids=[uid for uid, _ in twice], other=twice[0][1], endpoint=self.endpoint)
            some = ", ".join(uid for uid, _ in twice[:8]) + (f" and {len(twice) - 8} more" if twice[8:] else "")
            _log.warning(
                "%s was listed at another live server, %s, when this one announced it at %s; callers will find "
                "sometimes one, sometimes the other, and each trains on its own callers only: stop one of them, or "
                "give them different uids", some, twice[0][1], self.endpoint,
            )  # fmt: skip

    def _withdraw(self) -> None:
        assert self._directory is not None
        try:
            self._directory.withdraw(self._backends, self.endpoint)
        except BoundaryError as error:
            # An announcement that is not withdrawn expires.
            mark("experts.directory_lost", error=str(error))

    def _renew(self) -> None:
        try:
            self._announce()
        except BoundaryError as error:
            mark("experts.directory_lost", error=str(error))
        except BaseException as error:  # noqa: BLE001 - a user's own directory; the next renewal may work
            note_failure("experts.directory_lost", error)


def _or_none(function: Callable[[_T], _R], argument: _T) -> _R | None:
    """Return what ``function`` returns; an error is noted, for a missing warning must not stop a server."""
    try:
        return function(argument)
    except BaseException as error:  # noqa: BLE001 - also of a user's own directory
        note_failure("experts.not_looked_up", error)
        return None
