"""A script's work in its role: the implementation of ``job.serve``.

``job`` is a lower layer than the servers and may not import them; ``anabranch`` registers this function with it.

::

    expert process   make_backends(index, count) ──> served, announced ──> until SIGTERM: drain, save, exit 0
    worker           waits until every expert process has announced itself ──> the directory
    neither (alone)  make_backends(0, 1) ──> served by threads of this process, until it ends ──> the directory
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import NoReturn, cast

from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded
from anabranch.experts import Directory, ExpertBackend, ExpertServer
from anabranch.experts.directory import as_directory
from anabranch.job import DirectoryLike, Job
from anabranch.launch.environment import LINGER_VARIABLE, LISTEN_VARIABLE, RUN_VARIABLE
from anabranch.launch.meeting.addresses import expert_socket
from anabranch.launch.meeting.rendezvous import expert_mark, expert_marks
from anabranch.transport.directory.redis_address import host_and_port, is_loopback, is_redis_url
from anabranch.transport.network.endpoints import TcpEndpoint, parse_endpoint, split_endpoints
from anabranch.transport.server.service import serve_until_stopped

__all__ = ["serve"]

_MARK_TTL = 24 * 3600.0  # seconds; announced again with each renewal
_LOOK_EVERY = 0.05

MakeBackends = Callable[[int, int], Sequence[ExpertBackend]]

_alone = ExitStack()
atexit.register(_alone.close)


def serve(
    job: Job,
    make_backends: Callable[[int, int], Sequence[object]],
    *,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_seconds: float = 60.0,
    listen: str | None = None,
    keys: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    heartbeat: float = 1.0,
    timeout: float = 120.0,
) -> DirectoryLike:
    """Return the value of ``Job.serve``."""
    make = cast(MakeBackends, make_backends)
    if job.role == "expert":
        _serve_here(
            job,
            make,
            checkpoint_dir=checkpoint_dir,
            checkpoint_seconds=checkpoint_seconds,
            listen=listen,
            keys=keys,
            insecure=insecure,
            heartbeat=heartbeat,
        )
    if job.directory is not None:
        directory = as_directory(job.directory, keys=keys, insecure=insecure)
        _wait_for_experts(directory, job.experts, Deadline.after(timeout))
        return directory
    if job.world_size > 1:
        raise ValueError(
            f"this job has {job.world_size} workers but no process that serves experts; start it with "
            "`anabranch run --experts N`, or name a directory in ANABRANCH_DIRECTORY"
        )
    directory = Directory()
    _alone.enter_context(
        ExpertServer(
            make(0, 1),
            listen=listen,
            directory=directory,
            checkpoint_dir=checkpoint_dir,
            checkpoint_seconds=checkpoint_seconds,
            keys=keys,
            insecure=insecure,
            heartbeat=heartbeat,
        )
    )
    return directory


def _serve_here(
    job: Job,
    make: MakeBackends,
    *,
    checkpoint_dir: str | os.PathLike[str] | None,
    checkpoint_seconds: float,
    listen: str | None,
    keys: str | os.PathLike[str] | None,
    insecure: bool,
    heartbeat: float,
) -> NoReturn:
    if job.directory is None:
        raise ValueError("an expert process announces itself in a directory; name one in ANABRANCH_DIRECTORY")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("job.serve() serves until SIGTERM, which only the main thread receives; call it there")
    directory = as_directory(job.directory, role="experts", keys=keys, insecure=insecure)
    endpoint = listen or os.environ.get(LISTEN_VARIABLE) or _beside(job.directory, job.rank)

    # Until they exist, nothing is lost by ending at once.
    backends = make(job.rank, job.world_size)
    serve_until_stopped(
        lambda: ExpertServer(
            backends,
            listen=endpoint,
            directory=_MarkedDirectory(directory, expert_mark(job.rank, _run())),
            checkpoint_dir=checkpoint_dir,
            checkpoint_seconds=checkpoint_seconds,
            keys=keys,
            insecure=insecure,
            heartbeat=heartbeat,
        ),
        linger=float(os.environ.get(LINGER_VARIABLE) or 0.0),
    )
    sys.exit(0)


class _MarkedDirectory:
    """A directory in which the process's own mark is announced with its experts, and stays when they are withdrawn."""

    def __init__(self, directory: DirectoryLike, mark: str) -> None:
        self._directory = directory
        self._mark = mark
        self.withdraw, self.lookup, self.active = directory.withdraw, directory.lookup, directory.active

    def announce(self, uids: Iterable[str], endpoint: str, ttl: float) -> None:
        """``endpoint`` serves ``uids`` for the next ``ttl`` seconds, and the process well beyond them."""
        self._directory.announce(uids, endpoint, ttl)
        self._directory.announce([self._mark], endpoint, _MARK_TTL)


def _beside(directory: str, index: int) -> str | None:
    """Return the address to listen at: in the directory's own place, a private folder or the interface that leads to
    it; ``None``, a new socket, beside one that Redis keeps on this host.
    """
    if is_redis_url(directory):
        host, port = host_and_port(directory)
        return None if host is None or is_loopback(host) else _towards(host, port)
    place = parse_endpoint(split_endpoints(directory)[0])
    if isinstance(place, TcpEndpoint):
        return _towards(place.host, place.port)
    return expert_socket(f"unix:{place.path}", index)


def _towards(host: str, port: int) -> str:
    """Return any port of the interface that leads to ``host``."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing; the kernel chooses the interface
        host = str(probe.getsockname()[0])
    return f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"


def _wait_for_experts(directory: DirectoryLike, count: int, deadline: Deadline) -> None:
    while True:
        marks = expert_marks(_run())
        here = directory.active([marks])[marks]
        missing = [index for index in range(count) if index not in here]
        if not missing:
            return
        if deadline.remaining() <= 0:
            raise DeadlineExceeded(
                f"{len(missing)} of {count} expert processes have not announced themselves; see their logs",
                peer=", ".join(f"expert {index}" for index in missing),
                operation="serve",
                elapsed=deadline.elapsed(),
            )
        time.sleep(_LOOK_EVERY)


def _run() -> str | None:
    return os.environ.get(RUN_VARIABLE) or None
