"""The title, threads and exit of a fork, as those of a started process.

**Title.** The kernel shows the memory in which it once placed the arguments and the environment. A fork of a server has
the server's; so the server is started with room to spare, and each fork writes its own arguments and environment there.
Both must be correct: people read ``ps``, and processes left behind by a job are found by their environment.

**Exit.** At exit the interpreter tears down every module, and the C library every global object of every library.
Tearing down those loaded before the fork would copy and walk half a gigabyte. So they are skipped, after everything
that the script may have registered or made: its ``atexit`` functions have run, its own modules are torn down, its
libraries' global objects destroyed, and C output is flushed.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from anabranch.launch.supervision.parent_death import prctl

ARGUMENTS_ROOM = 1 << 12
"""Bytes of arguments that a process is started with so that its forks can show theirs; what is longer is cut."""

ENVIRONMENT_ROOM = 1 << 14
"""The same for the environment: how much larger than the server's a fork's may be."""

_PR_SET_NAME = 15
_ARGUMENTS_FIELD = 45  # of /proc/self/stat behind the command's name: arg_start, arg_end, env_start, env_end
_BLAS_SETTERS = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads")


def set_title(name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Show ``name`` as this process's command, at most 15 bytes, and ``command`` and ``environment`` in full."""
    text = ctypes.create_string_buffer(name.encode()[:15])
    prctl(_PR_SET_NAME, ctypes.addressof(text))
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    starts = [int(field) for field in fields[_ARGUMENTS_FIELD : _ARGUMENTS_FIELD + 4]]
    _write(starts[0], starts[1], command)
    if environment is not None:
        # Short ones first: the job's own variables, which must not be cut, are short.
        _write(starts[2], starts[3], sorted((f"{key}={value}" for key, value in environment.items()), key=len))


def _write(start: int, end: int, strings: Sequence[str]) -> None:
    data = b"".join(string.encode(errors="surrogateescape") + b"\0" for string in strings)
    size = end - start
    if size > 0:
        # The last byte stays zero: any other makes the kernel read the arguments on into the environment.
        ctypes.memmove(start, data[: size - 1].ljust(size, b"\0"), size)


def limit_threads(environment: Mapping[str, str]) -> None:
    """Compute with the number of threads in ``OMP_NUM_THREADS`` and ``OPENBLAS_NUM_THREADS``, or the default.

    The fork server left torch's number unset, so by default torch chooses it. It had to set that of NumPy's and SciPy's
    BLAS to 1: that library starts its threads when it is loaded.
    """
    text = environment.get("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))  # the default of these libraries is not larger
    if text is not None:
        sys.modules["torch"].set_num_threads(min(cores, int(text)))
    threads = min(cores, int(environment.get("OPENBLAS_NUM_THREADS") or text or cores))
    lines = Path("/proc/self/maps").read_text().splitlines() if threads > 1 else []
    for path in {line.split(maxsplit=5)[5] for line in lines if "openblas" in line and "/" in line}:
        for name in _BLAS_SETTERS:
            with suppress(AttributeError, OSError):
                ctypes.CDLL(path)[name](ctypes.c_int(threads))


def keep_shared_modules() -> Callable[[], None]:
    """Leave modules whole at exit; call this before most are imported, and what it returns when all are.

    Of the functions given to ``atexit`` the first is the last to run, so the others find all modules in place. The
    ``weakref.finalize`` callbacks of objects that exist then are skipped, too: PyTorch's would tear down its operators
    one by one, half of a fork's memory writes.
    """
    names: list[str] = []

    def keep() -> None:
        names.extend(sys.modules.keys() - {"__main__", "sys", "builtins"})
        for finalizer in list(getattr(weakref.finalize, "_registry", ())):
            finalizer.atexit = False

    def take_out() -> None:
        for name in names:
            module = sys.modules.pop(name, None)
            if module is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))  # never given back: it is not to be freed

    atexit.register(take_out)
    return keep


def keep_shared_libraries() -> None:
    """Do not tear down the libraries loaded so far when this process ends; call it in a fork."""
    libc = ctypes.CDLL(None)
    # Run in the reverse order, with the status of the exit for the first one: `fflush(NULL)`, then `_exit(status)`.
    with suppress(AttributeError):  # glibc alone has it
        libc.on_exit(libc._exit, None)
        libc.__cxa_atexit(libc.fflush, None, None)
