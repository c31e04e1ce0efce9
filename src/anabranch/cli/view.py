"""``anabranch view``: a page about a run, a trace or a graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from anabranch.cli.messages import plain_errors, tell
from anabranch.launch.job_status import JobStatus, RoleStatus, latest_jobs, status_of
from anabranch.record.words import in_words, on_one_line
from anabranch.view.page import page_of
from anabranch.view.serving import PageServer
from anabranch.view.trace_page import TraceData, read_trace


def view(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH", help="A run's log folder, a trace, or a saved graph; by default your newest job's folder."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the page to this file instead of serving it.")
    ] = None,
    port: Annotated[int, typer.Option(help="The port, on this machine only; 0 is any free port.")] = 0,
) -> None:
    """Show a run, a trace or a graph in a browser.

    Of a run what its processes exchanged, the loss and the pace, timelines and waits. One page that loads nothing from
    elsewhere, at an address of this machine until Ctrl-C, or in a file.

    Exit code: 0, 1 if the page cannot be written or served, or 2 if PATH is not one of these.
    """
    with plain_errors("PATH"):
        page = _page(latest_jobs()[0] if path is None else path)
    with plain_errors("--out" if out else "--port"):
        if out is not None:
            out.write_text(page, encoding="utf-8")
            typer.echo(f"anabranch: the page: {out.absolute()}")
            return
        with PageServer(page, port) as server:
            typer.echo(f"anabranch: the page: {server.url} (Ctrl-C ends)")
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                return


def _page(path: Path) -> str:
    if path.is_dir():
        job = status_of(path.absolute())
        title = " · ".join(filter(None, [job.script, path.absolute().name]))
        return page_of("run", title, {"job": _job_data(job), "trace": _trace_of(job)})
    if not path.is_file():
        raise ValueError(f"there is no file {path}; give a job's log folder (--log-dir), a trace or a saved graph")
    with path.open("rb") as file:
        start = file.read(256).lstrip()
    if start[:1] == b"{":
        return page_of("run", path.name, {"job": None, "trace": read_trace(path, draw_step)})
    return _graph(path)


def _trace_of(job: JobStatus) -> TraceData | None:
    if job.trace is None or not Path(job.trace).is_file():
        return None
    try:
        return read_trace(Path(job.trace), draw_step)
    except (OSError, ValueError) as error:
        tell(on_one_line(f"the page shows no trace: {error}"))
        return None


def _job_data(job: JobStatus) -> dict[str, Any]:
    """Return what ``run.js`` draws of a job."""
    return {
        "folder": job.folder,
        "ended": job.ended is not None,
        "seconds": job.seconds,
        "loss": [value if math.isfinite(value) else None for value in job.curve],
        "pace": list(job.pace),
        "saved": job.saved,
        "roles": [_role(role) for role in job.roles],
        "crossings": [crossing for role in job.roles for crossing in _crossings(role, job)],
    }


def _role(role: RoleStatus) -> dict[str, Any]:
    service = {name: value for name, value in role.service.items() if isinstance(value, int | float | str)}
    facts = {"steps": role.steps, "pid": role.pid, "endpoint": role.endpoint, **service}
    return {
        "name": role.name,
        "state": role.state,
        "waiting_for": role.waiting_for,
        "waiting_seconds": role.waiting_seconds,
        "operation": in_words(role.operation or ""),
        "facts": {name: value for name, value in facts.items() if value},
    }


def _crossings(role: RoleStatus, job: JobStatus) -> list[dict[str, Any]]:
    """Return the bytes of a process by peer, in equal shares: it counts them by boundary; an expert all of its own."""

    def share(kind: str, name: str, size: float, *, to: bool = True) -> list[dict[str, Any]]:
        peers = [one.name for one in job.roles if one.role == kind and one.name != role.name]
        ends = [(role.name, peer) if to else (peer, role.name) for peer in peers]
        return [{"from": one, "to": other, "name": name, "bytes": size / len(ends)} for one, other in ends]

    names = {"workers": "all_reduce", "pipeline": "stages"}
    crossings = []
    for boundary, size in role.crossed.items():
        kind = "parameters" if boundary.startswith("table ") else "worker"
        crossings += share(kind, names.get(boundary, boundary), size)
    if role.role == "expert" and role.service.get("bytes"):
        crossings += share("worker", "experts", role.service["bytes"], to=False)
    return crossings


def draw_step(ran: Mapping[int, Sequence[tuple[int, str, float, float]]]) -> tuple[str, str]:
    """Return the pictures of a pipeline's step, drawn by the same code as ``save_picture``'s."""
    from anabranch.pipeline.drawing import pictures_of_step  # imports torch

    return pictures_of_step(ran)


def _graph(path: Path) -> str:
    from anabranch.errors import CheckpointError
    from anabranch.graph import Graph  # imports torch
    from anabranch.graph.view import graph_data

    try:
        graph = Graph.load(path)
    except CheckpointError as error:
        raise ValueError(f"{path} is neither a trace nor a graph written by Graph.save: {error}") from error
    return page_of("graph", path.name, graph_data(graph))
