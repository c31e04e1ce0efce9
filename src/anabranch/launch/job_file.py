"""``job.json`` in the log folder of a job: its processes, for ``anabranch status`` and other tools."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeAlias

from anabranch.record.process import process_stat, replace_text

Elsewhere: TypeAlias = Literal["running", "stopped", "gone"]

JOB_FILE = "job.json"

_ORDER = ("worker", "parameters", "expert")


class JobFile:
    """Keeps ``job.json`` up to date; replaced whole at each change, so that readers never see half of it.

    ::

        {"roles": [{"role": "worker", "rank": 0, "pid": 4711, "endpoint": null, "started": 811512}, ...],
         "started": 1764000000.0, "ended": null}

    Times are seconds since the epoch. ``endpoint`` is where a service listens: ``null`` of a worker, and of an expert
    on TCP, which takes any port. ``pid`` is ``null`` while a process is to be restarted, and before its first start,
    marked by ``"begun": false``. ``"started"`` is the time of its start in ``/proc/PID/stat``, which with the pid names
    a process: the pid alone may be another's by now. Of a process on another machine ``"elsewhere"`` says whether it is
    ``"running"``, ``"stopped"`` or ``"gone"``. ``"script"`` is the program, ``"trace"`` where a trace goes at the end.

    Args:
        folder: the job's log folder.
        tell: called with a line if the file cannot be written; the job continues.
        clock: seconds since the epoch.
        facts: of the job; those that are ``None`` are left out.
    """

    def __init__(
        self,
        folder: Path,
        tell: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.time,
        **facts: str | None,
    ) -> None:
        self._path = folder / JOB_FILE
        self._tell = tell
        self._clock = clock
        self._started = self._clock()
        self._roles: dict[tuple[str, int], dict[str, object]] = {}
        self._ended: float | None = None
        self._lock = threading.Lock()
        self._failed = False
        self._facts = {name: value for name, value in facts.items() if value is not None}
        with suppress(OSError):
            self._path.unlink(missing_ok=True)  # another job's in the same folder

    def expects(self, counts: Mapping[str, int]) -> None:
        """Record this many processes of each role that are to be started."""
        with self._changed():
            for role, count in counts.items():
                for rank in range(count):
                    entry = {"role": role, "rank": rank, "pid": None, "endpoint": None, "begun": False}
                    self._roles[role, rank] = entry

    def began(self, role: str, rank: int, pid: int, endpoint: str | None, *, elsewhere: bool = False) -> None:
        """Record a process that was started, or restarted; ``elsewhere`` is on another machine."""
        if role in _ORDER:
            started = None if elsewhere else process_stat(pid)[1]
            entry = {"role": role, "rank": rank, "pid": pid, "endpoint": endpoint, "started": started}
            with self._changed():
                self._roles[role, rank] = entry | ({"elsewhere": "running"} if elsewhere else {})

    def seen_elsewhere(self, role: str, rank: int, state: Elsewhere) -> None:
        """Record the state of a process on another machine; by any thread, as often as it is looked at."""
        entry = self._roles.get((role, rank))
        if entry is not None and entry["elsewhere"] not in (state, "gone"):
            with self._changed():
                entry["elsewhere"] = state

    def returns(self, role: str, rank: int) -> None:
        """Record that a process has ended and is to be restarted."""
        with self._changed():
            self._roles[role, rank]["pid"] = None

    def all_return(self) -> None:
        """Record that the whole job is to be restarted."""
        with self._changed():
            for entry in self._roles.values():
                entry["pid"] = None

    def services(self) -> dict[str, str]:
        """Return the role and rank of each service whose endpoint is known, by that."""
        return {str(at): f"{role} {rank}" for (role, rank), entry in self._roles.items() if (at := entry["endpoint"])}

    def ended(self) -> None:
        """Record the end of the job, if any process had started."""
        if self._roles:
            with self._changed():
                self._ended = self._clock()

    @contextmanager
    def _changed(self) -> Iterator[None]:
        """Let one thread at a time change the record, which is then written."""
        with self._lock:
            yield
            self._write()

    def _write(self) -> None:
        places = sorted(self._roles, key=lambda place: (_ORDER.index(place[0]), place[1]))
        roles = [self._roles[place] for place in places]
        record = {"roles": roles, "started": self._started, "ended": self._ended, **self._facts}
        try:
            replace_text(self._path, json.dumps(record) + "\n")
        except OSError as error:  # a full disk, a folder that was removed
            if not self._failed:
                self._tell(f"{self._path} is not up to date: {error.strerror}")
            self._failed = True
