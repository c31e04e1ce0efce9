"""The commands of ``anabranch``, gathered."""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from anabranch.cli.experts import experts
from anabranch.cli.keys import keys
from anabranch.cli.messages import open_standard_streams, tell
from anabranch.cli.plan import plan
from anabranch.cli.run import run
from anabranch.cli.serve import serve
from anabranch.cli.status import status
from anabranch.cli.view import view

_app = typer.Typer(
    name="anabranch",
    help="Trains one PyTorch model across devices, processes, parameter servers and unreliable remote experts.",
    epilog="""\b
Examples:
  anabranch run --workers 4 train.py
  anabranch run --workers 2 --servers 1 --experts 2 train.py --lr 0.1
  anabranch plan --workers 2 --servers 1 train.py
  anabranch status --watch
  anabranch view out.json
  anabranch serve experts --help""",
    invoke_without_command=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# What follows SCRIPT belongs to the script, whatever it looks like.
_app.command(context_settings={"allow_interspersed_args": False})(run)
_app.command(context_settings={"allow_interspersed_args": False})(plan)
_app.command()(keys)
_app.command()(status)
_app.command()(experts)
_app.command()(view)
_app.add_typer(serve, name="serve")


@_app.callback()
def _options(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if show_version:
        typer.echo(f"anabranch {version('anabranch')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command that ``sys.argv`` names, and exit with its code."""
    open_standard_streams()
    if len(sys.argv) > 1 and (word := sys.argv[1]).endswith(".py"):
        tell(f"{word!r} is a script, not a command; start it with: anabranch run {shlex.quote(word)}")
        sys.exit(2)
    _app(prog_name="anabranch")
