"""Ties a worker to the launcher: when the launcher dies, however it dies, the kernel kills the worker.

Run by path, in front of the worker's own command, and replaced by it (``exec``), so the worker is the launcher's direct
child and sees nothing of this. It imports nothing of the package: importing the package imports torch, which would
cost every worker more than a second before its script starts.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def prctl(option: int, value: int) -> None:
    """Set one of the kernel's per-process switches, see ``man 2 prctl``."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


def tie_to(parent: int) -> None:
    """Be killed by the kernel when the process ``parent`` ends."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the switch was set
        sys.exit(f"the launcher (pid {parent}) is gone")


if __name__ == "__main__":
    tie_to(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606  a fixed argument list, no shell
