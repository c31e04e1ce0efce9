"""A script run as a job on this machine, its exit codes, logs and results returned as plain data."""

from __future__ import annotations

import json
import os
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabranch.deadline import check_seconds
from anabranch.errors import DeadlineExceeded, RemoteError
from anabranch.launch import Durability, JobOutcome, JobSpec, Patience, PythonProgram, launch
from anabranch.launch.forks.launcher_side import kept_fork_server, why_no_fork_server


@dataclass(frozen=True, slots=True)
class JobResult:
    """The end of a job, by rank.

    Attributes:
        exit_codes: each worker's exit code, or minus the signal that killed it.
        logs: each worker's output, stdout and stderr together.
        results: the last line of each log that is a JSON object, parsed; ``None`` without one. Python writes floats
            so that they read back bit for bit.
        first_failure: the rank that failed first; ``None`` if none failed on its own.
        seconds: how long the job ran.
        first_failed: the process or the service: ``"rank 1"``, ``"parameters 0"``, ``"expert 1"``.
        service_logs: each service's output, by ``"parameters-0"``, ``"expert-0"``.
        told: the messages that ``anabranch run`` would have printed.
    """

    exit_codes: tuple[int, ...]
    logs: tuple[str, ...]
    results: tuple[dict[str, Any] | None, ...]
    first_failure: int | None
    seconds: float
    first_failed: str | None = None
    service_logs: Mapping[str, str] = field(default_factory=dict)
    told: tuple[str, ...] = ()

    def check(self) -> JobResult:
        """Return itself if every worker exited with 0, and no service ended the job.

        Raises:
            RemoteError: names the process that failed first, and carries its log.
        """
        if self.first_failed is None and not any(self.exit_codes):
            return self
        who = self.first_failed or f"rank {next(rank for rank, code in enumerate(self.exit_codes) if code)}"
        role, _, number = who.partition(" ")
        if role == "rank":
            end = f"ended with {self.exit_codes[int(number)]}, all with {list(self.exit_codes)}"
            log = self.logs[int(number)]
        else:
            end, log = "failed", self.service_logs[who.replace(" ", "-")]
        raise RemoteError(f"{who} {end}", peer=who, operation="run", elapsed=self.seconds, remote_traceback=log)


class LocalJob:
    """Runs scripts as a ``torch.distributed`` job on this machine, as ``anabranch run`` does, and waits for their end.

    >>> job = LocalJob(workers=2)
    >>> source = "import json, os; print(json.dumps({'rank': os.environ['RANK']}))"
    >>> result = job.run_source(source)
    >>> result.check().results
    ({'rank': '0'}, {'rank': '1'})

    No process of the job outlives a call. Each worker computes with one thread unless ``environment`` says otherwise.

    Args:
        workers: how many workers; at least 1.
        servers: how many parameter servers.
        experts: how many processes of the script serve experts, in ``job.serve()``.
        timeout: seconds a run may take, of which a new machine compiles the servers' kernels for a minute. Workers that
            still run then write every thread's stack to their log.
        environment: added to this process's environment for the workers.
        patience: how long processes may take to end after one of them failed.
        durability: the state that a restarted parameter server recovers; ``"none"`` ends the job.
        host: an address of this machine where the services listen on TCP, under certificates made for the job.
        spawn: start each process again. By default they are forked, where that makes no difference to them, from a
            server that has imported torch; this process keeps one, from its first job on until it ends.

    Raises:
        ValueError: a number of processes or seconds that is none.
    """

    def __init__(
        self,
        workers: int = 1,
        servers: int = 0,
        experts: int = 0,
        *,
        timeout: float = 200.0,
        environment: Mapping[str, str] | None = None,
        patience: Patience | None = None,
        durability: Durability = "none",
        host: str | None = None,
        spawn: bool = False,
    ) -> None:
        if min(workers - 1, servers, experts) < 0:
            raise ValueError(f"a job has at least 1 worker, got {workers=}, {servers=}, {experts=}")
        check_seconds(timeout=timeout)
        self.timeout = timeout
        self._options: dict[str, Any] = {"workers": workers, "servers": servers, "experts": experts}
        self._options |= {"durability": durability, "host": host, "spawn": spawn, "patience": patience or Patience()}
        self._environment = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **(environment or {})}

    def run(self, script: str | Path, *arguments: str) -> JobResult:
        """Run a Python file in every worker.

        Raises:
            DeadlineExceeded: the job took longer than ``timeout``; names the ranks still running, with their logs.
            ValueError: there is no such file.
        """
        with tempfile.TemporaryDirectory(prefix="anabranch-job-") as directory:
            told: list[str] = []
            environment = {**os.environ, **self._environment}
            spec = JobSpec(
                program=PythonProgram(str(script), tuple(arguments)),
                log_dir=Path(directory),
                environment=environment,
                seconds=self.timeout,
                **self._options,
            )
            forks = not spec.spawn and why_no_fork_server(environment) is None
            outcome = launch(spec, told.append, server=kept_fork_server(environment) if forks else None)
            return _result(outcome, told)

    def run_source(self, source: str, *arguments: str) -> JobResult:
        """Run Python source text in every worker; common indentation is removed first. Else like ``run``."""
        with tempfile.TemporaryDirectory(prefix="anabranch-source-") as directory:
            script = Path(directory, "script.py")
            script.write_text(textwrap.dedent(source))
            return self.run(script, *arguments)


def _result(outcome: JobOutcome, told: Sequence[str]) -> JobResult:
    logs = tuple(exit_.log.read_text(errors="replace") for exit_ in outcome.exits)
    if outcome.timed_out:
        late = [exit_.rank for exit_ in outcome.exits if exit_.stopped]
        error = DeadlineExceeded(
            "the job's timeout expired",
            peer=", ".join(f"rank {rank}" for rank in late),
            operation="run",
            elapsed=outcome.seconds,
        )
        for rank in late:
            error.add_note(f"the log of rank {rank}:\n{logs[rank]}")
        raise error
    if outcome.interrupted is not None:
        raise KeyboardInterrupt
    first = outcome.first_failure
    return JobResult(
        exit_codes=tuple(exit_.code for exit_ in outcome.exits),
        logs=logs,
        results=tuple(_last_json_object(log) for log in logs),
        first_failure=first.rank if first is not None and first.role == "worker" else None,
        seconds=outcome.seconds,
        first_failed=None if first is None else first.who,
        service_logs={exit_.log.stem: exit_.log.read_text(errors="replace") for exit_ in outcome.services},
        told=tuple(told),
    )


def _last_json_object(log: str) -> dict[str, object] | None:
    for line in reversed(log.splitlines()):
        if line.startswith("{"):
            with suppress(ValueError):
                value: dict[str, object] = json.loads(line)
                return value
    return None
