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
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn, cast

from anabranch.deadline import Deadline
from anabranch.experts import Directory, ExpertBackend, ExpertServer
from anabranch.experts.directory import as_directory
from anabranch.job import LINGER_VARIABLE, LISTEN_VARIABLE, RUN_VARIABLE, DirectoryLike, Job
from anabranch.transport.server.service import serve_until_stopped

_MARK_TTL = 24 * 3600.0  # seconds; announced again with each renewal
_LOOK_EVERY = 0.05

MakeBackends = Callable[[int, int], Sequence[ExpertBackend]]

_alone = ExitStack()
atexit.register(_alone.close)


def serve(
    job: Job,
    make_backends: Callable[[int, int], Sequence[object]],
    *,
    keys: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    timeout: float = 120.0,
    **options: Any,
) -> DirectoryLike:
    """Return the value of ``Job.serve``; ``options`` are those of the server."""
    make = cast(MakeBackends, make_backends)
    options |= {"keys": keys, "insecure": insecure}
    if job.role == "expert":
        _serve_here(job, make, options)
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
    _alone.enter_context(ExpertServer(make(0, 1), directory=directory, **options))
    return directory


def _serve_here(job: Job, make: MakeBackends, options: dict[str, Any]) -> NoReturn:
    if job.directory is None:
        raise ValueError("an expert process announces itself in a directory; name one in ANABRANCH_DIRECTORY")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "call job.serve in the main thread, which alone receives the signal that ends an expert process"
        )
    directory = as_directory(job.directory, role="experts", keys=options["keys"], insecure=options["insecure"])
    options["directory"] = _MarkedDirectory(directory, f"{_marks()}.{job.rank}")
    options["listen"] = options["listen"] or os.environ.get(LISTEN_VARIABLE)
    backends = make(job.rank, job.world_size)  # until they exist, nothing is lost by ending at once
    linger = float(os.environ.get(LINGER_VARIABLE) or 0.0)
    serve_until_stopped(lambda: ExpertServer(backends, **options), linger=linger)
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


def _wait_for_experts(directory: DirectoryLike, count: int, deadline: Deadline) -> None:
    marks = _marks()
    while True:
        here = directory.active([marks])[marks]
        missing = [index for index in range(count) if index not in here]
        if not missing:
            return
        if deadline.expired():
            why = f"{len(missing)} of {count} expert processes have not announced themselves; see their logs"
            raise deadline.error(peer=", ".join(f"expert {index}" for index in missing), operation="serve", why=why)
        time.sleep(_LOOK_EVERY)


def _marks() -> str:
    """Return the prefix of the uids with which expert processes, in addition to their experts, are announced.

    In a directory that other jobs use, too, it has the name of this one.
    """
    run = os.environ.get(RUN_VARIABLE)
    return f"anabranch-expert-{run}" if run else "anabranch-expert"
