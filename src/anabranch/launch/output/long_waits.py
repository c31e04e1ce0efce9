"""``LongWaits``: a line on the screen when a process has long waited for another, or been busy outside of steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from anabranch.launch.job_status import JobStatus, RoleStatus, status_of
from anabranch.record.words import in_words, on_one_line

_LONG = 10.0
_CONNECTING = ("life", "join")  # a worker's first request to a parameter server
_AGAIN = 3  # times as long until the next line about the same
_WAITS, _DOES = "waits", "does"


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
        self._began = float("-inf")
        self._due: dict[tuple[str, ...], float] = {}  # by what is reported, the seconds at which the next line is due

    def begin(self) -> None:
        """Count from now on: until now the whole job was stopped."""
        self._began = time.monotonic()

    def check(self) -> None:
        """Report the waits and activities that have become long: each once, and again at three times the length."""
        try:
            roles = self._look_at(self._folder).roles
        except ValueError:  # a folder that was removed
            return
        long = defaultdict[tuple[str, ...], list[RoleStatus]](list)
        for role in sorted(roles, key=lambda role: role.rank):
            if min(_seconds(role), time.monotonic() - self._began) >= _LONG:
                long[_what(role)].append(role)
        # A wait that has ended is forgotten; the next batch of a slow loader is no news.
        self._due = {what: due for what, due in self._due.items() if what in long or what[0] == _DOES}
        for what, alike in long.items():
            seconds = max(map(_seconds, alike))
            if seconds >= self._due.get(what, _LONG):
                self._due[what] = _AGAIN * seconds
                self._tell(on_one_line(_line(alike, seconds, roles).replace("worker", "rank")))


def _seconds(role: RoleStatus) -> float:
    does = role.doing is not None and role.state in ("running", "starting")
    return role.doing_seconds if does else role.waiting_seconds or 0.0


def _what(role: RoleStatus) -> tuple[str, ...]:
    if role.waiting_for is None:
        return _DOES, role.role, role.doing or ""
    return _WAITS, role.role, role.waiting_for, role.operation or ""


def _line(alike: Sequence[RoleStatus], seconds: float, roles: Sequence[RoleStatus]) -> str:
    first, several = alike[0], len(alike) > 1
    who = f"{first.role.removesuffix('s' * several)}{'s' * several} {', '.join(str(role.rank) for role in alike)}"
    if first.waiting_for is None:
        return f"{'each of ' * several}{who} {first.doing} ({seconds:.0f} s)"
    operation = first.operation or ""
    how = "to connect" if operation in _CONNECTING else f"in {in_words(operation)}"
    until = "" if first.waiting_limit is None else f", at most {first.waiting_limit:.0f} s"
    line = f"{who} wait{'s' * (not several)} for {first.waiting_for} {how} ({seconds:.0f} s{until})"
    states = {role.name: role.state for role in roles if role.name in first.waiting_for.split(", ")}
    words = [f"{name} is {state}" for name, state in states.items() if state not in ("running", "waiting")]
    return "; ".join([line, *words])
