"""Descriptors 0, 1 and 2: what is closed leads nowhere, rather than to the next file that happens to be opened."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import typer

__all__ = ["open_standard_streams", "say"]


def say(text: str) -> None:
    """Print ``text`` on stderr, or nowhere once that has gone: a closed terminal, a full disk, an unread pipe."""
    try:
        typer.echo(text, err=True)
    except OSError:
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, 2)  # buffered output goes there, too, at process exit
            os.close(nowhere)


def open_standard_streams() -> None:
    """Open those of stdin, stdout and stderr that the caller has closed (``>&-``) on nothing.

    A process that begins with a closed descriptor is given its number for the next file, socket or pipe that it opens,
    and the next print writes into that. Python's own ``sys.stdout`` is ``None`` in such a process.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest that is free, which is this one: those below it are open by now.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
