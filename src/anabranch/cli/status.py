"""``anabranch status``: the processes of a job, and how each of them is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from anabranch.cli.messages import plain_errors, tell
from anabranch.cli.options import Insecure, Keys
from anabranch.launch.job_status import JobStatus, latest_jobs, status_of

_EVERY = 1.0  # seconds between two looks
_ENDPOINTS = ("unix:", "tcp:")

Look: TypeAlias = Callable[[JobStatus | None], JobStatus]
"""Returns the present status, given the last."""


def status(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="JOB",
            help="The job's log folder, by default that of your newest job; or endpoints of services, to ask them.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it until the job ends, or Ctrl-C.")] = False,
    keys: Keys = None,
    insecure: Insecure = False,
) -> None:
    """Show the processes of a job: which run, wait or are gone.

    Exit code: 0, 1 if a service at an endpoint does not answer, or 2 if the job does not exist.
    """
    endpoints = [one for one in jobs or () if one.startswith(_ENDPOINTS)]
    if jobs and len(jobs) > 1 and len(endpoints) < len(jobs):
        raise typer.BadParameter("name one log folder, or endpoints", param_hint="JOB")
    if watch and as_json:
        raise typer.BadParameter("--json prints once; call it again and again, or leave out --watch")
    with plain_errors("JOB"), ExitStack() as stack:
        if endpoints:
            from anabranch.launch.address_status import status_at  # imports torch
            from anabranch.transport import Client

            client = stack.enter_context(Client(keys=keys, insecure=insecure, retries=0))
            look: Look = partial(status_at, client, endpoints)
        else:
            folder, *others = [Path(jobs[0])] if jobs else latest_jobs()
            for other in others:
                tell(f"another job runs: anabranch status {other}")
            look = lambda before: status_of(folder)  # noqa: E731
        seen = look(None)
        if as_json:
            text = json.dumps(asdict(seen))
            typer.echo(json.dumps(json.loads(text, parse_constant=lambda _: None)))  # JSON has no NaN
        else:
            _show(look, seen, watch=watch)
    if endpoints and any(role.state in ("gone", "stopped") for role in seen.roles):
        raise typer.Exit(1)


def _show(look: Look, job: JobStatus, *, watch: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    from anabranch.launch.output.picture import picture

    console = Console()
    if not watch:
        if not console.is_terminal:
            console.width = max(console.width, 200)  # a file or a pipe cuts nothing off
        console.print(picture(job))
        return
    if not console.is_terminal:
        raise typer.BadParameter("--watch draws on a terminal; elsewhere use --json", param_hint="--watch")
    before = None
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            live.update(picture(job, before, lines=console.height - 1), refresh=True)
            if job.ended is not None:
                return
            try:
                time.sleep(_EVERY)
            except KeyboardInterrupt:
                return
            before, job = job, look(job)
