"""Find what a test leaves in its process: threads, descriptors, shared memory, mappings of it, child processes."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from anabranch.launch.forks import launcher_side

__all__ = ["Held", "held", "wait_until_given_back"]

SECONDS = 20.0  # the margin of a hang: what is ending already needs milliseconds, more on a busy machine

# Belongs to the process, not to the test that needed it first. By name, with the reason.
KEPT_THREADS = (
    "Dummy-",  # a thread of torch's own (autograd, OpenMP) that has run Python once, and lives with the process
    "InductorSubproc",  # torch keeps its pool of compiling processes for later graphs
    "SubprocPool",  # the same, under another name
)
KEPT_DESCRIPTORS = (
    "/mpl-data/fonts/",  # matplotlib keeps the fonts that it has drawn with
    "/dev/null",  # opened once by numba's and torch's lazy imports
    "/dev/urandom",
    "/sys/",  # how many cores there are: read by OpenMP and kept
)


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds at one moment; each thing is written as a reader of a failure wants to see it."""

    threads: frozenset[threading.Thread]
    descriptors: frozenset[str]
    shared: frozenset[str]
    children: frozenset[int]

    def since(self, before: Held) -> list[str]:
        """Return what is here and was not in ``before``, as text."""
        found = [f"thread {thread.name}" for thread in self.threads - before.threads]
        found += [f"descriptor {entry}" for entry in self.descriptors - before.descriptors]
        found += [f"shared memory {name}" for name in self.shared - before.shared if _is_ours(name)]
        found += [f"process {_name_of(child)}" for child in self.children - before.children]
        return sorted(found)


def held() -> Held:
    """Return what this process holds now."""
    kept = (
        launcher_side._kept
    )  # LocalJob's fork server, for all tests of a process; there is no way to look without starting it
    descriptors, children = _descriptors(), _children()
    if kept is not None and kept.running:
        descriptors = frozenset(entry for entry in descriptors if not entry.startswith(f"{kept.fileno()}: "))
        children -= {kept.pid}
    return Held(_threads(), descriptors, _shared(), children)


def wait_until_given_back(before: Held, seconds: float = SECONDS, now: Callable[[], Held] = held) -> list[str]:
    """Return what is held beyond ``before`` after what was ending has had its time to end."""
    left = now().since(before)
    if not left:
        return left
    for _ in range(2):  # what only a cycle of references holds, and then what the cycle's finalizers let go
        gc.collect()
    deadline = monotonic() + seconds
    while (left := now().since(before)) and monotonic() < deadline:
        sleep(0.01)
    return left


def _threads() -> frozenset[threading.Thread]:
    return frozenset(thread for thread in threading.enumerate() if not thread.name.startswith(KEPT_THREADS))


def _descriptors() -> frozenset[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists them is closed again
            target = os.readlink(f"/proc/self/fd/{number}")
            if not any(part in target for part in (*KEPT_DESCRIPTORS, f"/proc/{os.getpid()}/fd")):
                found.add(f"{number}: {target}")
    return frozenset(found)


def _shared() -> frozenset[str]:
    return frozenset(os.listdir("/dev/shm"))  # the place of POSIX shared memory


def _is_ours(name: str) -> bool:
    """Whether a file of /dev/shm is not another process's: it is mapped here, or in no process at all."""
    path = f"/dev/shm/{name}"
    if os.path.isdir(path):  # somebody's temporary directory
        return False
    users = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if path in (process / "maps").read_text():
                users.add(process.name)
    return os.path.exists(path) and (not users or str(os.getpid()) in users)


def _children() -> frozenset[int]:
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # the thread has ended meanwhile
            found.update(int(child) for child in Path(f"/proc/self/task/{thread}/children").read_text().split())
    return frozenset(found)


def _name_of(process: int) -> str:
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        command = "ended"
    return f"{process} ({command.strip() or 'ended, not waited for'})"
