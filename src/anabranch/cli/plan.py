"""``anabranch plan``: the traffic and estimated time of a step of a script, without training."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.job_end import show_end, tell
from anabranch.cli.script_arguments import Arguments, IsModule, Script
from anabranch.launch import launch
from anabranch.launch.python_program import PythonProgram
from anabranch.launch.supervision.signals import collect_signals
from anabranch.record.process import PLAN_VARIABLE

__all__ = ["plan"]


def plan(
    script: Script,
    arguments: Arguments = None,
    module: IsModule = False,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="How many worker processes to plan for.")] = 1,
    servers: Annotated[int, typer.Option(min=0, metavar="N", help="How many parameter servers.")] = 0,
    experts: Annotated[int, typer.Option(min=0, metavar="N", help="How many expert processes.")] = 0,
) -> None:
    """Print where each parameter of SCRIPT would be kept, what a step exchanges, and its estimated time.

    SCRIPT is started as by `anabranch run`, up to its first training step. There the workers measure their links for a
    moment, try the first batch, print the plan and end: nothing is trained, and servers are only read.

    Exit code: 0 if there is a plan, 1 if SCRIPT failed or ended without a training step, 2 for wrong arguments.
    """
    try:
        PythonProgram(script, is_module=module, looks_here=module).check()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="SCRIPT") from error
    folder = Path(tempfile.mkdtemp(prefix="anabranch-plan-"))
    found = folder / "plan.txt"
    failed = True
    try:
        with collect_signals():
            outcome = launch(
                script,
                arguments or [],
                is_module=module,
                workers=workers,
                servers=servers,
                experts=experts,
                log_dir=folder,
                live=True,
                environment={**os.environ, PLAN_VARIABLE: str(found)},
                tell=tell,
            )
            show_end(outcome, folder, verbose=False)
            failed = outcome.first_failure is not None
            if outcome.exit_code == 0:
                _show(found, script)
        raise typer.Exit(outcome.exit_code)
    finally:
        if not failed:
            shutil.rmtree(folder, ignore_errors=True)


def _show(found: Path, script: str) -> None:
    if not found.exists():
        tell(f"{script} ended before it ran a training step of an Executor, so there is nothing to plan")
        raise typer.Exit(1)
    typer.echo(found.read_text(), nl=False)
