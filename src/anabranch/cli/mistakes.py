"""Errors that a user can put right are printed as one line; an internal error keeps its traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from anabranch.cli.standard_streams import say
from anabranch.errors import AnabranchError

__all__ = ["plain_errors"]


@contextmanager
def plain_errors(param_hint: str | None = None) -> Iterator[None]:
    """Turn a user's mistake into exit code 2, and a refusal by the machine or a peer into 1."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=param_hint) from error
    except (AnabranchError, OSError, ModuleNotFoundError) as error:
        say(f"anabranch: {error}")
        raise typer.Exit(1) from error
