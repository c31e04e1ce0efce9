"""The title of a forked process in ``ps``, ``/proc/PID/cmdline`` and ``/proc/PID/environ``.

The kernel shows the memory in which it once placed the arguments and the environment. A fork of a server has the
server's; so the server is started with room to spare, and each fork writes its own arguments and environment there.
Both must be correct: people read ``ps``, and processes left behind by a job are found by their environment.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

from anabranch.launch.supervision.parent_death import prctl

__all__ = ["ARGUMENTS_ROOM", "ENVIRONMENT_ROOM", "set_title"]

ARGUMENTS_ROOM = 1 << 12
"""Bytes of arguments that a process is started with so that its forks can show theirs; what is longer is cut."""

ENVIRONMENT_ROOM = 1 << 14
"""The same for the environment: how much larger than the server's a fork's may be."""

_PR_SET_NAME = 15
_ARGUMENTS_FIELD = 45  # of /proc/self/stat behind the command's name: arg_start, arg_end, env_start, env_end


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
