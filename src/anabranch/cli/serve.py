"""``anabranch serve``: one long-lived service a command; SIGTERM and Ctrl-C drain it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from anabranch.cli.mistakes import told_plainly
from anabranch.cli.standard_streams import say

if TYPE_CHECKING:
    from anabranch.observe import Metric

__all__ = ["directory", "experts", "parameters", "serve"]

serve = typer.Typer(help="One long-lived service: it prints 'listening on ENDPOINT' first, and drains on SIGTERM.")
"""The commands under ``anabranch serve``."""

_Listen = Annotated[
    str | None,
    typer.Option(metavar="ENDPOINT", help="unix:PATH or tcp://HOST:PORT; by default a new socket.", show_default=False),
]
_Keys = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Certificates, as `anabranch keys` makes.", show_default=False)
]
_Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Serve counts for Prometheus at http://HOST:PORT/metrics; :PORT is the loopback.",
        show_default=False,
    ),
]
_Insecure = Annotated[bool, typer.Option("--insecure", help="Allow TCP without certificates.")]


@serve.command()
def experts(
    uids: Annotated[str, typer.Option(metavar="PATTERN", help="Such as ffn.[0:4].[0:8].", show_default=False)],
    module: Annotated[str, typer.Option(metavar="NAME", help="ffn, nop, or pkg.mod:function of the features.")] = "ffn",
    features: Annotated[int, typer.Option(min=1, metavar="N", help="The last size of an expert's input.")] = 512,
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="sgd, adam, adamw, adagrad or none.")] = "adam",
    lr: Annotated[float, typer.Option(metavar="X", help="The learning rate.")] = 1e-3,
    device: Annotated[str, typer.Option(metavar="D", help="Where the experts live.")] = "cpu",
    max_batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Rows of a batch.")] = 4096,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where experts are saved and found again.", show_default=False)
    ] = None,
    directory: Annotated[
        str | None, typer.Option(metavar="ENDPOINT", help="The directory to announce them in.", show_default=False)
    ] = None,
    listen: _Listen = None,
    keys: _Keys = None,
    insecure: _Insecure = False,
    metrics: _Metrics = None,
) -> None:
    """Serve experts that train themselves."""
    # Here, as in the others: with torch, which the rest of the command line does without.
    from anabranch.experts import make_backends, serve_experts, stopped_by_signals
    from anabranch.observe import expert_metrics

    with told_plainly():
        backends = make_backends(
            uids,
            module,
            features=features,
            optimizer=optimizer,
            lr=lr,
            max_batch_size=max_batch_size,
            device=device,
        )
        with stopped_by_signals() as stop:
            serve_experts(
                backends,
                stop,
                listen=listen,
                directory=directory,
                checkpoint_dir=checkpoint_dir,
                keys=keys,
                insecure=insecure,
                beside=_beside(metrics, expert_metrics),
            )


@serve.command()
def directory(listen: _Listen = None, keys: _Keys = None, insecure: _Insecure = False) -> None:
    """Serve a directory: who serves which expert."""
    from anabranch.experts import serve_directory, stopped_by_signals

    with told_plainly(), stopped_by_signals() as stop:
        serve_directory(stop, listen=listen, keys=keys, insecure=insecure)


@serve.command()
def parameters(
    shard: Annotated[int, typer.Option(min=0, metavar="I", help="Which shard this is.")] = 0,
    shards: Annotated[int, typer.Option(min=1, metavar="N", help="How many shards there are.")] = 1,
    durability: Annotated[
        Literal["none", "checkpoint", "log"], typer.Option(help="What comes back when the shard is started again.")
    ] = "none",
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the shard keeps it; needs --durability.", show_default=False),
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option(min=0.001, metavar="S", help="Write a checkpoint so often.")
    ] = 300.0,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Keep the valid part of a damaged log or checkpoint, say what is lost, set the rest aside, and serve.",
        ),
    ] = False,
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="Threads that share the work of a request.")] = 1,
    listen: _Listen = None,
    keys: _Keys = None,
    insecure: _Insecure = False,
    metrics: _Metrics = None,
) -> None:
    """Serve one shard of the tables and parameters."""
    from anabranch.experts import stopped_by_signals
    from anabranch.observe import parameter_metrics
    from anabranch.parameter_server import serve_parameters
    from anabranch.tables.warming import compile_kernels

    if durability != "none" and checkpoint_dir is None:
        raise typer.BadParameter(f"--durability {durability} needs --checkpoint-dir")
    if repair and durability == "none":
        raise typer.BadParameter("--repair needs --durability and --checkpoint-dir: it repairs what lies there")
    if checkpoint_dir is not None and durability == "none":
        raise typer.BadParameter(
            f"--checkpoint-dir {checkpoint_dir} keeps nothing without --durability: give --durability log or "
            "--durability checkpoint, or leave it out"
        )
    if shard >= shards:
        raise typer.BadParameter(f"--shard {shard} lies outside --shards {shards}; the first is 0")
    _show_compiling()
    compile_kernels()  # takes a minute at first; a signal may still end it, since nothing is lost
    with told_plainly(), stopped_by_signals() as stop:
        serve_parameters(
            stop,
            shard=shard,
            shards=shards,
            listen=listen,
            durability=durability,
            checkpoint_dir=checkpoint_dir,
            checkpoint_seconds=checkpoint_seconds,
            repair=repair,
            threads=threads,
            keys=keys,
            insecure=insecure,
            beside=_beside(metrics, parameter_metrics),
        )


class _OnStderr(logging.Handler):
    """Shows a line as the command line says things."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record's message."""
        say(f"anabranch: {record.getMessage()}")


def _show_compiling() -> None:
    """Show why nothing happens while the kernels of tables are compiled; `anabranch run` looks for this line."""
    logger = logging.getLogger("anabranch.compiling")
    logger.setLevel(logging.INFO)
    logger.addHandler(_OnStderr())


_Server = TypeVar("_Server")


def _beside(
    address: str | None, read: Callable[[_Server], list[Metric]]
) -> Callable[[_Server], AbstractContextManager[object]] | None:
    """Serve a server's metrics at ``address``, if there is one."""
    if address is None:
        return None
    from anabranch.observe import serve_metrics

    return lambda server: serve_metrics(address, lambda: read(server))
