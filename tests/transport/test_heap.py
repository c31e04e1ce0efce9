"""What large answers took goes back to the system, whichever threads have made them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.transport import heap

PROGRAM = """
import runpy, sys, threading
keep_one_heap = runpy.run_path(sys.argv[1])["keep_one_heap"]
if sys.argv[2] == "one":
    keep_one_heap()
SIZE, THREADS = 8 << 20, 8
both = threading.Barrier(THREADS)

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def answer():
    bytearray(SIZE)
    both.wait(20)
    held = bytearray(b"x" * SIZE)
    both.wait(20)

before = resident()
threads = [threading.Thread(target=answer) for _ in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print((resident() - before) // SIZE)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and only glibc has heaps for threads")
def test_one_heap_returns_memory_that_many_would_keep() -> None:
    def kept(heaps: str) -> int:
        command = [sys.executable, "-c", PROGRAM, str(Path(heap.__file__)), heaps]
        return int(subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout)

    assert kept("one") <= 3
    assert kept("many") > 3  # or the one heap is not needed any more
