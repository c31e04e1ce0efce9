"""``anabranch status``: the processes of a job, and how each of them is."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from anabranch.launch.status import JobStatus, latest_job, status_of

__all__ = ["status"]


def status(
    job: Annotated[
        Path | None,
        typer.Argument(metavar="JOB", help="Its log folder; by default that of your newest job.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object, for programs.")] = False,
) -> None:
    """Show the processes of a job on this machine: which run, which are frozen or gone, and the workers' steps.

    Exit code: 0, or 2 if there is no such job.
    """
    try:
        found = status_of(latest_job() if job is None else job)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="JOB") from error
    typer.echo(json.dumps(asdict(found)) if as_json else _table(found))


def _table(found: JobStatus) -> str:
    rows = [("role", "rank", "pid", "state", "steps")]
    rows += [
        (one.role, str(one.rank), str(one.pid or "-"), one.state, "-" if one.steps is None else str(one.steps))
        for one in found.roles
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
