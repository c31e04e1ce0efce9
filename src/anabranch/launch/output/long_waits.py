"""``LongWaits``: a line on the screen when a process has long waited for another, or been busy outside of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from anabranch.launch.job_status import JobStatus, RoleStatus, status_of
from anabranch.record.words import in_words

_LONG = 10.0
_CONNECTING = ("life", "join")  # a worker's first request to a parameter server
_AGAIN = 3  # times as long until the next line about the same wait


class LongWaits:
    """Watches the waits of a job's processes.

    Args:
        folder: the job's log folder.
        tell: called with each line: ``"ranks 0, 2 wait for rank 1 in all_reduce (12 s); rank 1 is stopped"``.
        look_at: reads the folder.

    Attributes:
        every: seconds between two checks.
    """

    every = 2.0

    def __init__(
        self, folder: Path, tell: Callable[[str], None], look_at: Callable[[Path], JobStatus] = status_of
    ) -> None:
        self._folder = folder
        self._tell = tell
        self._look_at = look_at
        self._due_doings: dict[tuple[str, str], float] = {}
        self._due: dict[str, float] = {}  # for each reported process, the wait at which the next line is due

    def check(self) -> None:
        """Report the waits that have become long."""
        try:
            roles = self._look_at(self._folder).roles
        except ValueError:  # a folder that was removed
            return
        self._look_at_doings(roles)
        waiting = [role for role in roles if (role.waiting_seconds or 0.0) >= _LONG]
        self._due = {role.name: self._due.get(role.name, _LONG) for role in waiting}
        due = [role for role in waiting if _seconds(role) >= self._due[role.name]]
        for _, group in groupby(sorted(due, key=_reason), key=_reason):
            alike = sorted(group, key=lambda role: role.rank)
            self._tell(_line(alike, roles))
            self._due.update({role.name: _AGAIN * _seconds(role) for role in alike})

    def _look_at_doings(self, roles: Sequence[RoleStatus]) -> None:
        """Report long activities: each once, and again when it takes three times as long."""
        busy = [role for role in roles if role.doing and role.state in ("running", "starting")]
        due = [role for role in busy if role.doing_seconds >= self._due_doings.get(_doing(role), _LONG)]
        for doing, group in groupby(sorted(due, key=_doing), key=_doing):
            alike = sorted(group, key=lambda role: role.rank)
            seconds = max(role.doing_seconds for role in alike)
            self._due_doings[doing] = _AGAIN * seconds
            ranks = ", ".join(str(role.rank) for role in alike)
            name = alike[0].role.replace("worker", "rank")
            who = f"{name} {ranks}" if len(alike) == 1 else f"each of {name.removesuffix('s')}s {ranks}"
            self._tell(f"{who} {doing[1]} ({seconds:.0f} s)")


def _doing(role: RoleStatus) -> tuple[str, str]:
    return role.role, role.doing or ""


def _seconds(role: RoleStatus) -> float:
    return role.waiting_seconds or 0.0


def _reason(role: RoleStatus) -> tuple[str, str, str]:
    return role.role, role.waiting_for or "", role.operation or ""


def _line(alike: Sequence[RoleStatus], roles: Sequence[RoleStatus]) -> str:
    kind, peers, operation = _reason(alike[0])
    ranks = ", ".join(str(role.rank) for role in alike)
    who = f"{kind}{'s' if len(alike) > 1 else ''} {ranks} {'wait' if len(alike) > 1 else 'waits'}"
    states = {role.name: role.state for role in roles if role.name in peers.split(", ")}
    words = [f"{name} is {state}" for name, state in states.items() if state not in ("running", "waiting")]
    seconds = max(map(_seconds, alike))
    doing = "to connect" if operation in _CONNECTING else f"in {in_words(operation)}"
    limit = alike[0].waiting_limit
    until = "" if limit is None else f", at most {limit:.0f} s"
    return "; ".join([f"{who} for {peers} {doing} ({seconds:.0f} s{until})", *words]).replace("worker", "rank")
