"""The state of services, requested at their addresses, for ``anabranch status ENDPOINT``."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded, PeerLost
from anabranch.launch.job_status import JobStatus, RoleStatus, State, ahead, job_of
from anabranch.transport import Answer, Client, Outcome, Request
from anabranch.transport.server.server import STATUS

_SECONDS = 1.5  # less than the two heartbeats after which a silent server counts as lost
_ROLES = {"parameters": "parameters", "experts": "expert", "directory": "directory"}


def ask(client: Client, endpoints: Sequence[str], role: str | None = None) -> Sequence[Outcome]:
    """Return what each service says of itself; the certificates of all name ``role``, if that is given."""
    return client.gather([Request(endpoint, STATUS, role=role) for endpoint in endpoints], Deadline.after(_SECONDS))


def state_of(outcome: Outcome) -> State | None:
    """Return the state of a service by its outcome; ``None`` if it refused to answer."""
    if isinstance(outcome, PeerLost | DeadlineExceeded):
        return "gone" if isinstance(outcome, PeerLost) else "stopped"
    return "running" if isinstance(outcome, Answer) else None


def status_at(client: Client, endpoints: Sequence[str], before: JobStatus | None = None) -> JobStatus:
    """Return the services' answers: ``"gone"`` if nothing listens at an endpoint, ``"stopped"`` if there is no answer.

    Args:
        client: asks them.
        endpoints: where they listen.
        before: the last status, which says what those are that do not answer any more.

    Raises:
        ValueError: a malformed endpoint, or TCP without keys.
        BoundaryError: a server refuses to answer.
    """
    known = {role.endpoint: role for role in before.roles} if before else {}
    outcomes = ask(client, endpoints)
    roles: list[tuple[RoleStatus, Mapping[str, Any]]] = []
    ranks: Counter[str] = Counter()
    for endpoint, outcome in zip(endpoints, outcomes, strict=True):
        role, facts = _role(endpoint, outcome, known.get(endpoint))
        roles.append((replace(role, rank=ranks[role.role]), facts))
        ranks[role.role] += 1
    return job_of(roles)


def _role(endpoint: str, outcome: Outcome, before: RoleStatus | None) -> tuple[RoleStatus, Mapping[str, Any]]:
    if isinstance(outcome, Answer):
        facts = json.loads(outcome.payload)
        facts = ahead(facts, time.monotonic() - facts["now"])
        kind = next(role for name, role in _ROLES.items() if name in facts)
        return RoleStatus(kind, 0, facts["pid"], endpoint, "running"), facts
    state = state_of(outcome)
    if state is None:
        assert isinstance(outcome, Exception)
        raise outcome
    return replace(before or RoleStatus("server", 0, None, endpoint, "gone"), state=state), {}
