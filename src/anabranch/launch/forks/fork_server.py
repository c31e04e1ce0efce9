"""The process that has imported everything and from which a job's processes are forked, in milliseconds each.

::

    launcher ── fork server ── (a moment's process) ── role        asked for over the channel
        └────────────────────────────────────────────── role        once that moment's process has ended

A fork of a process with threads may inherit a held lock that nobody will release, so this one has exactly one thread,
and checks this before each fork. It opens nothing either: no socket but its channel, no process group, no CUDA; and it
draws from no generator. Between it and a role stands a process that ends at once, so that the kernel hands the role to
the launcher, the nearest subreaper: the launcher signals it, sees its end and has its exit code as of any child.

It ends when the launcher closes the channel, or dies, and ignores the signals that end a job. Started by
``launcher_side.py``.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import faulthandler
import gc
import os
import random
import runpy
import signal
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import SourceFileLoader
from multiprocessing import current_process
from pathlib import Path
from types import ModuleType
from typing import Any

from anabranch.held_error import hold_back_errors
from anabranch.launch.python_program import PythonProgram
from anabranch.launch.socket_messages import receive
from anabranch.launch.supervision.parent_death import prctl, tie_to
from anabranch.record.process import record_process

# All that workers, experts and parameter servers import before their first step; the last ones are optional.
_IMPORTED = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "anabranch.cli.serve",
    "anabranch.experts",
    "anabranch.executor",
    "anabranch.launch.roles",
    "anabranch.observe",
    "anabranch.parameter_server",
    "anabranch.pipeline",
    "anabranch.tables.table",
)

_PR_SET_NAME = 15
_ARGUMENTS_FIELD = 45  # of /proc/self/stat behind the command's name: arg_start, arg_end, env_start, env_end
_BLAS_SETTERS = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads")
_OURS = (
    __file__,
    runpy.__file__,
    "<frozen runpy>",
    "<frozen importlib._bootstrap>",
    "<frozen importlib._bootstrap_external>",
)
_ADOPTION_SECONDS = 20.0
_AUTHENTICATION_KEY_BYTES = 32

_started_as = sys.modules["__main__"]  # a role sets its own; the interpreter still needs this one


def main() -> None:
    """Serve the launcher at the other end of stdin until it goes; in a fork, run the role that was requested."""
    keep = keep_shared_modules()
    set_title("fork-server", ["anabranch: fork server"])
    handlers = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    channel = socket.socket(fileno=0)
    _import_all()  # an error is on the launcher's stderr, and the end of what it waits for tells it
    keep()
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, every page that they share
    role, descriptors = _serve(channel)
    channel.detach()  # a role's stdin replaces it
    for number, handler in handlers.items():
        signal.signal(number, handler)
    program = PythonProgram(**{**role["program"], "arguments": tuple(role["program"]["arguments"])})
    _become(role, program, descriptors)
    keep_shared_libraries()
    run_as_main(program)


def _import_all() -> None:
    for name in _IMPORTED:
        import_module(name)


def _serve(channel: socket.socket) -> tuple[Any, list[int]]:
    """Return the request, only in forks: its descriptors are stdin, stdout, stderr and its report."""
    server = os.getpid()
    while (received := receive(channel)) is not None:
        _, descriptors = received
        try:
            if (threads := len(os.listdir("/proc/self/task"))) != 1:  # those of C libraries, too
                raise OSError(f"the fork server has {threads} threads; a fork might inherit held locks")
            middle = os.fork()  # with one thread, which was counted on the line before: no lock is held by another
            if middle == 0:
                if os.fork() == 0:  # of a fork that has one thread and ends at once, so that the role is not our child
                    return received
                os._exit(0)
            os.waitpid(middle, 0)
        except OSError as error:
            with suppress(OSError):  # the launcher has gone
                os.write(descriptors[-1], str(error).encode())
            if os.getpid() != server:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)
    sys.exit(0)


def _become(role: dict[str, Any], program: PythonProgram, descriptors: list[int]) -> None:
    """Turn this fork into a process that looks like a newly started one to its script, and report its number.

    An error's traceback is on its stderr, and its report ends.
    """
    *stdio, report = descriptors
    environment: dict[str, str] = role["environment"]
    for target, descriptor in enumerate(stdio):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.setsid()
    _tie_to_launcher(role["launcher"])
    os.chdir(role["cwd"])
    os.environ.clear()
    os.environ.update(environment)
    hold_back_errors()
    set_title(role["name"], program.command, environment)
    time.tzset()
    tempfile.tempdir = None
    _seed_anew()
    limit_threads(environment)
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    record_process()
    os.write(report, str(os.getpid()).encode())
    os.close(report)


def _tie_to_launcher(launcher: int) -> None:
    """From now on the kernel kills this process when the launcher dies."""
    end = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() != launcher:
        if time.monotonic() > end:
            raise TimeoutError(f"the launcher (pid {launcher}) is gone")
        time.sleep(0.0002)
    tie_to(launcher)


def _seed_anew() -> None:
    """Forks share their server's generators, while each started process has its own seeds."""
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
    current_process().authkey = os.urandom(_AUTHENTICATION_KEY_BYTES)


# --- the title, threads and exit of a fork, as those of a started process
#
# Title. The kernel shows the memory in which it once placed the arguments and the environment. A fork of a server has
# the server's; so the server is started with room to spare, and each fork writes its own arguments and environment
# there. Both must be correct: people read ``ps``, and processes left behind by a job are found by their environment.
#
# Exit. At exit the interpreter tears down every module, and the C library every global object of every library. Tearing
# down those loaded before the fork would copy and walk half a gigabyte. So they are skipped, after everything that the
# script may have registered or made: its ``atexit`` functions have run, its own modules are torn down, its libraries'
# global objects destroyed, and C output is flushed.


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


# --- the script as ``__main__`` of this process, exactly like ``python file.py``


def run_as_main(program: PythonProgram) -> None:
    """Run ``program``; return or raise like it, and show an error's traceback from its own first frame on."""
    sys.argv = [program.target, *program.arguments]
    sys.orig_argv = program.command
    try:
        if program.is_module:
            if program.looks_here and not sys.flags.safe_path:
                sys.path.insert(0, os.getcwd())
            runpy.run_module(program.target, run_name="__main__", alter_sys=True)
        else:
            _run_file(program.target)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
            trace = trace.tb_next
        shown_by, sys.excepthook = sys.excepthook, lambda *_: None  # the interpreter shows nothing more
        shown_by(type(error), error.with_traceback(trace), trace)
        raise


def _run_file(target: str) -> None:
    path = os.path.join(os.getcwd(), target.removeprefix("./"))
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    module = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    vars(module).update(__file__=path, __cached__=None, __loader__=loader, __builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module
    try:
        source = loader.get_data(path)
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    exec(loader.source_to_code(source, path), vars(module))  # noqa: S102 - as the interpreter runs a script, not cached
