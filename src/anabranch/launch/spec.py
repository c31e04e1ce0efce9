"""``JobSpec``: a job, as it was asked for; made once, at the command line or by a caller, and passed whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from anabranch.deadline import check_seconds
from anabranch.launch.meeting.addresses import check_directory
from anabranch.launch.python_program import PythonProgram
from anabranch.launch.supervision.budget import RestartBudget
from anabranch.launch.supervision.supervisor import Patience
from anabranch.record.process import TRACE_VARIABLE
from anabranch.record.trace import check_trace_path
from anabranch.transport.certificates import KEYS_VARIABLE

Durability = Literal["none", "checkpoint", "log"]

Resources = Mapping[str, Mapping[str, float]]
"""By role (``worker``, ``server``, ``expert``): the amount of each resource of Ray, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A script as a job: its processes, what they keep, and how they end.

    Attributes:
        program: what workers and expert processes run.
        log_dir: an existing directory; each process's output goes to ``<role>-<rank>.log`` there, and ``job.json``
            lists the processes, see ``job_status.py``.
        workers: how many workers; at least 1.
        min_workers: with fewer left of those that are killed, the others wait for replacements; ``None``: all.
        max_workers: up to so many join where there is room for them, on a Ray cluster; ``None``: no more.
        worker_restarts: how often a worker that is killed is replaced, where the others go on.
        servers: how many parameter servers.
        experts: how many processes of the script have the role ``"expert"``, and serve in ``job.serve()``.
        durability: what a parameter server that is restarted finds: nothing, so it is not; its last checkpoint; all
            that it had acknowledged.
        checkpoint_seconds: how often a parameter server writes a checkpoint, if ``durability`` keeps any.
        max_restarts: how often a job that fails is restarted; its workers find ``TORCHELASTIC_RESTART_COUNT``.
        service_restarts: how often a service that dies is restarted.
        host: an address of this machine: the services listen there on TCP, under the certificates that
            ``ANABRANCH_KEYS`` names, or else ones made for this job; by default they have Unix sockets.
        directory: the endpoints of a directory, or the URL of a Redis, that outlives the job: its experts are announced
            there, and experts of others found; by default the job has its own directory.
        live: show rank 0's output on this process's stdout and stderr, too.
        verbose: show there, too, the tracebacks of rank 0 that only say that another rank was lost, or Ctrl-C.
        environment: the base of the processes' environment; that of this process by default.
        patience: how long workers may take to end after a failure or a signal.
        seconds: end the job after this time; ``None`` for as long as it takes.
        spawn: start plain processes, none by forking.
        trace: where a trace of all processes goes at the end of the job, however it ends; see ``record/trace.py``.
        resources: of each role on a Ray cluster.

    Raises:
        ModuleNotFoundError: a Redis without the ``redis`` extra.
        ValueError: an invalid number of processes or seconds, a missing script or module, a trace that cannot be
            written.
    """

    program: PythonProgram
    log_dir: Path
    workers: int = 1
    min_workers: int | None = None
    max_workers: int | None = None
    worker_restarts: RestartBudget = field(default_factory=RestartBudget)
    servers: int = 0
    experts: int = 0
    durability: Durability = "none"
    checkpoint_seconds: float = 300.0
    max_restarts: int = 0
    service_restarts: RestartBudget = field(default_factory=RestartBudget)
    host: str | None = None
    directory: str | None = None
    live: bool = False
    verbose: bool = False
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    patience: Patience = field(default_factory=Patience)
    seconds: float | None = None
    spawn: bool = False
    trace: Path | None = None
    resources: Resources = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = {"workers": 1, "servers": 0, "experts": 0, "max_restarts": 0}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise ValueError(f"{name} must be at least {number}, got {getattr(self, name)}")
        if self.min_workers is not None and not 1 <= self.min_workers <= self.workers:
            raise ValueError(f"min_workers is from 1 to the {self.workers} workers, got {self.min_workers}")
        if self.max_workers is not None and not 2 <= self.workers <= self.max_workers:
            raise ValueError(
                f"workers=(N, MAX) needs 2 <= N <= MAX, as others cannot join one that trains alone; got "
                f"{(self.workers, self.max_workers)}"
            )
        if self.host is not None and not self.has_services:
            raise ValueError(f"host={self.host!r} is where servers and experts listen; this job has none, leave it out")
        check_seconds(checkpoint_seconds=self.checkpoint_seconds)
        if self.trace is not None:
            check_trace_path(self.trace)
        self.program.check()
        if self.directory is not None:
            keys = self.environment.get(KEYS_VARIABLE)
            check_directory(self.directory, experts=self.experts, host=self.host, keys=keys)

    @property
    def may_lose_workers(self) -> bool:
        """True if the others may go on without a worker that is killed, or with another in its place."""
        return self.workers > 1

    @property
    def has_services(self) -> bool:
        """True if it has servers or experts."""
        return bool(self.servers or self.experts)

    @property
    def counts(self) -> dict[str, int]:
        """The number of its processes, by role."""
        return {"worker": self.workers, "parameters": self.servers, "expert": self.experts}

    @property
    def base(self) -> dict[str, str]:
        """The base of its environment: a job inside a process that is recorded is no part of that process's job."""
        return {name: value for name, value in self.environment.items() if name != TRACE_VARIABLE}
