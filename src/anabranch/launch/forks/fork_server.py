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

import faulthandler
import gc
import os
import random
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from importlib import import_module
from multiprocessing import current_process
from typing import Any

from anabranch.held_error import hold_back_errors
from anabranch.launch.forks.main_script import run_as_main
from anabranch.launch.forks.process_state import keep_shared_libraries, keep_shared_modules, limit_threads, set_title
from anabranch.launch.python_program import PythonProgram
from anabranch.launch.socket_messages import receive, send
from anabranch.launch.supervision.parent_death import prctl
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

_PR_SET_PDEATHSIG = 1
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
    _import_all()  # an error is on the launcher's stderr, and the channel's end tells it
    keep()
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, every page that they share
    with suppress(OSError):
        send(channel, {"ready": True})
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


def threads() -> int:
    """Return the number of threads of this process, including those of C libraries."""
    return len(os.listdir("/proc/self/task"))


def _serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the request, only in forks: its descriptors are stdin, stdout, stderr and its report."""
    server = os.getpid()
    while True:
        try:
            received = receive(channel)
        except OSError:  # the launcher was killed in the middle of a message
            received = None
        if received is None:
            sys.exit(0)
        request, descriptors = received
        try:
            if threads() != 1:
                raise RuntimeError(f"the fork server has {threads()} threads; a fork might inherit held locks")
            middle = os.fork()  # with one thread, which was counted on the line before: no lock is held by another
            if middle == 0:
                if os.fork() == 0:  # of a fork that has one thread and ends at once, so that the role is not our child
                    return request, descriptors
                os._exit(0)
            os.waitpid(middle, 0)
        except (OSError, RuntimeError) as error:
            _refuse(descriptors[-1], str(error))
            if os.getpid() != server:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)


def _refuse(report: int, reason: str) -> None:
    """Tell the launcher, if it is still alive, that the process was not created."""
    with suppress(OSError):
        os.write(report, reason.encode())


def _become(role: dict[str, Any], program: PythonProgram, descriptors: list[int]) -> None:
    """Turn this fork into a process that looks like a newly started one to its script, and report its number."""
    *stdio, report = descriptors
    environment: dict[str, str] = role["environment"]
    try:
        os.setsid()
        _tie_to_launcher(role["launcher"])
        for target, descriptor in enumerate(stdio):
            os.dup2(descriptor, target)
            os.close(descriptor)
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
    except Exception as error:  # noqa: BLE001 any error is reported to the launcher
        _refuse(report, f"{type(error).__name__}: {error}")
        os._exit(1)
    os.close(report)


def _tie_to_launcher(launcher: int) -> None:
    """From now on the kernel kills this process when the launcher dies."""
    end = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() != launcher:
        if time.monotonic() > end:
            raise TimeoutError(f"the launcher (pid {launcher}) is gone")
        time.sleep(0.0002)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        raise ProcessLookupError(f"the launcher (pid {launcher}) is gone")


def _seed_anew() -> None:
    """Forks share their server's generators, while each started process has its own seeds."""
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
    current_process().authkey = os.urandom(_AUTHENTICATION_KEY_BYTES)
