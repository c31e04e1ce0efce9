"""The C library's memory: the memory of large answers and requests returns to the system once freed."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_ARENA_MAX = -8  # M_ARENA_MAX of glibc's malloc.h


def keep_one_heap() -> None:
    """Lets all threads of this process allocate from one heap; to be called before it starts any.

    glibc gives each thread a separate heap, and returns its end only when it is twice the largest block ever freed: a
    service that answered a burst of large requests, each on its own thread, keeps their memory for life. On other
    systems than glibc nothing happens.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(ctypes.c_int(_ARENA_MAX), ctypes.c_int(1))
