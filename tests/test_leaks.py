"""The check after each test: it sees this process's shared memory, and no other process's semaphores."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile

from leaks import held_resources

HOLDS_A_SEMAPHORE = """
import multiprocessing
semaphore = multiprocessing.get_context("spawn").Semaphore()
print("ready", flush=True)
input()
"""


def test_shared_memory_of_this_process_is_seen_and_a_semaphore_of_another_is_not() -> None:
    before = held_resources()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_A_SEMAPHORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        found = held_resources()
        assert len(found.shared - before.shared) >= 1
        assert not [line for line in found.since(before) if "shared memory" in line]
        with NamedTemporaryFile(dir="/dev/shm") as file:
            file.write(b"0")
            file.flush()
            with mmap.mmap(file.fileno(), 1):
                assert [line for line in held_resources().since(before) if "shared memory" in line] == [
                    f"shared memory {Path(file.name).name}"
                ]
        other.communicate("\n")
