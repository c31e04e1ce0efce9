"""The arguments that name the script of a job, shared by ``anabranch run`` and ``anabranch plan``."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Arguments", "IsModule", "Script"]

Script = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT",
        help="The Python file, or with -m module, every worker and expert runs.",
        show_default=False,
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="What the script finds in sys.argv, untouched.", show_default=False),
]
IsModule = Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, found as `python -m` finds it.")]
