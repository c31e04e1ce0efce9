"""Copies rank 0's output to its log while the launcher stands still (Ctrl-Z); run as a program, without Anabranch.

    python unattended.py LOG SOURCE [SOURCE]

Descriptors all. The log's is shared with the launcher, position included. Its stdin is the launcher's leash: it ends
with that, and when all sources have.
"""

from __future__ import annotations

import os
import select
import sys

__all__ = ["copy"]

_CHUNK = 1 << 16


def copy(log: int, sources: set[int]) -> None:
    """Copies until stdin, or the last source, ends."""
    poller = select.poll()
    for source in (0, *sources):
        poller.register(source, select.POLLIN)
    while sources:
        for source, _ in poller.poll():
            if source == 0:
                return
            try:
                data = os.read(source, _CHUNK)
            except BlockingIOError:
                continue
            except OSError:  # a terminal that nobody holds any more
                data = b""
            if not data:
                poller.unregister(source)
                sources.discard(source)
            while data:
                data = data[os.write(log, data) :]


if __name__ == "__main__":
    copy(int(sys.argv[1]), set(map(int, sys.argv[2:])))
