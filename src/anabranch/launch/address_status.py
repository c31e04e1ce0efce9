"""The state of services, requested at their addresses, for ``anabranch status ENDPOINT``."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded, PeerLost
from anabranch.launch.job_status import JobStatus, RoleStatus, ahead, job_of
from anabranch.transport import Answer, Client, Outcome, Request
from anabranch.transport.server.server import STATUS

_SECONDS = 1.5  # less than the two heartbeats after which a silent server counts as lost
_ROLES = {"parameters": "parameters", "experts": "expert", "directory": "directory"}


class Addresses:
    """Services, by their endpoints; a context manager.

    Args:
        endpoints: where they listen.
        keys: the directory of certificates, for TCP.
        insecure: allow TCP without certificates.

    Raises:
        ValueError: keys that are missing or damaged.
    """

    def __init__(
        self, endpoints: Sequence[str], *, keys: str | os.PathLike[str] | None = None, insecure: bool = False
    ) -> None:
        self._endpoints = endpoints
        self._client = Client(keys=keys, insecure=insecure, retries=0)
        self._before: dict[str, RoleStatus] = {}

    def look(self) -> JobStatus:
        """Return their answers: ``"gone"`` if nothing listens at the address, ``"stopped"`` if there is no answer.

        Raises:
            ValueError: a malformed endpoint, or TCP without keys.
            BoundaryError: a server refuses to answer.
        """
        requests = [Request(endpoint, STATUS) for endpoint in self._endpoints]
        outcomes = self._client.gather(requests, Deadline.after(_SECONDS))
        roles: list[tuple[RoleStatus, Mapping[str, Any]]] = []
        ranks: Counter[str] = Counter()
        for endpoint, outcome in zip(self._endpoints, outcomes, strict=True):
            role, facts = self._role(endpoint, outcome)
            role = replace(role, rank=ranks[role.role])
            ranks[role.role] += 1
            self._before[endpoint] = role
            roles.append((role, facts))
        return job_of(roles)

    def _role(self, endpoint: str, outcome: Outcome) -> tuple[RoleStatus, Mapping[str, Any]]:
        if isinstance(outcome, Answer):
            facts = json.loads(outcome.payload)
            facts = ahead(facts, time.monotonic() - facts["now"])
            kind = next(role for name, role in _ROLES.items() if name in facts)
            return RoleStatus(kind, 0, facts["pid"], endpoint, "running"), facts
        if isinstance(outcome, PeerLost | DeadlineExceeded):
            before = self._before.get(endpoint) or RoleStatus("server", 0, None, endpoint, "gone")
            return replace(before, state="gone" if isinstance(outcome, PeerLost) else "stopped"), {}
        assert isinstance(outcome, Exception)
        raise outcome

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __enter__(self) -> Addresses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
