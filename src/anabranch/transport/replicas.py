"""``Replicas``: a directory on several servers, so that no announcement is lost when one dies.

::

    announce  ──> all of them         each that is up has it
    look up   ──> all of them at once, and the answers put together

Nothing is copied from server to server: experts renew their announcements at each. One that restarts empty fills up
with the renewals, and until then the others' answers are complete. One that does not answer is skipped for a while, so
that it does not delay every lookup.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError, DeadlineExceeded, Overloaded, PeerLost
from anabranch.transport.client import Answer, Client, Outcome, Request
from anabranch.transport.endpoints import split_endpoints
from anabranch.transport.frame import pack

__all__ = ["Replicas"]

_LEFT_OUT_SECONDS = 5.0
_GRACE_SECONDS = 1.0
_AWAY = (PeerLost, DeadlineExceeded, Overloaded)


class Replicas:
    """The servers of one directory.

    Args:
        endpoints: theirs, separated by commas; one is a directory without a standby.
        clock: seconds.

    Raises:
        ValueError: an empty or repeated endpoint.
    """

    def __init__(self, endpoints: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._endpoints = split_endpoints(endpoints)
        self._clock = clock
        self._left_out: dict[str, float] = {}

    def ask(self, client: Client, verb: str, question: object, deadline: Deadline) -> dict[str, bytes]:
        """Return the answers, by endpoint, of the servers that gave one; of a single server, its answer.

        Raises:
            BoundaryError: none answered; or one refused.
        """
        if len(self._endpoints) == 1:
            (endpoint,) = self._endpoints
            return {endpoint: client.call(_request(endpoint, verb, question), deadline).payload}
        return self._ask_several(client, self._asked(), verb, question, deadline)

    def ask_one(self, client: Client, endpoint: str, verb: str, question: object, deadline: Deadline) -> None:
        """Call one of them; an unreachable one gives no answer."""
        outcome = client.gather([_request(endpoint, verb, question)], deadline)[0]
        if isinstance(outcome, Exception) and not isinstance(outcome, _AWAY):
            raise outcome

    def _asked(self) -> Sequence[str]:
        now = self._clock()
        return [one for one in self._endpoints if self._left_out.get(one, now) <= now] or self._endpoints

    def _ask_several(
        self, client: Client, endpoints: Sequence[str], verb: str, question: object, deadline: Deadline
    ) -> dict[str, bytes]:
        requests = [_request(endpoint, verb, question) for endpoint in endpoints]
        outcomes = client.gather(requests, deadline, enough=_one_answered, grace=_GRACE_SECONDS)
        found: dict[str, bytes] = {}
        lost: Exception | None = None
        for endpoint, outcome in zip(endpoints, outcomes, strict=True):
            if isinstance(outcome, Answer):
                found[endpoint] = outcome.payload
                self._left_out.pop(endpoint, None)
            elif outcome is None or isinstance(outcome, _AWAY):
                self._left_out[endpoint] = self._clock() + _LEFT_OUT_SECONDS
                lost = lost or outcome
            else:
                raise outcome
        if found:
            return found
        others = [one for one in self._endpoints if one not in endpoints]
        if others and deadline.remaining() > 0:
            return self._ask_several(client, others, verb, question, deadline)
        assert isinstance(lost, BoundaryError)
        raise lost


def _request(endpoint: str, verb: str, question: object) -> Request:
    return Request(endpoint, verb, payload=pack(question), role="directory")


def _one_answered(outcomes: Sequence[Outcome]) -> bool:
    return any(isinstance(outcome, Answer) for outcome in outcomes)
