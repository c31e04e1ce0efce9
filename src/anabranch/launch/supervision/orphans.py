"""Processes that workers started and left behind, found and killed in any session or group.

While a job runs the launcher is a *subreaper*: a process whose parent dies becomes the launcher's child instead of
init's. Once all workers have ended, what is left of the job are therefore direct children of the launcher::

    launcher ── worker 0 ── DataLoader worker            worker 0 ends ─> child of the launcher: killed here
             └─ worker 1 ── sh ── daemon (own session)   worker 1 ends, sh ends ─> child of the launcher: killed here

A child is the job's if its environment names the job, so that a launcher inside a larger program (a test run, say)
leaves that program's other children alone.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anabranch.launch.supervision.parent_death import prctl

_PR_SET_CHILD_SUBREAPER = 36
_GENERATIONS = 64
_KILL_SECONDS = 1.0

# The switch is the process's; jobs may run in several of its threads.
_lock = threading.Lock()
_adopting = 0


@contextmanager
def adopt_orphans() -> Iterator[None]:
    """Make this process the parent of its descendants' orphans until the last of these blocks ends."""
    _count(+1)
    try:
        yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    global _adopting
    with _lock:
        _adopting += change
        prctl(_PR_SET_CHILD_SUBREAPER, int(_adopting > 0))


def kill_orphans(mark: str, sessions: Container[int]) -> None:
    """Kills and reaps every child whose environment holds ``mark`` (``NAME=value``), and what that orphans in turn.

    A child that is dead already has no environment any more; it is known by the worker whose session it was in.
    """
    for _ in range(_GENERATIONS):
        orphans = [pid for pid in _children() if _is_of_the_job(pid, mark.encode(), sessions)]
        if not orphans:
            return
        for pid in orphans:
            _kill(pid)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, ChildProcessError):
        descriptor = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGKILL)
            select.select([descriptor], [], [], _KILL_SECONDS)
            os.waitpid(pid, os.WNOHANG)
        finally:
            os.close(descriptor)


def _children() -> list[int]:
    pids: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            pids += map(int, path.read_text().split())
    return pids


def _is_of_the_job(pid: int, mark: bytes, sessions: Container[int]) -> bool:
    with suppress(OSError):
        if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return True
    with suppress(ProcessLookupError):
        return os.getsid(pid) in sessions
    return False
