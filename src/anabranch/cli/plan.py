"""``anabranch plan``: the traffic and estimated time of a step of a script, without training."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import typer

from anabranch.cli.job_end import show_end
from anabranch.cli.messages import plain_errors, tell
from anabranch.cli.options import Arguments, Experts, IsModule, OfTorchrun, Script, Servers, Workers
from anabranch.launch import JobSpec, PythonProgram, launch
from anabranch.record.process import PLAN_VARIABLE


def plan(
    script: Script,
    arguments: Arguments = None,
    module: IsModule = False,
    of_torchrun: OfTorchrun = None,
    workers: Workers = 1,
    servers: Servers = 0,
    experts: Experts = 0,
) -> None:
    """Print what a step of SCRIPT would exchange, and its time.

    It says where each parameter would be kept, too. SCRIPT is started as by `anabranch run`, up to its first training
    step. There the workers measure their links for a moment, try the first batch, print the plan and end: nothing is
    trained, and servers are only read.

    Exit code: 0 if there is a plan, 1 if SCRIPT failed or ended without a training step, 2 for wrong arguments.
    """
    folder = Path(tempfile.mkdtemp(prefix="anabranch-plan-"))
    text = folder / "plan.txt"
    failed = False
    try:
        with plain_errors():
            spec = JobSpec(
                program=PythonProgram(script, tuple(arguments or []), is_module=module, looks_here=module),
                log_dir=folder,
                workers=workers,
                servers=servers,
                experts=experts,
                live=True,
                environment={**os.environ, PLAN_VARIABLE: str(text)},
            )
        outcome = launch(spec, tell)
        failed = outcome.first_failure is not None
        show_end(outcome, folder, verbose=False)
        if outcome.exit_code == 0:
            if not text.exists():
                tell(f"{script} ended before it ran a training step of an Executor, so there is nothing to plan")
                raise typer.Exit(1)
            typer.echo(text.read_text(), nl=False)
        raise typer.Exit(outcome.exit_code)
    finally:
        if not failed:
            shutil.rmtree(folder, ignore_errors=True)
