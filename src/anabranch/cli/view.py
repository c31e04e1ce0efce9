"""``anabranch view``: a page about a run, a trace or a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from anabranch.cli.mistakes import plain_errors
from anabranch.launch.job_file import JOB_FILE
from anabranch.launch.job_page import job_data, trace_of
from anabranch.launch.job_status import latest_job
from anabranch.view.page import page_of
from anabranch.view.serving import PageServer
from anabranch.view.trace_events import is_packed
from anabranch.view.trace_page import read_trace

__all__ = ["view"]


def view(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            help="A run's log folder, a trace, or a saved graph; by default the folder of your newest job.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Write the page to this file instead of serving it.", show_default=False
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="The port, on this machine only; 0 is any free port.")] = 0,
) -> None:
    """Show a run in a browser: what processes exchanged, the loss and the pace, timelines, waits; or a graph.

    One page that loads nothing from elsewhere, at an address of this machine until Ctrl-C, or in a file.

    Exit code: 0, 1 if the page cannot be written or served, or 2 if PATH is not one of these.
    """
    with plain_errors("PATH"):
        page = _page(latest_job() if path is None else path)
    with plain_errors("--out" if out else "--port"):
        if out is not None:
            out.write_text(page, encoding="utf-8")
            typer.echo(f"anabranch: the page: {out.absolute()}")
            return
        with PageServer(page, port) as server:
            typer.echo(f"anabranch: the page: {server.url} (Ctrl-C ends)")
            try:
                server.serve()
            except KeyboardInterrupt:
                return


def _page(path: Path) -> str:
    if path.is_dir():
        if not (path / JOB_FILE).is_file():
            raise ValueError(
                f"there is no {JOB_FILE} in {path}; give a job's log folder (--log-dir), a trace or a graph"
            )
        trace = trace_of(path)
        return _run(path.absolute().name, job=job_data(path), trace=None if trace is None else read_trace(trace))
    if not path.is_file():
        raise ValueError(f"there is no file {path}; give a job's log folder (--log-dir), a trace or a saved graph")
    with path.open("rb") as file:
        start = file.read(256).lstrip()
    if start[:1] in (b"{", b"[") or not start or is_packed(start):
        return _run(path.name, job=None, trace=read_trace(path))
    return _graph(path)


def _run(title: str, **data: Any) -> str:
    return page_of("run", title, data)


def _graph(path: Path) -> str:
    from anabranch.errors import CheckpointError
    from anabranch.graph import Graph  # imports torch
    from anabranch.graph.view.graph_page import graph_data

    try:
        graph = Graph.load(path)
    except CheckpointError as error:
        raise ValueError(f"{path} is neither a trace nor a graph written by Graph.save: {error}") from error
    return page_of("graph", path.name, graph_data(graph))
