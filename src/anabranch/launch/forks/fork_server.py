"""The process that has imported everything and from which a job's processes are forked, in milliseconds each.

::

    launcher ── fork server ── (a moment's process) ── role        asked for over the channel
        └────────────────────────────────────────────── role        once that moment's process has ended

A fork of a process with threads may inherit a held lock that nobody will release, so this one has exactly one thread,
and checks this before each fork. It opens nothing either: no socket but its channel, no process group, no CUDA; and it
draws from no generator. Between it and a role stands a process that ends at once, so that the kernel hands the role to
the launcher, the nearest subreaper: the launcher signals it, sees its end and has its exit code as of any child.

It ends when the launcher closes the channel, or dies. Started by ``launcher_side.py``; ``forked_process.py`` is what a
fork becomes.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from importlib import import_module

from anabranch.launch.forks.forked_process import ForkedProcess
from anabranch.launch.forks.quick_exit import keep_shared_finalizers, keep_shared_libraries, keep_shared_modules
from anabranch.launch.forks.title import set_title
from anabranch.launch.socket_messages import receive, send

__all__ = ["main", "threads"]

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
    "anabranch.launch.meeting.store",
    "anabranch.observe",
    "anabranch.parameter_server",
    "anabranch.pipeline",
)
_IMPORTED_IF_THERE = ("anabranch.tables.kernels._compiled", "anabranch.tables.kernels._compiled_group")

_started_as = sys.modules["__main__"]  # a role sets its own; the interpreter still needs this one


def main() -> None:
    """Serve the launcher at the other end of stdin until it goes; in a fork, runs the role that was requested."""
    shared: list[str] = []
    keep_shared_modules(shared)
    set_title("fork-server", ["anabranch: fork server"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the launcher ends it; a fork has its own handlers
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=0)
    try:
        _import_all()
    except BaseException:
        with suppress(OSError):
            send(channel, {"error": traceback.format_exc()})
        raise
    shared += sys.modules.keys() - {"__main__", "sys", "builtins"}
    keep_shared_finalizers()
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, every page that they share
    with suppress(OSError):
        send(channel, {"ready": True})
    role = _serve(channel)
    channel.detach()  # a role's stdin replaces it
    role.take_over()
    keep_shared_libraries()
    role.run()


def threads() -> int:
    """Return the number of threads of this process, including those of C libraries."""
    return len(os.listdir("/proc/self/task"))


def _import_all() -> None:
    for name in _IMPORTED:
        import_module(name)
    for name in _IMPORTED_IF_THERE:
        with suppress(ModuleNotFoundError):
            import_module(name)


def _serve(channel: socket.socket) -> ForkedProcess:
    """Return only in forks."""
    while True:
        try:
            received = receive(channel)
        except OSError:  # the launcher was killed in the middle of a message
            received = None
        if received is None:
            sys.exit(0)
        role = ForkedProcess.from_message(*received)
        try:
            if threads() != 1:
                raise RuntimeError(f"the fork server has {threads()} threads; a fork might inherit held locks")
            middle = os.fork()  # with one thread, which was counted on the line before: no lock is held by another
        except (OSError, RuntimeError) as error:
            role.refuse(str(error))
        else:
            if middle == 0:
                if _fork_again(role):
                    return role
                os._exit(0)
            os.waitpid(middle, 0)
        role.close()


def _fork_again(role: ForkedProcess) -> bool:
    try:
        return os.fork() == 0  # of a fork that has one thread and ends at once, so that the role is not our child
    except OSError as error:
        role.refuse(str(error))
        return False
