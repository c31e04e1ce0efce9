"""Ends a fork without tearing down the memory shared with its server: that would copy and walk half a gigabyte.

At exit the interpreter tears down every module, and the C library every global object of every library. Tearing down
those loaded before the fork is unnecessary and takes longer than many a script. So they are skipped, after everything
that the script may have registered or made: its ``atexit`` functions have run, its own modules are torn down, its
libraries' global objects destroyed, and C output is flushed.
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
    """Skip the ``weakref.finalize`` callbacks of objects that exist now.

    PyTorch's would tear down its operators one by one, half of a fork's memory writes.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


def keep_shared_libraries() -> None:
    """Do not tear down the libraries loaded so far when this process ends; call it in a fork."""
    libc = ctypes.CDLL(None)
    # Run in the reverse order, with the status of the exit for the first one: `fflush(NULL)`, then `_exit(status)`.
    with suppress(AttributeError):  # glibc alone has it
        libc.on_exit(libc._exit, None)
        libc.__cxa_atexit(libc.fflush, None, None)
