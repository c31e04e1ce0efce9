"""Endpoints and schemas of a mixture's experts, and the experts avoided for a while after failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError
from anabranch.experts import wire
from anabranch.experts.client.connections import ModuleClient
from anabranch.experts.directory import DirectoryLike, within
from anabranch.experts.schema import Schema
from anabranch.transport import Answer, Client, Request

__all__ = ["ExpertFinder", "FailureBackoff"]

_PATIENCE = 2
_LONGEST_BREAK = 10.0


class FailureBackoff:
    """Avoids experts that failed twice in a row: for half a second, doubling to ten, until they answer again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: dict[str, int] = {}
        self._until: dict[str, float] = {}
        self._lock = threading.Lock()

    def failed(self, uid: str) -> None:
        """Count a failure of ``uid``: no answer, or an invalid one."""
        with self._lock:
            failures = self._failures[uid] = self._failures.get(uid, 0) + 1
            if failures >= _PATIENCE:
                self._until[uid] = self._clock() + min(0.5 * 2 ** (failures - _PATIENCE), _LONGEST_BREAK)

    def answered(self, uid: str) -> None:
        """Clear the failures of ``uid``."""
        with self._lock:
            self._failures.pop(uid, None)
            self._until.pop(uid, None)

    def now(self) -> set[str]:
        """Return the uids that are avoided now."""
        with self._lock:
            now = self._clock()
            return {uid for uid, until in self._until.items() if until > now}


class ExpertFinder:
    """Looks experts up, and remembers their schemas."""

    def __init__(self, directory: DirectoryLike, reach: ModuleClient) -> None:
        self.directory = directory
        self._module_client = reach
        self.backoff = FailureBackoff()
        self._schemas: dict[tuple[str, str], Schema] = {}
        self.any_known: tuple[str, str, Schema] | None = None
        """The uid, endpoint and schema of the expert whose schema was requested last."""

    def __reduce__(self) -> tuple[type[ExpertFinder], tuple[DirectoryLike, ModuleClient]]:
        # Cached endpoints and schemas may be stale by then.
        return ExpertFinder, (self.directory, self._module_client)

    @property
    def client(self) -> Client:
        """The client that sends the requests."""
        return self._module_client.client

    @property
    def any_schema(self) -> Schema | None:
        """The schema of any of the experts; ``None`` if none has been asked yet."""
        return None if self.any_known is None else self.any_known[2]

    def find(self, uids: Sequence[str], deadline: Deadline) -> dict[str, tuple[str, Schema]]:
        """Return the endpoint and schema of each of ``uids`` that can be reached; the others count as failed."""
        endpoints = within(self.directory, deadline).lookup(uids)
        unknown = [uid for uid, endpoint in endpoints.items() if (uid, endpoint) not in self._schemas]
        requests = [Request(endpoints[uid], wire.INFO, uid, role="experts") for uid in unknown]
        # An expert that does not send its schema cannot be called; half of the time is left for the others.
        patience = deadline.sooner(max(deadline.remaining() / 2, 1e-3))
        for uid, outcome in zip(unknown, self.client.gather(requests, patience) if requests else (), strict=True):
            self._learn(uid, endpoints[uid], outcome)
        return {
            uid: (endpoint, self._schemas[uid, endpoint])
            for uid, endpoint in endpoints.items()
            if (uid, endpoint) in self._schemas
        }

    def forget(self, uids: Iterable[str]) -> None:
        """Forgets their schemas, so that they are requested again."""
        gone = set(uids)
        self._schemas = {key: schema for key, schema in self._schemas.items() if key[0] not in gone}

    def _learn(self, uid: str, endpoint: str, outcome: object) -> None:
        if isinstance(outcome, Answer):
            try:
                schema = self._schemas[uid, endpoint] = Schema.unpack(outcome.payload)
                self.any_known = uid, endpoint, schema
            except BoundaryError:
                self.backoff.failed(uid)
        else:
            self.backoff.failed(uid)
