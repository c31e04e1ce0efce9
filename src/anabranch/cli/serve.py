"""``anabranch serve``: one long-lived service a command; SIGTERM, Ctrl-C and a closed terminal drain it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from anabranch.cli.messages import plain_errors, tell
from anabranch.cli.options import Insecure, Keys

serve = typer.Typer(help="Run one long-lived service. It prints 'listening on ENDPOINT' first and drains on a signal.")
"""The commands under ``anabranch serve``."""

_MOST_UIDS = 8


@serve.callback()
def _speak() -> None:
    """Show the library's warnings, and why nothing happens while kernels are compiled: no script has a handler here."""
    logging.getLogger("anabranch").addHandler(_OnStderr())
    logging.getLogger("anabranch.compiling").setLevel(logging.INFO)


_Listen = Annotated[
    str | None, typer.Option(metavar="ENDPOINT", help="unix:PATH or tcp://HOST:PORT; by default a new socket.")
]
_Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Serve Prometheus metrics at http://HOST:PORT/metrics; :PORT is on loopback."
    ),
]
_Heartbeat = Annotated[
    float, typer.Option(min=0.001, metavar="S", help="Seconds between heartbeats; a peer without two is lost.")
]
_Linger = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="S",
        help="After the first signal serve for up to S seconds while clients are connected; the next one ends it.",
    ),
]


@serve.command()
def experts(
    make: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE_OR_MODULE:FUNCTION]",
            help="A function (index, count) that returns a list of ExpertBackend, such as train.py:make_backends.",
        ),
    ] = None,
    index: Annotated[int, typer.Option(min=0, metavar="I", help="The function's index: which server this is.")] = 0,
    count: Annotated[
        int, typer.Option(min=1, metavar="N", help="The function's count: how many servers there are.")
    ] = 1,
    uids: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="In place of a function: uids such as ffn.[0:4].[0:8].")
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="ffn[:WIDTH], nop[:WIDTH], or pkg.mod:function, which returns arguments of ExpertBackend; by default "
            "ffn:512.",
        ),
    ] = None,
    optimizer: Annotated[
        Literal["sgd", "adam", "adamw", "adagrad", "none"] | None,
        typer.Option(help="By default adam, or the function's."),
    ] = None,
    lr: Annotated[float | None, typer.Option(min=0.0, metavar="X", help="The learning rate; by default 0.001.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="D", help="The device of the experts; by default theirs.")
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The most rows of a batch; by default 4096.")
    ] = None,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where experts are saved and loaded from.")
    ] = None,
    directory: Annotated[
        str | None, typer.Option(metavar="ENDPOINT", help="The directory to announce them in, or a Redis URL.")
    ] = None,
    listen: _Listen = None,
    keys: Keys = None,
    insecure: Insecure = False,
    heartbeat: _Heartbeat = 1.0,
    metrics: _Metrics = None,
    linger: _Linger = 0.0,
) -> None:
    """Serve experts: those of a function, or one of each name in a pattern."""
    # Here, as in the others: with torch, which the rest of the command line does without.
    from anabranch.experts import ExpertServer
    from anabranch.experts.server.layers import make_backends_of, make_named_experts

    if (make is None) == (uids is None):
        raise typer.BadParameter("which experts? name a function such as train.py:make_backends or --uids 'ffn.[0:4]'")
    named = {"module": module, "optimizer": optimizer, "lr": lr, "max-batch-size": max_batch_size}
    if make is not None and (option := next((name for name, value in named.items() if value is not None), None)):
        raise typer.BadParameter(f"--{option} goes with --uids; {make} returns backends that have theirs")
    if index >= count:
        raise typer.BadParameter(f"--index {index} is out of range for --count {count}; the first is 0")
    with plain_errors():
        if make is not None:
            backends = make_backends_of(make, index, count)
        else:
            assert uids is not None
            backends = make_named_experts(uids, module or "ffn", optimizer, lr, device, max_batch_size)
        names = [backend.uid for backend in backends]
        saved = [name for name in names if checkpoint_dir is not None and (checkpoint_dir / name).is_dir()]
        more = f" and {len(names) - _MOST_UIDS} more" if len(names) > _MOST_UIDS else ""
        text = f"serving {', '.join(names[:_MOST_UIDS])}{more}: {_state(saved, names)}"
        make_server = partial(ExpertServer, backends, directory=directory, checkpoint_dir=checkpoint_dir, device=device)
        options: dict[str, Any] = {"listen": listen, "keys": keys, "insecure": insecure, "heartbeat": heartbeat}
        _serve(partial(make_server, **options), "expert_metrics", metrics, linger, text)


@serve.command()
def directory(
    listen: _Listen = None,
    keys: Keys = None,
    insecure: Insecure = False,
    heartbeat: _Heartbeat = 1.0,
    metrics: _Metrics = None,
    linger: _Linger = 0.0,
) -> None:
    """Serve a directory: the server of each expert."""
    from anabranch.experts import DirectoryServer

    with plain_errors():
        make = partial(DirectoryServer, listen, keys=keys, insecure=insecure, heartbeat=heartbeat)
        _serve(make, "directory_metrics", metrics, linger, "serving a directory of experts")


@serve.command()
def parameters(
    shard: Annotated[int, typer.Option(min=0, metavar="I", help="Which shard this is.")] = 0,
    shards: Annotated[int, typer.Option(min=1, metavar="N", help="How many shards there are.")] = 1,
    durability: Annotated[
        Literal["none", "checkpoint", "log"], typer.Option(help="What is restored when the shard is restarted.")
    ] = "none",
    checkpoint_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the shard stores it; needs --durability.")
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option(min=0.001, metavar="S", help="How often to write a checkpoint.")
    ] = 300.0,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Keep the valid part of damaged files, report the loss, set the rest aside, and serve."
        ),
    ] = False,
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="Threads that share the work of a request.")] = 1,
    listen: _Listen = None,
    keys: Keys = None,
    insecure: Insecure = False,
    heartbeat: _Heartbeat = 1.0,
    metrics: _Metrics = None,
    linger: _Linger = 0.0,
) -> None:
    """Serve one shard of the tables and parameters."""
    from anabranch.parameter_server import ParameterServer
    from anabranch.record.process import process_record
    from anabranch.record.spans import Lasting
    from anabranch.tables.warming import compile_kernels
    from anabranch.transport import SocketTransport

    if (durability != "none") != (checkpoint_dir is not None):
        raise typer.BadParameter("--durability log or checkpoint and --checkpoint-dir need each other")
    if repair and durability == "none":
        raise typer.BadParameter("--repair needs --durability and --checkpoint-dir: it repairs the files there")
    if shard >= shards:
        raise typer.BadParameter(f"--shard {shard} is out of range for --shards {shards}; the first is 0")
    with plain_errors():  # not a minute later
        transport = SocketTransport("parameters", keys=keys, insecure=insecure)
        if listen is not None:
            transport.check(listen)
    process_record()  # a launcher is told, too
    with Lasting("compile", "compute"):
        compile_kernels()  # takes a minute at first; a signal may still end it, since nothing is lost
    with plain_errors():
        saved = [] if checkpoint_dir is None or not checkpoint_dir.is_dir() else [*checkpoint_dir.iterdir()]
        text = f"serving shard {shard} of {shards}: {_state(saved[:1], [shard])}"
        make_server = partial(ParameterServer, shard, shards, listen, durability, checkpoint_dir)
        options: dict[str, Any] = {"checkpoint_seconds": checkpoint_seconds, "repair": repair, "threads": threads}
        options |= {"keys": keys, "insecure": insecure, "heartbeat": heartbeat}
        _serve(partial(make_server, **options), "parameter_metrics", metrics, linger, text)


def _state(saved: Sequence[object], served: Sequence[object]) -> str:
    """Return whether what is served continues from files, for the user."""
    if len(saved) in (0, len(served)):
        return "restored" if saved else "new"
    return f"{len(saved)} restored, {len(served) - len(saved)} new"


def _serve(make: Callable[[], Any], families: str, address: str | None, linger: float, text: str) -> None:
    """Serve until a signal, with the server's metrics at ``address``, if there is one; ``text`` says what is served."""
    from anabranch import observe
    from anabranch.transport.server.service import serve_until_stopped

    read = getattr(observe, families)

    @contextmanager
    def beside(server: Any) -> Iterator[None]:
        with nullcontext() if address is None else observe.serve_metrics(address, lambda: read(server)):
            tell(text)  # behind all that may be refused, such as TCP without keys
            yield

    serve_until_stopped(make, beside, linger=linger)


class _OnStderr(logging.Handler):
    """Shows a line as the command line says things."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record's message."""
        tell(record.getMessage())
