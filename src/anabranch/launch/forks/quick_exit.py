"""Ends a fork without tearing down the memory shared with its server: that would copy and walk half a gigabyte.

At its end the interpreter takes every module apart, and the C library every global object of every library. Those that
a fork found loaded do not concern its script's, and all of them together take longer than many a script. So they are
left alone, behind everything that the script may have registered or made: its ``atexit`` functions have run, its own
modules are taken apart, its libraries' global objects destroyed, what C code has printed is written.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import weakref
from contextlib import suppress

__all__ = ["keep_shared_finalizers", "keep_shared_libraries", "keep_shared_modules"]


def keep_shared_modules(names: list[str]) -> None:
    """Leave the modules of these names whole; call it before most are imported, and add the names later.

    Of the functions given to ``atexit`` the first is the last to run, so the others find all modules in place.
    """
    atexit.register(_take_out, names)


def _take_out(names: list[str]) -> None:
    for name in names:
        module = sys.modules.pop(name, None)
        if module is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))  # never given back: it is not to be freed


def keep_shared_finalizers() -> None:
    """Leave out what ``weakref.finalize`` would do at the end for objects that are there now.

    PyTorch's would take its operators apart one by one, half of what a fork writes in its whole life.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


def keep_shared_libraries() -> None:
    """Leave the libraries loaded so far as they are when this process ends; call it in a fork."""
    libc = ctypes.CDLL(None)
    # Run in the reverse order, with the status of the exit for the first one: `fflush(NULL)`, then `_exit(status)`.
    with suppress(AttributeError):  # glibc alone has it
        libc.on_exit(libc._exit, None)
        libc.__cxa_atexit(libc.fflush, None, None)
