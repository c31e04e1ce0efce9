"""A job's processes as they are now, read from its ``job.json``, from ``/proc`` and from what its workers leave there.

Nothing is asked of the processes themselves, so a frozen one is no reason to wait.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from anabranch.launch.job_file import JOB_FILE

__all__ = ["JobStatus", "RoleStatus", "State", "latest_job", "status_of"]

State: TypeAlias = Literal["starting", "running", "stopped", "restarting", "gone"]


@dataclass(frozen=True, slots=True)
class RoleStatus:
    """One process of a job.

    Attributes:
        role: ``"worker"``, ``"parameters"`` or ``"expert"``.
        rank: which of its role.
        pid: its process; ``None`` while it is to be started again.
        endpoint: where a service listens.
        state: ``"starting"``: a service that does not listen yet; ``"stopped"``: frozen, by SIGSTOP or a debugger;
            ``"restarting"``: it has ended and is to be started again; ``"gone"``: it has ended.
        steps: optimizer steps of a worker, those of a loaded checkpoint included; ``None`` if it has no ``Executor``.
        waiting_for: not known to this version: ``None``.
        waiting_seconds: the same.
    """

    role: str
    rank: int
    pid: int | None
    endpoint: str | None
    state: State
    steps: int | None = None
    waiting_for: str | None = None
    waiting_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job.

    Attributes:
        roles: its processes.
        started: seconds since the epoch.
        ended: the same; ``None`` while it runs.
    """

    roles: tuple[RoleStatus, ...]
    started: float
    ended: float | None


def status_of(folder: Path) -> JobStatus:
    """Return the state of the job whose log folder this is.

    Raises:
        ValueError: there is no ``job.json`` in it, or one of another form.
    """
    path = folder / JOB_FILE
    try:
        record = json.loads(path.read_text())
        ended = record["ended"]
        roles = tuple(_role(folder, ended is not None, **entry) for entry in record["roles"])
        return JobStatus(roles, float(record["started"]), ended)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; give a job's log folder (--log-dir)") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not describe a job: {error!r}") from error


def latest_job() -> Path:
    """Return the log folder of this user's newest job among those that were given none.

    Raises:
        ValueError: there is none.
    """
    found = max(_kept_folders(), default=None)
    if found is None:
        raise ValueError("no job of yours runs without --log-dir; name the log folder of the one that you mean")
    return found[1]


def _kept_folders() -> Iterator[tuple[float, Path]]:
    for path in Path(tempfile.gettempdir()).glob(f"anabranch-logs-*/{JOB_FILE}"):
        try:
            if path.stat().st_uid == os.getuid():
                yield float(json.loads(path.read_text())["started"]), path.parent
        except (OSError, ValueError, KeyError, TypeError):  # of a job that ends just now, or of something else
            continue


def _role(folder: Path, ended: bool, *, role: str, rank: int, pid: int | None, endpoint: str | None) -> RoleStatus:
    state: State = "gone" if ended else "restarting" if pid is None else _state_of(pid, endpoint)
    return RoleStatus(role, rank, pid, endpoint, state, _steps(folder / f"worker-{rank}.steps", role))


def _state_of(pid: int, endpoint: str | None) -> State:
    try:
        # The name in parentheses may hold anything; the state follows the last of them.
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    if letter in "ZXx":
        return "gone"
    if letter in "Tt":
        return "stopped"
    listens = endpoint is None or not endpoint.startswith("unix:") or Path(endpoint.removeprefix("unix:")).exists()
    return "running" if listens else "starting"


def _steps(path: Path, role: str) -> int | None:
    if role != "worker":
        return None
    try:
        return int.from_bytes(path.read_bytes(), "little")
    except OSError:
        return None
