"""The processes of a job, in its log folder: ``job.json``, and the current state of each.

Nothing is requested from the processes themselves, so a frozen one causes no wait: the state comes from ``job.json``,
``/proc`` and the processes' status files.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from anabranch.record.process import process_stat, process_state, read_regular, read_status, replace_text
from anabranch.record.words import ACTIVITIES

State: TypeAlias = Literal["starting", "running", "waiting", "stopped", "restarting", "gone"]

JOB_FILE = "job.json"

_ORDER = ("worker", "parameters", "expert")
_SERVICES = ("parameters", "experts", "directory")


class _Process(msgspec.Struct, omit_defaults=True):
    role: Annotated[str, msgspec.Meta(pattern=rf"^({'|'.join(_ORDER)})\Z")]  # shown on terminals
    rank: int
    pid: int | None
    endpoint: str | None
    started: int | None
    begun: bool = True
    elsewhere: bool = False


class _Record(msgspec.Struct, omit_defaults=True):
    roles: list[_Process]
    started: float
    ended: float | None
    script: str | None = None
    trace: str | None = None


class JobFile:
    """Keeps ``job.json`` up to date; replaced whole at each change, so that readers never see half of it.

    ::

        {"roles": [{"role": "worker", "rank": 0, "pid": 4711, "endpoint": null, "started": 811512}, ...],
         "started": 1764000000.0, "ended": null}

    Times are seconds since the epoch. ``endpoint`` is where a service listens: ``null`` of a worker, and of an expert
    on TCP, which takes any port. ``pid`` is ``null`` while a process is to be restarted, and before its first start,
    marked by ``"begun": false``. ``"started"`` is the time of its start in ``/proc/PID/stat``, which with the pid names
    a process: the pid alone may be another's by now. It is ``null`` before, and of a process on another machine, marked
    by ``"elsewhere": true``, whose state is in its status file. ``"script"`` is the program, ``"trace"`` where a trace
    goes at the end.

    Args:
        folder: the job's log folder.
        tell: called with a line if the file cannot be written; the job continues.
        clock: seconds since the epoch.
        script: the program.
        trace: where a trace goes at the end.
    """

    def __init__(
        self,
        folder: Path,
        tell: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.time,
        *,
        script: str | None = None,
        trace: str | None = None,
    ) -> None:
        self._path = folder / JOB_FILE
        self._tell = tell
        self._clock = clock
        self._processes: dict[tuple[str, int], _Process] = {}
        self._record = _Record([], clock(), None, script, trace)
        self._failed = False
        self._lock = threading.RLock()  # an engine may start processes on threads
        with suppress(OSError):
            self._path.unlink(missing_ok=True)  # another job's in the same folder

    def expects(self, counts: Mapping[str, int]) -> None:
        """Record this many processes of each role that are to be started."""
        for role, count in counts.items():
            for rank in range(count):
                self._processes[role, rank] = _Process(role, rank, None, None, None, begun=False)
        self._write()

    def began(self, role: str, rank: int, pid: int, endpoint: str | None, *, elsewhere: bool = False) -> None:
        """Record a process that was started, or restarted; ``elsewhere`` is on another machine."""
        if role in _ORDER:
            started = None if elsewhere else process_stat(pid)[1]
            with self._lock:
                self._processes[role, rank] = _Process(role, rank, pid, endpoint, started, elsewhere=elsewhere)
                self._write()

    def returns(self, role: str | None = None, rank: int | None = None) -> None:
        """Record that a process has ended and is to be restarted, or the whole job."""
        for place, process in self._processes.items():
            if role is None or place == (role, rank):
                process.pid = None
        self._write()

    def services(self) -> dict[str, str]:
        """Return the role and rank of each service whose endpoint is known, by that."""
        return {one.endpoint: f"{one.role} {one.rank}" for one in self._processes.values() if one.endpoint}

    def ended(self) -> None:
        """Record the end of the job, if any process had started."""
        if self._processes:
            self._record.ended = self._clock()
            self._write()

    def _write(self) -> None:
        with self._lock:
            self._record.roles = sorted(self._processes.values(), key=lambda one: (_ORDER.index(one.role), one.rank))
            try:
                replace_text(self._path, json.dumps(msgspec.to_builtins(self._record)) + "\n")
            except OSError as error:  # a full disk, a folder that was removed
                if not self._failed:
                    self._tell(f"{self._path} is not up to date: {error.strerror}")
                self._failed = True


@dataclass(frozen=True, slots=True)
class RoleStatus:
    """One process of a job.

    Attributes:
        role: ``"worker"``, ``"parameters"`` or ``"expert"``.
        rank: which of its role.
        pid: its process; ``None`` while it is to be started, or restarted.
        endpoint: where a service listens.
        state: ``"starting"``: it does not run yet, or is a service that does not listen yet; ``"waiting"``: for another
            process, for half a second or longer; ``"stopped"``: frozen, by SIGSTOP or a debugger; ``"restarting"``: it
            has ended and is to be restarted; ``"gone"``: it has ended.
        steps: optimizer steps of a worker, those of a loaded checkpoint included; ``None`` if it has no ``Executor``.
        waiting_for: those that hold it up, such as ``"worker 1"``; of many that it waits for, those that are frozen or
            gone, or else those that do not wait themselves.
        waiting_seconds: how long it has waited.
        waiting_limit: after how many seconds it gives up, if that is known: the executor's ``timeout``.
        operation: the operation in which it waits.
        doing: a worker's activity outside steps, as the rest of a sentence: ``"is fetching a batch from its loader"``.
        doing_seconds: for how long.
        service: a server's own counts: ``requests``, ``bytes``, a queue, ...; totals since it started,
            ``uptime`` seconds ago.
        loads: of a worker, its requests about each table: ``hits``, ``misses``, ``bytes``, ...
        crossed: of a worker, the bytes that have crossed each boundary.
        crossing: the same, a second, while it runs and does not wait.
        started: when it started, as ``/proc/PID/stat`` has it, which with the pid names a process of this machine.
    """

    role: str
    rank: int
    pid: int | None
    endpoint: str | None
    state: State
    steps: int | None = None
    waiting_for: str | None = None
    waiting_seconds: float | None = None
    waiting_limit: float | None = None
    operation: str | None = None
    doing: str | None = None
    doing_seconds: float = 0.0
    service: Mapping[str, Any] = field(default_factory=dict)
    loads: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    crossed: Mapping[str, float] = field(default_factory=dict)
    crossing: Mapping[str, float] = field(default_factory=dict)
    started: int | None = None

    @property
    def name(self) -> str:
        """The role and the rank, such as ``"worker 0"``."""
        return f"{self.role} {self.rank}"


@dataclass(frozen=True, slots=True)
class TrackedLoop:
    """A loop of rank 0 in progress: of ``executor.track``, or over a bound loader.

    Attributes:
        label: its name, if it has one.
        done: rounds.
        total: rounds, if that is known.
        seconds: since it began, if that is known.
    """

    label: str | None
    done: int
    total: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job.

    Attributes:
        roles: its processes.
        started: seconds since the epoch; ``None`` if that is not known, of services asked at their addresses.
        ended: the same; ``None`` while it runs.
        seconds: from its start until now, or until its end.
        progress: the loops of rank 0, each inside the previous one.
        loss: the newest of rank 0 that was read.
        curve: its losses from the first step on, in at most 65 means.
        pace: optimizer steps a second of rank 0 over the run, in at most 65 means of equally long times.
        saved: the path of the newest checkpoint written by rank 0.
        steps_per_second: of rank 0, while it runs and does not wait.
        script: its program.
        folder: its log folder.
        trace: where it writes a trace at its end.
    """

    roles: tuple[RoleStatus, ...]
    started: float | None = None
    ended: float | None = None
    seconds: float | None = None
    progress: tuple[TrackedLoop, ...] = ()
    loss: float | None = None
    curve: tuple[float, ...] = ()
    saved: str | None = None
    steps_per_second: float | None = None
    pace: tuple[float, ...] = ()
    script: str | None = None
    folder: str | None = None
    trace: str | None = None


def status_of(folder: Path) -> JobStatus:
    """Return the state of the job whose log folder this is.

    Raises:
        ValueError: there is no ``job.json`` in it, or one of another form.
    """
    path = folder / JOB_FILE
    try:
        record = msgspec.convert(json.loads(read_regular(path)), _Record)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; give a job's log folder (--log-dir)") from error
    except (ValueError, msgspec.ValidationError) as error:
        raise ValueError(f"{path} does not describe a job: {error}") from error
    ended = record.ended
    roles = [_read_role(folder, process, ended=ended is not None) for process in record.roles]
    seconds = max(0.0, (time.time() if ended is None else ended) - record.started)
    facts: dict[str, Any] = {"started": record.started, "ended": ended, "seconds": seconds, "script": record.script}
    return replace(job_of(roles), folder=str(folder), trace=record.trace, **facts)


def job_of(reports: Sequence[tuple[RoleStatus, Mapping[str, Any]]]) -> JobStatus:
    """Return the job of these processes, each with its reported status."""
    roles = [_with_facts(role, facts) for role, facts in reports]
    # An expert may have an Executor of its own, and one that has died as rank 0 has left its facts, too.
    reported = [(role, facts["run"]) for role, facts in reports if role.role == "worker" and "run" in facts]
    first = [one for one in reported if one[1].get("rank") == 0]
    newest = max(first, key=lambda one: (one[0].state != "gone", one[1]["steps"]), default=None)
    run: Mapping[str, Any] = {} if newest is None else newest[1]
    runs = newest is not None and any(one.name == newest[0].name and one.state == "running" for one in roles)
    names = {one.endpoint: one.name for one in roles if one.endpoint}
    # A worker has the rank that it was started with in its name, and may have another by now.
    names |= {f"rank {run.get('rank')}": role.name for role, run in reported if role.state != "gone"}
    return JobStatus(
        tuple(_with_names(role, roles, names) for role in roles),
        progress=tuple(TrackedLoop(**loop) for loop in run.get("progress", ())),
        loss=run.get("loss"),
        curve=tuple(run.get("curve", ())),
        saved=run.get("saved"),
        steps_per_second=run.get("steps_per_second") if runs else None,
        pace=tuple(run.get("pace", ())),
    )


def latest_jobs() -> list[Path]:
    """Return the log folder of this user's newest job among those that were given none, and those of others that run.

    Raises:
        ValueError: there is none.
    """
    jobs: list[tuple[float, bool, Path]] = []
    for path in Path(tempfile.gettempdir()).glob(f"anabranch-logs-*/{JOB_FILE}"):
        with suppress(OSError, ValueError):  # of a job that ends just now, or of something else
            if path.stat().st_uid == os.getuid():
                job = status_of(path.parent)
                runs = any(role.state in ("running", "waiting", "stopped") for role in job.roles)
                jobs.append((job.started or 0.0, runs, path.parent))
    if not jobs:
        raise ValueError("you have no running job without --log-dir; give the log folder of the job")
    newest, *others = sorted(jobs, reverse=True)
    return [newest[2], *(folder for _, runs, folder in others if runs)]


def _read_role(folder: Path, process: _Process, *, ended: bool) -> tuple[RoleStatus, Mapping[str, Any]]:
    role, rank, pid, endpoint = process.role, process.rank, process.pid, process.endpoint
    facts = read_status(folder / f"{role}-{rank}", pid)
    state: State
    if ended or pid is None:
        state = "gone" if ended else "restarting" if process.begun else "starting"
    elif process.elsewhere:
        state = facts.get("elsewhere", "starting")
    elif (state := process_state(pid, process.started)) != "running":
        pass
    elif endpoint and endpoint.startswith("unix:") and not Path(endpoint.removeprefix("unix:")).exists():
        # One that has reported anything listens no longer, because the job ends.
        state = "running" if any(service in facts for service in _SERVICES) else "starting"
    return RoleStatus(role, rank, pid, endpoint, state, started=process.started), facts


def ahead(facts: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the status of a process whose clock is so far behind this one's, in times of this one's."""
    opened = [{**one, "since": one["since"] + seconds} for one in facts.get("open", ())]
    return {**facts, "open": opened}


def _with_facts(role: RoleStatus, facts: Mapping[str, Any]) -> RoleStatus:
    run, opened = facts.get("run", {}), facts.get("open", ())
    known: dict[str, Any] = {"steps": run.get("steps"), "loads": run.get("tables", {}), "crossed": run.get("bytes", {})}
    known["service"] = {name: value for of in _SERVICES for name, value in facts.get(of, {}).items()}
    doing = next((one for one in opened if one["name"] in ACTIVITIES), None)
    if doing is not None:
        known |= {"doing": ACTIVITIES[doing["name"]], "doing_seconds": _seconds_since(doing)}
    longest = next((one for one in opened if one["name"] == "wait"), None)
    if longest is None or role.state != "running":  # a frozen one does not wait
        known["crossing"] = run.get("bytes_per_second", {}) if role.state == "running" else {}
    else:
        known |= {"state": "waiting", "waiting_for": longest["peer"], "waiting_seconds": _seconds_since(longest)}
        known |= {"waiting_limit": longest.get("limit"), "operation": longest["operation"]}
    return replace(role, **known)


def _seconds_since(span: Mapping[str, Any]) -> float:
    return max(0.0, time.monotonic() - float(span["since"]))


def _with_names(role: RoleStatus, roles: Sequence[RoleStatus], called: Mapping[str, str]) -> RoleStatus:
    """Return a waiting role with the names of those that hold it up, in place of how it calls its peers.

    They are those of its peers that do not run, or else those that do not wait, or else all.
    """
    if role.waiting_for is None:
        return role
    names = [called.get(peer, re.sub("^rank ", "worker ", peer)) for peer in role.waiting_for.split(", ")]
    absent = {role.name for role in roles if role.state not in ("running", "waiting")}
    waiting = {role.name for role in roles if role.state == "waiting"}
    holding_up = [name for name in names if name in absent] or [name for name in names if name not in waiting] or names
    return replace(role, waiting_for=", ".join(holding_up))
