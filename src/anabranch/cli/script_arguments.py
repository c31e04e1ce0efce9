"""The arguments that name the script of a job, shared by ``anabranch run`` and ``anabranch plan``."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Arguments", "IsModule", "Script"]

Script = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT",
        help="The Python file, or with -m the module, that every worker and expert runs.",
        show_default=False,
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="Arguments for the script, passed in sys.argv unchanged.", show_default=False),
]
IsModule = Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as for `python -m`.")]
