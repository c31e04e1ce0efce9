"""``job.json`` in the log folder of a job: its processes, for ``anabranch status`` and other tools."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from anabranch.status_file import replace_text

__all__ = ["JOB_FILE", "JobFile"]

JOB_FILE = "job.json"

_ORDER = ("worker", "parameters", "expert")


def _since_epoch() -> float:
    return time.time()


class JobFile:
    """Keeps ``job.json`` up to date; replaced whole at each change, so that readers never see half of it.

    ::

        {"roles": [{"role": "worker", "rank": 0, "pid": 4711, "endpoint": null}, ...],
         "started": 1764000000.0, "ended": null}

    Times are seconds since the epoch. ``endpoint`` is where a service listens: ``null`` of a worker, and of an expert
    on TCP, which takes any port. ``pid`` is ``null`` while a process is to be restarted, and before its first start,
    marked by ``"begun": false``. Of a process on another machine ``"runs_elsewhere"`` says whether it runs. Of a job
    that writes a trace at its end, ``"trace"`` says where.

    Args:
        folder: the job's log folder.
        tell: called with a line if the file cannot be written; the job continues.
        clock: seconds since the epoch.
        trace: where the job writes a trace.
    """

    def __init__(
        self,
        folder: Path,
        tell: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] | None = None,
        *,
        trace: Path | None = None,
    ) -> None:
        self._path = folder / JOB_FILE
        self._tell = tell
        self._clock = clock or _since_epoch
        self._started = self._clock()
        self._roles: dict[tuple[str, int], dict[str, object]] = {}
        self._failed = False
        self._trace = None if trace is None else str(trace.absolute())
        for left in (self._path, *folder.glob("worker-*.steps")):  # by another job in the same folder
            with suppress(OSError):
                left.unlink(missing_ok=True)

    def expects(self, counts: Mapping[str, int]) -> None:
        """Record this many processes of each role that are to be started."""
        for role, count in counts.items():
            for rank in range(count):
                self._roles[role, rank] = {"role": role, "rank": rank, "pid": None, "endpoint": None, "begun": False}
        self._write(None)

    def began(self, role: str, rank: int, pid: int, endpoint: str | None, *, elsewhere: bool = False) -> None:
        """Record a process that was started, or restarted; ``elsewhere`` is on another machine."""
        if role in _ORDER:
            entry = {"role": role, "rank": rank, "pid": pid, "endpoint": endpoint}
            self._roles[role, rank] = entry | ({"runs_elsewhere": True} if elsewhere else {})
            self._write(None)

    def ended_elsewhere(self, role: str, rank: int) -> None:
        """Record that a process on another machine has ended."""
        if role in _ORDER:
            self._roles[role, rank]["runs_elsewhere"] = False
            self._write(None)

    def returns(self, role: str, rank: int) -> None:
        """Record that a process has ended and is to be restarted."""
        self._roles[role, rank]["pid"] = None
        self._write(None)

    def all_return(self) -> None:
        """Record that the whole job is to be restarted."""
        for entry in self._roles.values():
            entry["pid"] = None
        self._write(None)

    def services(self) -> dict[str, str]:
        """Return the role and rank of each service whose endpoint is known, by that."""
        return {str(at): f"{role} {rank}" for (role, rank), entry in self._roles.items() if (at := entry["endpoint"])}

    def ended(self) -> None:
        """Record the end of the job, if any process had started."""
        if self._roles:
            self._write(self._clock())

    def _write(self, ended: float | None) -> None:
        places = sorted(self._roles, key=lambda place: (_ORDER.index(place[0]), place[1]))
        roles = [self._roles[place] for place in places]
        record: dict[str, object] = {"roles": roles, "started": self._started, "ended": ended}
        if self._trace is not None:
            record["trace"] = self._trace
        try:
            replace_text(self._path, json.dumps(record) + "\n")
        except OSError as error:  # a full disk, a folder that was removed
            if not self._failed:
                self._tell(f"{self._path} is not up to date: {error.strerror}")
            self._failed = True
