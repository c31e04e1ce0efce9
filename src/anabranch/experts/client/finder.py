"""Endpoints and schemas of a mixture's experts, and the experts avoided for a while after failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from anabranch.deadline import Deadline
from anabranch.errors import ProtocolError
from anabranch.experts import wire
from anabranch.experts.client.connections import ModuleClient
from anabranch.experts.directory import DirectoryLike, within
from anabranch.experts.schema import Schema
from anabranch.transport import Answer, Client, Request

__all__ = ["ExpertFinder", "FailureBackoff"]

_PATIENCE = 2
_SHORTEST_BREAK = 0.5
_LONGEST_BREAK = 10.0

Phase = Literal["forward", "cut off", "backward", "form"]


class FailureBackoff:
    """Avoids experts that failed twice in a row: for half a second, or as long as the failure took, doubling to ten
    times as long, until they answer again.

    Failures of forwards, of backwards, and of stragglers that were cut off are counted apart: an expert that answers
    every forward may still owe every backward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: dict[tuple[str, Phase], int] = {}
        self._until: dict[tuple[str, Phase], float] = {}
        self._lock = threading.Lock()

    def failed(self, uid: str, phase: Phase = "forward", *, seconds: float = 0.0) -> None:
        """Count a failure of ``uid``: no answer, or an invalid one, after so many ``seconds``."""
        key = uid, phase
        with self._lock:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            if failures >= _PATIENCE or phase == "form":
                longest = max(_LONGEST_BREAK, 10 * seconds)
                pause = max(_SHORTEST_BREAK, seconds) * 2 ** max(failures - _PATIENCE, 0)
                self._until[key] = self._clock() + min(pause, longest)

    def answered(self, uid: str, phase: Phase = "forward") -> None:
        """Clear the failures of ``uid`` in ``phase``; a forward in time also those of a straggler."""
        with self._lock:
            cleared: tuple[Phase, ...] = (phase, "cut off", "form") if phase == "forward" else (phase,)
            for one in cleared:
                self._failures.pop((uid, one), None)
                self._until.pop((uid, one), None)

    def now(self) -> set[str]:
        """Return the uids that are avoided now."""
        with self._lock:
            now = self._clock()
            return {uid for (uid, _), until in self._until.items() if until > now}


class ExpertFinder:
    """Looks experts up, and remembers their schemas, and the form that those of one mixture have in common.

    Attributes:
        directory: lists their endpoints.
        backoff: the experts that failed.
        form: the schema of most of the experts first called.
        warned: the experts that do not fit and have been named in a warning.
    """

    def __init__(self, directory: DirectoryLike, module_client: ModuleClient) -> None:
        self.directory = directory
        self._module_client = module_client
        self.backoff = FailureBackoff()
        self.form: Schema | None = None
        self.warned: set[str] = set()
        self._schemas: dict[tuple[str, str], Schema] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> ExpertFinder:
        # A copied mixture has its own gate and calls the same experts.
        return self

    def __reduce__(self) -> tuple[type[ExpertFinder], tuple[DirectoryLike, ModuleClient]]:
        # Cached endpoints and schemas may be stale by then.
        return ExpertFinder, (self.directory, self._module_client)

    @property
    def client(self) -> Client:
        """The client that sends the requests."""
        return self._module_client.client

    def find(self, uids: Sequence[str], deadline: Deadline) -> dict[str, tuple[str, Schema]]:
        """Return the endpoint and schema of each of ``uids`` that can be reached; the others count as failed."""
        endpoints = within(self.directory, deadline).lookup(uids)
        unknown = [uid for uid, endpoint in endpoints.items() if (uid, endpoint) not in self._schemas]
        requests = [Request(endpoints[uid], wire.INFO, uid, role="experts") for uid in unknown]
        # An expert that does not send its schema cannot be called; half of the time is left for the others.
        patience = deadline.sooner(max(deadline.remaining() / 2, 1e-3))
        for uid, outcome in zip(unknown, self.client.gather(requests, patience) if requests else (), strict=True):
            if not isinstance(outcome, Answer):
                self.backoff.failed(uid, seconds=getattr(outcome, "elapsed", None) or 0.0)
                continue
            try:
                self._schemas[uid, endpoints[uid]] = Schema.unpack(outcome.payload)
            except ProtocolError:
                self.backoff.failed(uid)
        return {
            uid: (endpoint, self._schemas[uid, endpoint])
            for uid, endpoint in endpoints.items()
            if (uid, endpoint) in self._schemas
        }

    def forget(self, uids: Iterable[str]) -> None:
        """Forget their schemas, so that they are requested again."""
        gone = set(uids)
        self._schemas = {key: schema for key, schema in self._schemas.items() if key[0] not in gone}
