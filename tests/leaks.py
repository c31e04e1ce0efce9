"""Find resources that a test leaks: threads, descriptors, shared memory, mappings of it, child processes."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from anabranch.launch.forks import launcher_side

SECONDS = 20.0  # the margin of a hang: a release takes milliseconds, more on a busy machine

# Belongs to the process, not to the test that needed it first. By name, with the reason.
KEPT_THREADS = (
    "Dummy-",  # a thread of torch (autograd, OpenMP) that has run Python once, and lives as long as the process
    "InductorSubproc",  # torch keeps its pool of compiling processes for later graphs
    "SubprocPool",  # the same, under another name
    "tqdm_monitor",  # tqdm's one thread, which torch starts with its first progress bar
)
KEPT_DESCRIPTORS = (
    "/mpl-data/fonts/",  # matplotlib keeps the fonts that it has drawn with
    "/dev/null",  # opened once by numba's and torch's lazy imports
    "/dev/urandom",
    "/sys/",  # the number of cores: read by OpenMP and kept open
    "/dev/nvidia",  # CUDA's driver, which opens more the more of the device is used
)


@dataclass(frozen=True, slots=True)
class HeldResources:
    """The resources of a process at one moment, as text for the message of a failed test."""

    threads: frozenset[threading.Thread]
    descriptors: frozenset[str]
    shared: frozenset[str]
    children: frozenset[int]

    def since(self, before: HeldResources) -> list[str]:
        """Return the resources that are not in ``before``, as text."""
        found = [f"thread {thread.name}" for thread in self.threads - before.threads]
        found += [f"descriptor {entry}" for entry in self.descriptors - before.descriptors]
        found += [f"shared memory {name}" for name in self.shared - before.shared if _is_ours(name)]
        found += [f"process {_name_of(child)}" for child in self.children - before.children]
        return sorted(found)


def held_resources() -> HeldResources:
    """Return the resources that this process holds now."""
    # LocalJob's fork server, shared by all tests of a process; the public function would start it.
    kept = launcher_side._kept
    descriptors, children = _descriptors(), _children()
    if kept is not None and kept.running:
        descriptors = frozenset(entry for entry in descriptors if not entry.startswith(f"{kept._channel.fileno()}: "))
        children -= {kept.pid}
    return HeldResources(_threads(), descriptors, _shared(), children)


def wait_until_released(
    before: HeldResources, seconds: float = SECONDS, now: Callable[[], HeldResources] = held_resources
) -> list[str]:
    """Return the resources held beyond ``before``, once those that are ending have had time to end."""
    start, pause = monotonic(), 0.0005
    while (left := now().since(before)) and monotonic() < start + seconds:
        if pause == 0.008:  # not for threads that are ending: a collection takes longer than they do
            _collect()
        sleep(pause)
        pause = min(2 * pause, 0.016)
    if left:  # a thread that has ended since may have held them
        _collect()
        left = now().since(before)
    return left


def _collect() -> None:
    for _ in range(2):  # objects held only by a cycle of references, then those its finalizers release
        gc.collect()


def _threads() -> frozenset[threading.Thread]:
    return frozenset(thread for thread in threading.enumerate() if not thread.name.startswith(KEPT_THREADS))


def _descriptors() -> frozenset[str]:
    found = set()
    kept = [*KEPT_DESCRIPTORS, f"/proc/{os.getpid()}/fd"]
    torch = sys.modules.get("torch")  # a process that only distributes tests does not import it
    if torch is not None and torch.cuda.is_initialized():
        kept.append("[eventfd]")  # the driver's
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists them is closed again
            target = os.readlink(f"/proc/self/fd/{number}")
            if not any(part in target for part in kept):
                found.add(f"{number}: {target}")
    return frozenset(found)


def _shared() -> frozenset[str]:
    return frozenset(os.listdir("/dev/shm"))  # the place of POSIX shared memory


def _is_ours(name: str) -> bool:
    """Return True for a file of /dev/shm that is mapped here, or in no process at all, so not another process's.

    Files are compared by number: a semaphore is mapped under the temporary name that it had while it was made.
    """
    path = Path("/dev/shm", name)
    if path.is_dir():  # somebody's temporary directory
        return False
    try:
        number = str(path.stat().st_ino)
    except FileNotFoundError:
        return False
    users = {process.name for process in Path("/proc").glob("[0-9]*") if number in _shared_files_of(process)}
    return path.exists() and (not users or str(os.getpid()) in users)


def _shared_files_of(process: Path) -> set[str]:
    """Return the numbers of the files in /dev/shm that a process has mapped."""
    with suppress(OSError):  # ended, or another user's
        lines = [line.split(maxsplit=5) for line in (process / "maps").read_text().splitlines()]
        return {fields[4] for fields in lines if len(fields) == 6 and fields[5].startswith("/dev/shm/")}
    return set()


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
