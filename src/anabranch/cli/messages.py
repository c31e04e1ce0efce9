"""The command line's own output: lines on stderr, errors of one line, and descriptors that lead nowhere when closed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

from anabranch.errors import AnabranchError


def say(text: str) -> None:
    """Print ``text`` on stderr, or nowhere once that has gone: a closed terminal, a full disk, an unread pipe."""
    try:
        typer.echo(text, err=True)
    except OSError:
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, 2)  # buffered output goes there, too, at process exit
            os.close(nowhere)


def tell(line: str) -> None:
    """Print a line of the launcher on stderr."""
    say(f"anabranch: {line}")


@contextmanager
def plain_errors(param_hint: str | None = None) -> Iterator[None]:
    """Turn a user's mistake into exit code 2, a refusal by the machine or a peer into 1; others keep a traceback."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=param_hint) from error
    except (AnabranchError, OSError, ModuleNotFoundError) as error:
        tell(str(error))
        raise typer.Exit(1) from error


def open_standard_streams() -> None:
    """Open those of stdin, stdout and stderr that the caller has closed (``>&-``) on nothing.

    A process that begins with a closed descriptor is given its number for the next file, socket or pipe that it opens,
    and the next print of a child would write into that.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
