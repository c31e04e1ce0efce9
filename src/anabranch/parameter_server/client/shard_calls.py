"""``ShardCalls``: requests to the shards of a job, to all at once, and waits that check the other workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded, PeerLost, RolledBack
from anabranch.parameter_server.expected_state import AcknowledgedPushes, ExpectedState
from anabranch.parameter_server.messages import ExportMessage, PushReply
from anabranch.record import spans
from anabranch.transport import Answer, Client, Request, pack, unpack

__all__ = ["ShardCalls"]

_T = TypeVar("_T")


class ShardCalls:
    """Sends requests to the shards.

    Args:
        client: sends the requests.
        endpoints: of all shards, in their order.
        timeout: seconds that a call may take.
        watch: called at intervals while waiting for other workers; raises if one of them is known to be lost.
        look_every: seconds until the first call.

    Attributes:
        acknowledged: for each endpoint, the places of this client's pushes in the shard's log.
        full: tables that have had no room for an id.
        rolled_back: true once a shard has said that it lost pushes of this client, until it is set back.
    """

    def __init__(
        self,
        client: Client,
        endpoints: Sequence[str],
        timeout: float,
        watch: Callable[[], None] | None,
        look_every: float,
    ) -> None:
        self._client, self.endpoints, self.timeout = client, list(endpoints), timeout
        self._watch, self._look_every = watch, look_every
        self.acknowledged = {endpoint: AcknowledgedPushes() for endpoint in endpoints}
        self.rolled_back = False
        self.full: set[str] = set()
        self._noting = threading.Lock()

    @property
    def shards(self) -> int:
        """The number of shards."""
        return len(self.endpoints)

    def request(
        self,
        shard: int,
        verb: str,
        payload: bytes = b"",
        tensors: Sequence[Tensor] = (),
        *,
        step: int | None = None,
        once: bool | None = None,
    ) -> Request:
        """Return a request to one shard, with this client's expected state there."""
        numbered = verb in ("init", "join", "push", "restore", "drop") if once is None else once
        endpoint = self.endpoints[shard]
        pushes = self.acknowledged[endpoint]
        expected = ExpectedState(self._client.epoch, pushes.newest, pushes.life, shard, self.shards).encode()
        return Request(
            endpoint, verb, tensors=tensors, payload=payload, schema=expected, once=numbered, step=step,
            role="parameters",
        )  # fmt: skip

    def call(
        self, shard: int, verb: str, payload: bytes = b"", tensors: Sequence[Tensor] = (), *, once: bool = False
    ) -> tuple[bytes, Sequence[Tensor]]:
        """Send a request to one shard; returns its payload and tensors."""
        request = self.request(shard, verb, payload, tensors, once=once)
        (answer,) = self.gather([request], Deadline.after(self.timeout))
        return answer.payload, answer.tensors

    def all(self, requests: Sequence[Request]) -> list[Answer]:
        """Send ``requests`` to their shards at once, under the client's timeout."""
        return self.gather(requests, Deadline.after(self.timeout))

    def gather(self, requests: Iterable[Request], deadline: Deadline) -> list[Answer]:
        """Send them at once; raises the first error."""
        answers, failures = self.outcomes(requests, deadline)
        if failures:
            raise failures[0]
        return answers

    def outcomes(self, requests: Iterable[Request], deadline: Deadline) -> tuple[list[Answer], list[Exception]]:
        """Return the answers, and the errors of those that failed."""
        answers: list[Answer] = []
        failures: list[Exception] = []
        asked = list(requests)
        for request, outcome in zip(asked, self._client.gather(asked, deadline), strict=True):
            if isinstance(outcome, Exception):
                failures.append(self._note_loss(request, outcome))
                continue
            assert outcome is not None
            if request.verb == "push" and outcome.payload:
                reply = unpack(outcome.payload, PushReply)
                with self._noting:
                    self.acknowledged[request.endpoint].add(reply.place)
                    self.full.update(reply.full)
            answers.append(outcome)
        return answers, failures

    def _note_loss(self, request: Request, error: Exception) -> Exception:
        """Return the error to raise; if a shard has lost pushes, forget their places."""
        if isinstance(error, RolledBack):
            said = ExpectedState.decode(request.schema)
            assert said is not None
            with self._noting:
                self.rolled_back = True
                pushes = self.acknowledged[request.endpoint]
                held = 0 if error.lost is None else said.pushes - error.lost
                gone = pushes.cut(held)
                if error.lost is not None:
                    error.lost = gone
                pushes.life = 0
        return error

    def in_turn(self, requests: Sequence[Request], deadline: Deadline) -> list[Answer]:
        """As ``_gather``, for requests that may wait for other workers: checks in between that they are alive.

        Each check repeats the request, so the intervals grow: a slow request gets through.
        """
        if self._watch is None:
            return self.gather(requests, deadline)
        patience = self._look_every
        while patience < deadline.remaining():
            try:
                return self.gather(requests, deadline.sooner(patience))
            except DeadlineExceeded:
                self._watch()
                patience *= 2
        return self.gather(requests, deadline)

    def export(self, shard: int, message: ExportMessage) -> tuple[int, Sequence[Tensor]]:
        """Return the steps of a table or parameter, and part of its tensors."""
        payload, parts = self.call(shard, "export", pack(message))
        return unpack(payload, int), parts

    def describe(self) -> list[dict[str, Any]]:
        """Return what each shard holds."""
        return [unpack(answer, dict[str, Any]) for answer in self.ask_at_length("describe")]

    def ask_at_length(self, verb: str) -> list[bytes]:
        """Return every shard's answer to ``verb``, which may be too long for a header."""
        answers = self.all([self.request(shard, verb, once=False) for shard in range(self.shards)])
        return [answer.tensors[0].numpy().tobytes() for answer in answers]

    def lives(self) -> list[Answer]:
        """Wait for shards that do not listen yet, as long as a call may take: a new machine compiles for a minute."""
        deadline = Deadline.after(self.timeout)
        while True:
            requests = [self.request(shard, "life", once=False) for shard in range(self.shards)]
            try:
                return self.gather(requests, deadline)
            except PeerLost as error:
                if deadline.expired() or not isinstance(error.__cause__, ConnectionRefusedError):
                    raise
            if self._watch is not None:
                self._watch()

    def wait_for(self, future: Future[_T], operation: str, *, step: int | None = None) -> _T:
        """Wait for a call of this client on another thread, checking meanwhile that all workers are alive.

        Raises:
            PeerLost: another worker is gone.
            DeadlineExceeded: the call has overrun its own deadline.
        """
        deadline = Deadline.after(self.timeout + 2 * self._look_every)  # the call's own error comes first
        with spans.span("wait", "wait", peer="the servers", operation=operation):
            while not wait([future], timeout=min(self._look_every, deadline.remaining())).done:
                deadline.check(peer="the servers", operation=operation, step=step)
                if self._watch is not None:
                    self._watch()
        return future.result(timeout=0)
