"""``launch`` with a job's options as arguments, and the processes that a test has started."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.launch import JobOutcome, JobSpec, Patience, PythonProgram
from anabranch.launch import launch as launch_job
from anabranch.launch.forks.launcher_side import ForkServer

MARK = "ANABRANCH_TEST_MARK"
"""In the environment of all that a test starts."""
HURRIED = Patience(failure=0.3, stop=0.3, drain=0.5)
"""For processes that do not end by themselves."""
PATIENT = Patience(failure=60.0, stop=60.0, drain=60.0)
"""For those that do, however busy the machine is."""


@dataclass
class Ended:
    """A job that has ended, what was told of it, and what each worker wrote."""

    outcome: JobOutcome
    told: list[str]
    texts: list[str]


Script, Ends = Callable[[str], Path], Callable[..., Ended]
"""The types of the fixtures ``script`` and ``ended``."""


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


def marked_processes(mark: str) -> list[str]:
    """The command lines of all living processes whose environment holds the mark, wherever their parents went."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes() and int(process.name) != os.getpid():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return what the processes of a job wrote into their files of this name, one object a line, up to the last end."""
    texts = [file.read_text().rpartition("\n")[0] for file in sorted(folder.glob(f"{name}-*"))]
    return [json.loads(line) for text in texts for line in text.splitlines()]
