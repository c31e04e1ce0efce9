"""``SlowStarts``: the reason why a parameter server does not listen yet, shown to the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anabranch.launch.supervision.worker import RoleProcess

__all__ = ["SlowStarts"]

_EVERY = 0.5  # seconds between two reads of the logs, until the servers listen
_SHOWN = "anabranch: compiling "
_AT_LAST = "listening on "


class SlowStarts:
    """Reads the logs of parameter servers that do not listen yet, at their first start.

    Args:
        services: those of the job.
        tell: called with the line, once for all servers.
    """

    def __init__(self, services: Sequence[RoleProcess], tell: Callable[[str], None]) -> None:
        self._services = services
        self._tell = tell
        self._next = 0.0
        self._over = False

    def next_check(self) -> float | None:
        """Return the time of the next check; ``None`` if there is none."""
        return None if self._over else self._next

    def check(self, now: float) -> None:
        """Report the line if there is one by now."""
        if self._over or now < self._next:
            return
        self._next = now + _EVERY
        servers = [
            service
            for service in self._services
            if service.role == "parameters" and service.running and not service.restarted
        ]
        self._over = True
        for server in servers:
            lines = server.log.read_text(errors="replace").splitlines()
            for line in lines:
                if line.startswith(_SHOWN):
                    self._tell(line.removeprefix("anabranch: "))
                    self._over = True
                    return
            self._over = self._over and any(line.startswith(_AT_LAST) for line in lines)
