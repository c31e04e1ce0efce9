"""Processes that workers started and left behind, found and killed even when they moved to a session of their own.

While a job runs the launcher is a *subreaper*: a process whose parent dies becomes the launcher's child instead of
init's. Once all workers have ended, what is left of the job are therefore direct children of the launcher::

    launcher ── worker 0 ── DataLoader worker            in worker 0's group: killed with the group
             └─ worker 1 ── sh ── daemon (own session)   worker 1 ends ─> child of the launcher: killed here

A child is the job's if its environment names the job, so a launcher inside a larger program (a test run, say) leaves
that program's other children alone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anabranch.launch.leash import prctl

__all__ = ["adopt_orphans", "kill_orphans"]

_PR_SET_CHILD_SUBREAPER = 36
_GENERATIONS = 64


@contextmanager
def adopt_orphans() -> Iterator[None]:
    """Makes this process the parent of its descendants' orphans until the block ends."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


def kill_orphans(mark: str) -> None:
    """Kills and reaps every child whose environment holds ``mark`` (``NAME=value``), and what that orphans in turn."""
    for _ in range(_GENERATIONS):
        orphans = [pid for pid in _children() if _has_mark(pid, mark)]
        if not orphans:
            return
        for pid in orphans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def _has_mark(pid: int, mark: str) -> bool:
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
