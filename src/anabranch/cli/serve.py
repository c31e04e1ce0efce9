"""``anabranch serve``: one long-lived service a command; SIGTERM, Ctrl-C and a closed terminal drain it."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from anabranch.cli.mistakes import plain_errors
from anabranch.cli.standard_streams import say

if TYPE_CHECKING:
    from anabranch.experts import ExpertGroup
    from anabranch.observe import Metric

__all__ = ["directory", "experts", "parameters", "serve"]

serve = typer.Typer(help="Run one long-lived service. It prints 'listening on ENDPOINT' first and drains on a signal.")
"""The commands under ``anabranch serve``."""


@serve.callback()
def _speak() -> None:
    """Show the library's warnings: a service has no script that would give its logger a handler."""
    handler = _OnStderr(logging.WARNING)
    logging.getLogger("anabranch").addHandler(handler)


_Listen = Annotated[
    str | None,
    typer.Option(metavar="ENDPOINT", help="unix:PATH or tcp://HOST:PORT; by default a new socket.", show_default=False),
]
_Keys = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Certificates, from `anabranch keys`.", show_default=False)
]
_Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Serve Prometheus metrics at http://HOST:PORT/metrics; :PORT is on the loopback address.",
        show_default=False,
    ),
]
_Insecure = Annotated[bool, typer.Option("--insecure", help="Allow TCP without certificates.")]
_Heartbeat = Annotated[
    float,
    typer.Option(
        min=0.001,
        metavar="S",
        help="Seconds between heartbeats to waiting clients; after twice that without one, a peer counts as lost.",
    ),
]


_Linger = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="S",
        help="After the first signal serve for up to S seconds while clients are connected; the next one ends it.",
    ),
]


def _said(metavar: str, says: str) -> typer.models.OptionInfo:
    """Return an option that is unset by default."""
    option: typer.models.OptionInfo = typer.Option(metavar=metavar, help=says, show_default=False)
    return option


_JSON = "JSON"


@serve.command()
def experts(
    context: typer.Context,
    uids: Annotated[str | None, _said("PATTERN", "Such as ffn.[0:4].[0:8].")] = None,
    count: Annotated[
        int | None, _said("N", "Serve N of them, drawn at random from those the directory does not list.")
    ] = None,
    seed: Annotated[int | None, _said("N", "Seed of the draws.")] = None,
    config: Annotated[
        Path | None, _said("FILE", "A fleet in TOML or YAML: groups of experts, with these options as their keys.")
    ] = None,
    module: Annotated[
        str | None,
        _said(
            "NAME", "ffn (the default), nop, or pkg.mod:function, which returns a module or ExpertBackend's arguments."
        ),
    ] = None,
    module_args: Annotated[str | None, _said(_JSON, "The function's arguments; by default the features.")] = None,
    features: Annotated[int | None, _said("N", "The last size of an expert's input; by default 512.")] = None,
    args_schema: Annotated[
        str | None, _said(_JSON, 'The positional inputs, such as [{"shape": ["any", 512], "dtype": "float32"}].')
    ] = None,
    kwargs_schema: Annotated[str | None, _said(_JSON, "The keyword inputs, by name.")] = None,
    outputs_schema: Annotated[
        str | None, _said(_JSON, "The output; by default determined by running the module.")
    ] = None,
    compression: Annotated[
        Literal["float16", "bfloat16", "int8"] | None,
        typer.Option(help="How floating-point values are sent.", show_default=False),
    ] = None,
    optimizer: Annotated[
        str | None, _said("NAME", "sgd, adam (the default), adamw, adagrad, none, or pkg.mod:class.")
    ] = None,
    optimizer_args: Annotated[str | None, _said(_JSON, 'Its other arguments: {"weight_decay": 0.01}.')] = None,
    lr: Annotated[float | None, _said("X", "The learning rate; by default 0.001.")] = None,
    scheduler: Annotated[
        str | None, _said("NAME", "A class of torch.optim.lr_scheduler, such as StepLR, or pkg.mod:function.")
    ] = None,
    scheduler_args: Annotated[str | None, _said(_JSON, 'Its arguments: {"step_size": 1000}.')] = None,
    clip_grad_norm: Annotated[float | None, _said("X", "Clip the global norm of the gradients to this.")] = None,
    gradient_reduction: Annotated[
        Literal["sum", "mean"] | None,
        typer.Option(
            help="How the gradients of the requests in a batch are combined; by default sum.", show_default=False
        ),
    ] = None,
    keep_activations: Annotated[int | None, _said("N", "Rows whose activations are kept for their backward.")] = None,
    device: Annotated[str | None, _said("D", "The device of the experts; by default cpu.")] = None,
    min_batch_size: Annotated[
        int | None, _said("N", "The fewest rows of a batch; a smaller one waits for more.")
    ] = None,
    max_batch_size: Annotated[int | None, _said("N", "The most rows of a batch; by default 4096.")] = None,
    timeout: Annotated[float | None, _said("S", "Seconds after which a smaller batch runs anyway.")] = None,
    max_queue_rows: Annotated[int | None, _said("N", "The most rows in the queue; by default 16 batches.")] = None,
    max_queue_bytes: Annotated[int | None, _said("N", "The most bytes in the queue; by default 1 GiB.")] = None,
    max_sessions: Annotated[int, typer.Option(min=1, metavar="N", help="The most open inference sessions.")] = 1024,
    max_session_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="The most positions of all sessions together.")
    ] = 1 << 20,
    max_session_bytes: Annotated[
        int, typer.Option(min=1, metavar="N", help="The most bytes of their caches together.")
    ] = 4 << 30,
    checkpoint_dir: Annotated[
        Path | None, _said("DIR", "The directory where experts are saved and loaded from.")
    ] = None,
    directory: Annotated[str | None, _said("ENDPOINT", "The directory to announce them in, or a Redis URL.")] = None,
    listen: _Listen = None,
    keys: _Keys = None,
    insecure: _Insecure = False,
    heartbeat: _Heartbeat = 1.0,
    metrics: _Metrics = None,
    linger: _Linger = 0.0,
) -> None:
    """Serve experts that train themselves."""
    # Here, as in the others: with torch, which the rest of the command line does without.
    from anabranch.experts import ExpertServer, SessionLimits, make_experts
    from anabranch.experts.directory import as_directory
    from anabranch.observe import expert_metrics
    from anabranch.transport.server.service import serve_until_stopped

    with plain_errors():
        groups = _groups(context.params, config)
        names = None if directory is None else as_directory(directory, role="experts", keys=keys, insecure=insecure)
        backends = make_experts(groups, directory=names, checkpoint_dir=checkpoint_dir)
        server = partial(
            ExpertServer,
            backends,
            listen=listen,
            directory=names,
            checkpoint_dir=checkpoint_dir,
            keys=keys,
            insecure=insecure,
            heartbeat=heartbeat,
            session_limits=SessionLimits(max_sessions, max_session_tokens, max_session_bytes),
        )
        serve_until_stopped(server, _beside(metrics, expert_metrics), linger=linger)


def _groups(options: dict[str, Any], config: Path | None) -> list[ExpertGroup]:
    """Return the groups of the experts that the options describe."""
    from anabranch.experts import ExpertGroup, read_fleet

    # So that modules in the folder where the command is given are found too; last, so that they hide no other.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    keys = [field.name for field in fields(ExpertGroup) if field.name in options]
    said = {name: options[name] for name in keys if options[name] is not None}
    if config is not None:
        if said:
            flag = "--" + next(iter(said)).replace("_", "-")
            raise ValueError(
                f"{flag} cannot be used with --config {config}, which describes the experts; write it there"
            )
        return read_fleet(config)
    if "uids" not in said:
        raise ValueError("which experts? name them with --uids, such as --uids 'ffn.[0:4]', or in a file with --config")
    for name in _WRITTEN_IN_JSON & said.keys():
        try:
            said[name] = json.loads(said[name])
        except ValueError as error:
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} is written in JSON, such as '{{\"width\": 64}}', got {said[name]!r}: {error}"
            ) from error
    return [ExpertGroup(**said)]


_WRITTEN_IN_JSON = {
    "module_args",
    "args_schema",
    "kwargs_schema",
    "outputs_schema",
    "optimizer_args",
    "scheduler_args",
}


@serve.command()
def directory(
    listen: _Listen = None,
    keys: _Keys = None,
    insecure: _Insecure = False,
    heartbeat: _Heartbeat = 1.0,
    metrics: _Metrics = None,
    linger: _Linger = 0.0,
) -> None:
    """Serve a directory: the server of each expert."""
    from anabranch.experts import DirectoryServer
    from anabranch.observe import directory_metrics
    from anabranch.transport.server.service import serve_until_stopped

    with plain_errors():
        server = partial(DirectoryServer, listen, keys=keys, insecure=insecure, heartbeat=heartbeat)
        serve_until_stopped(server, _beside(metrics, directory_metrics), linger=linger)


@serve.command()
def parameters(
    shard: Annotated[int, typer.Option(min=0, metavar="I", help="Which shard this is.")] = 0,
    shards: Annotated[int, typer.Option(min=1, metavar="N", help="How many shards there are.")] = 1,
    durability: Annotated[
        Literal["none", "checkpoint", "log"], typer.Option(help="What is restored when the shard is restarted.")
    ] = "none",
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the shard stores it; needs --durability.", show_default=False),
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option(min=0.001, metavar="S", help="How often to write a checkpoint.")
    ] = 300.0,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Keep the valid part of a damaged log or checkpoint, report the loss, set the rest aside, and serve.",
        ),
    ] = False,
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="Threads that share the work of a request.")] = 1,
    listen: _Listen = None,
    keys: _Keys = None,
    insecure: _Insecure = False,
    heartbeat: _Heartbeat = 1.0,
    metrics: _Metrics = None,
    linger: _Linger = 0.0,
) -> None:
    """Serve one shard of the tables and parameters."""
    from anabranch.observe import parameter_metrics
    from anabranch.parameter_server import ParameterServer
    from anabranch.record.process import process_record
    from anabranch.record.spans import Lasting
    from anabranch.tables.warming import compile_kernels
    from anabranch.transport.server.service import serve_until_stopped

    if durability != "none" and checkpoint_dir is None:
        raise typer.BadParameter(f"--durability {durability} needs --checkpoint-dir")
    if repair and durability == "none":
        raise typer.BadParameter("--repair needs --durability and --checkpoint-dir: it repairs the files there")
    if checkpoint_dir is not None and durability == "none":
        raise typer.BadParameter(
            f"--checkpoint-dir {checkpoint_dir} keeps nothing without --durability: give --durability log or "
            "--durability checkpoint, or leave it out"
        )
    if shard >= shards:
        raise typer.BadParameter(f"--shard {shard} is out of range for --shards {shards}; the first is 0")
    _show_compiling()
    process_record()  # a launcher is told, too
    with Lasting("compile", "compute"):
        compile_kernels()  # takes a minute at first; a signal may still end it, since nothing is lost
    with plain_errors():
        server = partial(
            ParameterServer,
            shard,
            shards,
            listen,
            durability,
            checkpoint_dir,
            checkpoint_seconds=checkpoint_seconds,
            repair=repair,
            threads=threads,
            keys=keys,
            insecure=insecure,
            heartbeat=heartbeat,
        )
        serve_until_stopped(server, _beside(metrics, parameter_metrics), linger=linger)


class _OnStderr(logging.Handler):
    """Shows a line as the command line says things."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record's message."""
        say(f"anabranch: {record.getMessage()}")


def _show_compiling() -> None:
    """Show why nothing happens while the kernels of tables are compiled."""
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
