"""Examples as the processes of a job, without their pictures, which take longer than the few steps of a test."""

from __future__ import annotations

from pathlib import Path

from anabranch.testing import JobResult, LocalJob

__all__ = ["run_example"]


def run_example(job: LocalJob, script: Path, *arguments: object, **constants: object) -> JobResult:
    """Runs an example's ``main`` in every process, with other values of its ``constants``."""
    changes = "\n".join(f"example.{name} = {value!r}" for name, value in constants.items())
    source = f"import sys\nsys.modules['matplotlib'] = None\nsys.path.insert(0, {str(script.parent)!r})\n"
    source += f"import {script.stem} as example\n{changes}\nsys.exit(example.main())\n"
    return job.run_source(source, *map(str, arguments))
