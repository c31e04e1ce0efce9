"""Long-lived services of a process, behind ``anabranch serve experts`` and ``anabranch serve directory``.

Functions of plain values, so that a command line, a launcher and a test start the same service. Each prints
``listening on ENDPOINT`` first and serves until an event is set; ``stopped_by_signals`` sets it on SIGTERM and SIGINT.
Stopping drains: new calls are refused, those in flight finish, states are saved.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType

import torch

from anabranch.experts.directory import DirectoryLike, DirectoryServer
from anabranch.experts.server.backend import ExpertBackend
from anabranch.experts.server.expert_group import ExpertGroup, make_experts
from anabranch.experts.server.expert_server import ExpertServer
from anabranch.experts.server.sessions.open_sessions import SessionLimits
from anabranch.transport.heap import keep_one_heap

__all__ = ["make_backends", "serve_directory", "serve_experts", "stopped_by_signals"]

# An endless wait would not see signals on every platform.
_NAP = 0.5


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Return an event that SIGTERM and SIGINT set while the block runs; only in the main thread."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_backends(
    uids: str,
    module: str,
    *,
    features: int,
    optimizer: str = "adam",
    lr: float = 1e-3,
    max_batch_size: int = 4096,
    device: torch.device | str | None = None,
) -> list[ExpertBackend]:
    """Make the experts for a pattern of uids and the name of a module; ``make_experts`` has all options.

    >>> [backend.uid for backend in make_backends("ffn.[0:2]", "ffn", features=8)]
    ['ffn.0', 'ffn.1']

    Args:
        uids: such as ``ffn.[0:4].[0:8]``.
        module: ``ffn``, ``nop``, or ``package.module:function`` of the number of features.
        features: the last size of an expert's input.
        optimizer: ``sgd``, ``adam``, ``adamw``, ``adagrad`` or ``none``.
        lr: the learning rate.
        max_batch_size: rows of a batch.
        device: the device of the experts.

    Raises:
        ValueError: an unknown pattern, module, optimizer or device.
        SchemaError: the module does not take rows of ``features``.
    """
    group = ExpertGroup(
        uids=uids,
        module=module,
        features=features,
        optimizer=optimizer,
        lr=lr,
        max_batch_size=max_batch_size,
        device=None if device is None else str(device),
    )
    return make_experts([group])


def serve_experts(
    backends: Sequence[ExpertBackend],
    stop: threading.Event,
    *,
    listen: str | None = None,
    directory: DirectoryLike | str | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_seconds: float = 60.0,
    device: torch.device | str | None = None,
    keys: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    heartbeat: float = 1.0,
    session_limits: SessionLimits | None = None,
    say: Callable[[str], None] | None = None,
    beside: Callable[[ExpertServer], AbstractContextManager[object]] | None = None,
) -> None:
    """Serve ``backends`` until ``stop`` is set, then drain and save.

    Takes the arguments of ``ExpertServer``; ``say`` is called with ``listening on ENDPOINT`` once calls are served; it
    prints by default. ``beside`` makes an object that lives as long as the server.
    """
    keep_one_heap()
    with (
        ExpertServer(
            backends,
            listen=listen,
            directory=directory,
            checkpoint_dir=checkpoint_dir,
            checkpoint_seconds=checkpoint_seconds,
            device=device,
            keys=keys,
            insecure=insecure,
            heartbeat=heartbeat,
            session_limits=session_limits,
        ) as server,
        nullcontext() if beside is None else beside(server),
    ):
        (say or _say)(f"listening on {server.endpoint}")
        _wait(stop)


def serve_directory(
    stop: threading.Event,
    *,
    listen: str | None = None,
    keys: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    heartbeat: float = 1.0,
    say: Callable[[str], None] | None = None,
    beside: Callable[[DirectoryServer], AbstractContextManager[object]] | None = None,
) -> None:
    """Serve a directory until ``stop`` is set; arguments as of ``DirectoryServer`` and ``serve_experts``."""
    keep_one_heap()
    with (
        DirectoryServer(listen, keys=keys, insecure=insecure, heartbeat=heartbeat) as server,
        nullcontext() if beside is None else beside(server),
    ):
        (say or _say)(f"listening on {server.endpoint}")
        _wait(stop)


def _say(text: str) -> None:
    print(text, flush=True)


def _wait(stop: threading.Event) -> None:
    while not stop.wait(timeout=_NAP):
        pass
