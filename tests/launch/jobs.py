"""``launch`` with a job's options as arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from anabranch.launch import JobOutcome, JobSpec, PythonProgram
from anabranch.launch import launch as launch_job
from anabranch.launch.forks.launcher_side import ForkServer


def launch(
    script: Path | str,
    arguments: Sequence[str] = (),
    *,
    is_module: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    server: ForkServer | None = None,
    **options: Any,
) -> JobOutcome:
    """Run a script as a job on this machine."""
    program = PythonProgram(str(script), tuple(arguments), is_module, looks_here=is_module)
    return launch_job(JobSpec(program=program, **options), tell, server=server)
