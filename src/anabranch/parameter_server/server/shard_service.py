"""A shard as a service: run by ``anabranch serve parameters``."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from anabranch.parameter_server.server.durable.durability import Durability
from anabranch.parameter_server.server.shard_server import ParameterServer
from anabranch.transport.heap import keep_one_heap

__all__ = ["serve_parameters"]

_NAP = 3600.0  # seconds between checks whether to stop; setting the event wakes at once


def serve_parameters(
    stop: threading.Event,
    *,
    shard: int = 0,
    shards: int = 1,
    listen: str | None = None,
    durability: Durability = "none",
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_seconds: float = 300.0,
    repair: bool = False,
    threads: int = 1,
    keys: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    heartbeat: float = 1.0,
    say: Callable[[str], None] | None = None,
    beside: Callable[[ParameterServer], AbstractContextManager[object]] | None = None,
) -> None:
    """Serve one shard until ``stop`` is set, then drain and write its state.

    Takes the arguments of ``ParameterServer``; ``say`` is called with ``listening on ENDPOINT`` once calls are served,
    and prints it by default. ``beside`` makes an object that lives as long as the server.
    """
    keep_one_heap()
    with (
        ParameterServer(
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
        ) as server,
        nullcontext() if beside is None else beside(server),
    ):
        (say or _say)(f"listening on {server.endpoint}")
        while not stop.wait(timeout=_NAP):
            pass


def _say(text: str) -> None:
    print(text, flush=True)
