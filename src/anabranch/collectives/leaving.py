"""Ends the job's process group before the interpreter ends, for scripts that leave that to it.

Gloo's threads take the interpreter's lock to free a tensor. One that waits for it when the interpreter is taken apart
is ended by Python in the middle of C++ code, and with it the whole process: SIGABRT, "terminate called without an
active exception". On a busy machine a thread may come so late. The threads end with the last reference to their group,
so that is let go of while Python still runs.
"""

from __future__ import annotations

import atexit
import os

import torch.distributed as dist

__all__ = ["destroy_group_at_exit"]

_registered_by: int | None = None


def destroy_group_at_exit() -> None:
    """Destroy the process group at process exit unless it has been destroyed; may be called repeatedly.

    Functions that were given to ``atexit`` later run before that, with the group in place.
    """
    global _registered_by
    if _registered_by != os.getpid():
        _registered_by = os.getpid()
        atexit.register(_destroy)


def _destroy() -> None:
    if _registered_by == os.getpid() and dist.is_initialized():  # a fork has none of the threads
        dist.destroy_process_group()
