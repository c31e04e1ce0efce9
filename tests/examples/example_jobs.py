"""Examples in this process, or as those of a job without their pictures, which take longer than a test's few steps."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from anabranch.testing import JobResult, LocalJob

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_here(example: str, capsys: pytest.CaptureFixture[str], *arguments: object, said: str = "") -> dict[str, Any]:
    """Run an example's ``main`` in this process, which says so among others; return its result."""
    assert import_module(example).main([*map(str, arguments)]) == 0
    printed = capsys.readouterr().out
    assert said in printed
    return json.loads(printed.splitlines()[-1])  # type: ignore[no-any-return]


def refused(example: str, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return what an example says that refuses its arguments."""
    with pytest.raises(SystemExit) as stopped:
        import_module(example).main([*map(str, arguments)])
    assert stopped.value.code != 0
    return capsys.readouterr().err + str(stopped.value.code)


def run_example(job: LocalJob, script: Path, *arguments: object, **constants: object) -> JobResult:
    """Run an example's ``main`` in every process, with other values of its ``constants``."""
    changes = "\n".join(f"example.{name} = {value!r}" for name, value in constants.items())
    source = f"import sys\nsys.modules['matplotlib'] = None\nsys.path.insert(0, {str(script.parent)!r})\n"
    source += f"import {script.stem} as example\n{changes}\nsys.exit(example.main())\n"
    return job.run_source(source, *map(str, arguments))
