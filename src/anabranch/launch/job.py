"""Runs a job: its roles are started at a site, watched until the last worker has ended, and started again if it fails.

::

    run_job ── attempt ── site (this machine, or a Ray cluster)
                   ├── rendezvous          the store and the directory, there before all others
                   ├── parameters 0..S-1   anabranch serve parameters
                   ├── expert 0..N-1       SCRIPT, up to job.serve()
                   └── worker 0..W-1       SCRIPT, a torch.distributed job

The whole job restarts: workers that lost a step together with a server go back together, to the last complete
checkpoint, which the script finds where it saved it. Parameter servers begin empty, so they hold only the state that
the script loads.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from anabranch.held_error import HELD_ERROR_VARIABLE, move_held_error
from anabranch.job import (
    JOB_VARIABLE,
    JOINED_VARIABLE,
    LINGER_VARIABLE,
    LISTEN_VARIABLE,
    MEETING_VARIABLE,
    RETURN_VARIABLE,
    RUN_VARIABLE,
)
from anabranch.launch.job_status import JobFile
from anabranch.launch.output.long_waits import LongWaits
from anabranch.launch.output.screen import Screen
from anabranch.launch.python_program import PythonProgram
from anabranch.launch.spec import JobSpec
from anabranch.launch.supervision.members import Members
from anabranch.launch.supervision.outcome import JobOutcome, Role
from anabranch.launch.supervision.signals import Stopped, collect_signals
from anabranch.launch.supervision.supervisor import Supervisor
from anabranch.launch.supervision.worker import ProcessSpec, RoleProcess
from anabranch.liveness.membership import MEMBER_VARIABLE, MEMBERS_VARIABLE
from anabranch.record.process import TRACE_VARIABLE
from anabranch.record.trace import ProcessTrace, read_part, write_trace
from anabranch.transport.certificates import KEYS_VARIABLE

_LINGER_SECONDS = 25.0  # for which a service serves on after its first signal while workers are connected


@dataclass(slots=True)
class Attempt:
    """One attempt at a job.

    Attributes:
        spec: the job.
        number: how many there were before.
        base: the environment that all its processes have.
        job_file: lists its processes.
        tell: called with each line that a user should see at once.
        run_id: its name, in the environment of each of its processes.
        stopped: the signal that ended it before the user's first process was started.
        raises: whether that signal raises ``Stopped`` in its handler; where an engine loses exceptions, it calls
            ``check`` instead.
    """

    spec: JobSpec
    number: int
    base: Mapping[str, str]
    job_file: JobFile
    tell: Callable[[str], None]
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    stopped: signal.Signals | None = None
    raises: bool = True

    def stop(self, number: signal.Signals) -> None:
        """End at once, as nothing is lost by that: a handler."""
        if self.stopped is None:
            self.stopped = number
            if self.raises:
                raise Stopped(number)

    def check(self) -> None:
        """Raise ``Stopped`` if a signal has come."""
        if self.stopped is not None:
            raise Stopped(self.stopped)


class Site(ABC):
    """The place of an attempt's roles, this machine or the nodes of a cluster, while its block lasts.

    Attributes:
        rendezvous: the process through which all meet; it is ready.
        master: host and port of the store for scripts that make their own process group.
        meeting: the file through which workers of one machine meet; ``None`` where they meet through the store.
        members: the file beside which the launcher publishes the memberships.
        directory: the directory's endpoint; ``None`` of a job without services.
        parameters: the endpoint of each parameter server.
        keys: the directory of certificates, where all processes see one.
    """

    rendezvous: RoleProcess
    master: tuple[str, int]
    meeting: Path | None
    members: Path
    directory: str | None
    parameters: Sequence[str]
    keys: Path | None

    @abstractmethod
    def start(self, spec: ProcessSpec, restarted: int) -> RoleProcess:
        """Start a role, at any time; ``restarted``: how often it was started before."""

    @abstractmethod
    def state(self, shard: int) -> str:
        """Return a folder that outlives the process of a parameter server."""

    @abstractmethod
    def expert_listens(self, index: int) -> str | None:
        """Return where an expert process listens; with port 0 on any; ``None`` where its process chooses."""


Sites: TypeAlias = Callable[[Attempt], AbstractContextManager[Site]]
"""Makes the site of an attempt ready; the end of its block ends what it has started."""


def run_job(spec: JobSpec, sites: Sites, tell: Callable[[str], None]) -> JobOutcome:
    """Run the job, and again as long as it fails on its own and restarts are left.

    When it returns, no process that the job started is left.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(collect_signals())
        trace = None if spec.trace is None else str(spec.trace.absolute())
        job_file = JobFile(spec.log_dir, tell, script=spec.program.target, trace=trace)
        base = spec.base
        if spec.trace is not None:
            base |= stack.enter_context(traced(spec.trace, spec.log_dir, job_file.services, tell))
        stack.callback(job_file.ended)
        job_file.expects(spec.counts)
        for number in range(spec.max_restarts + 1):
            if number:
                job_file.returns()
            left = None if spec.seconds is None else max(spec.seconds - (time.monotonic() - started), 0.0)
            outcome = _run(sites, Attempt(replace(spec, seconds=left), number, base, job_file, tell))
            failure = outcome.first_failure
            if failure is None or outcome.interrupted is not None or outcome.timed_out or number == spec.max_restarts:
                break
            tell(f"{failure.describe()}; restarting the job ({number + 1} of {spec.max_restarts})")
    return replace(outcome, seconds=time.monotonic() - started)


def _run(sites: Sites, attempt: Attempt) -> JobOutcome:
    spec, tell = attempt.spec, attempt.tell
    started = time.monotonic()
    log, held = (spec.log_dir.absolute() / f"worker-0.{name}" for name in ("log", "error"))
    workers: list[RoleProcess] = []
    services: list[RoleProcess] = []
    with ExitStack() as stack:
        stack.enter_context(suppress(Stopped))
        stack.callback(move_held_error, held, log)
        screen = stack.enter_context(Screen(log, tell, goes_on=attempt.number > 0)) if spec.live else None
        say = attempt.tell = screen.say if screen else tell
        signals = stack.enter_context(collect_signals())
        stack.callback(signals.call_on_stop, None)
        signals.call_on_stop(attempt.stop)
        site = stack.enter_context(sites(attempt))
        signals.call_on_stop(None)  # from here on the supervisor's loop looks at them
        attempt.check()
        roles = [
            replace(_role(attempt, site, "worker", rank), restarts=replace(spec.worker_restarts))
            for rank in range(spec.max_workers or spec.workers)
        ]
        members = None
        if spec.may_lose_workers:
            least, more = spec.min_workers or spec.workers, roles[spec.workers :]
            members = Members(workers, spec.workers, least, site.members, say, more)
        supervisor = Supervisor(
            workers,
            signals,
            services=services,
            rendezvous=site.rendezvous,
            start=site.start,
            returns=lambda role: attempt.job_file.returns(role.role, role.rank),
            members=members,
            screen=screen,
            waits=LongWaits(spec.log_dir, say) if screen else None,
            patience=spec.patience,
            seconds=spec.seconds,
            tell=say,
        )
        stack.callback(supervisor.kill)
        services.extend(site.start(role, attempt.number) for role in _services(attempt, site))
        for role in roles[: spec.workers]:
            if role.rank == 0 and screen is not None:
                hold = {} if spec.verbose else {HELD_ERROR_VARIABLE: str(held)}
                role = replace(role, screen=(screen.stdout, screen.stderr), environment={**role.environment, **hold})
            workers.append(site.start(role, attempt.number))
        if screen is not None:
            screen.started()
        supervisor.run()
    if attempt.stopped is not None:
        tell(f"{attempt.stopped.name}: stopped before all processes had started")
        return JobOutcome((), attempt.stopped, timed_out=False, seconds=time.monotonic() - started)
    ended = [*services, *([site.rendezvous] if site.rendezvous.early else [])]
    return JobOutcome(
        exits=tuple(workers),
        interrupted=supervisor.interrupted,
        timed_out=supervisor.timed_out,
        seconds=time.monotonic() - started,
        services=tuple(ended),
    )


def _services(attempt: Attempt, site: Site) -> Iterator[ProcessSpec]:
    spec = attempt.spec
    for shard, endpoint in enumerate(site.parameters):
        yield replace(
            _role(attempt, site, "parameters", shard),
            program=_serve_parameters(spec, shard, endpoint, site),
            restarts=None if spec.durability == "none" else replace(spec.service_restarts),
            endpoint=endpoint,
        )
    for index in range(spec.experts):
        listens = site.expert_listens(index)
        yield replace(
            _role(attempt, site, "expert", index),
            restarts=replace(spec.service_restarts),
            endpoint=listens if listens and listens.startswith("unix:") else None,
        )


def _role(attempt: Attempt, site: Site, role: Role, rank: int) -> ProcessSpec:
    spec = attempt.spec
    log = spec.log_dir / f"{role}-{rank}.log"
    return ProcessSpec(role, rank, spec.program, _environment_of(attempt, site, role, rank), log)


def _serve_parameters(spec: JobSpec, shard: int, endpoint: str, site: Site) -> PythonProgram:
    arguments = ["serve", "parameters", "--listen", endpoint, "--linger", str(_LINGER_SECONDS)]
    arguments += ["--shard", str(shard), "--shards", str(spec.servers), "--durability", spec.durability]
    if spec.durability != "none":
        arguments += ["--checkpoint-dir", site.state(shard), "--checkpoint-seconds", str(spec.checkpoint_seconds)]
    return PythonProgram("anabranch.cli", tuple(arguments), is_module=True)


# The variables of members of the workers' process group, which experts are not.
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", MEETING_VARIABLE)
_OF_A_JOB_AROUND = (MEETING_VARIABLE, MEMBERS_VARIABLE, MEMBER_VARIABLE, JOINED_VARIABLE, RETURN_VARIABLE)


def _environment_of(attempt: Attempt, site: Site, role: Role, rank: int) -> dict[str, str]:
    """Return the whole environment of a process; an expert's rank is that among the experts.

    ``OMP_NUM_THREADS`` stays as the user set it. Otherwise several workers and experts share the cores evenly, where
    torch would give each of them all cores, and torchrun one. A single worker is left to torch, as under plain
    ``python``.
    """
    spec = attempt.spec
    base = {name: value for name, value in attempt.base.items() if name not in _OF_A_JOB_AROUND}
    env = {**base, "TORCHELASTIC_RUN_ID": attempt.run_id}
    if site.directory is not None:
        env |= {"ANABRANCH_DIRECTORY": site.directory, "ANABRANCH_EXPERTS": str(spec.experts)}
        if site.parameters:
            env["ANABRANCH_SERVERS"] = ",".join(site.parameters)
        if spec.directory is not None:  # that other jobs use, too
            env[RUN_VARIABLE] = attempt.run_id
        if site.keys is not None:
            env[KEYS_VARIABLE] = str(site.keys.absolute())
    if role == "parameters":
        return {"OPENBLAS_NUM_THREADS": "1", **env}  # whose threads, which it does not need, spin when they are started
    count = str(spec.counts[role])
    env |= {"RANK": str(rank), "WORLD_SIZE": count, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": count}
    if role == "expert":
        env |= {"ANABRANCH_ROLE": "expert", "ANABRANCH_WORKERS": str(spec.workers)}
        env[LINGER_VARIABLE] = str(_LINGER_SECONDS)
        if (listen := site.expert_listens(rank)) is not None:
            env[LISTEN_VARIABLE] = listen
        for name in _RENDEZVOUS:
            env.pop(name, None)
    else:
        env |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", JOB_VARIABLE: attempt.run_id}
        env |= {"ROLE_NAME": "worker", "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": count}
        env |= {"MASTER_ADDR": site.master[0], "MASTER_PORT": str(site.master[1])}
        env |= {"TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        errors = tempfile.gettempdir() if site.meeting is None else site.meeting.parent
        env["TORCHELASTIC_ERROR_FILE"] = os.path.join(errors, f"anabranch-{attempt.run_id}-{rank}.json")
        if site.meeting is None:  # a rank has its actor, and so its GPU, for itself
            env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": count}
        else:
            env[MEETING_VARIABLE] = str(site.meeting)
        if spec.may_lose_workers:
            env |= {MEMBER_VARIABLE: str(rank), MEMBERS_VARIABLE: str(site.members)}
            env |= {RETURN_VARIABLE: "1"} if spec.durability == "log" else {}
    if (processes := spec.workers + spec.experts) > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    return env


@contextmanager
def traced(
    path: Path, log_dir: Path, names: Callable[[], Mapping[str, str]], tell: Callable[[str], None]
) -> Iterator[Mapping[str, str]]:
    """Make the processes of a job record spans until the block ends; then write the trace.

    Args:
        path: where the trace goes.
        log_dir: where processes write their records, in a folder that is removed at the end.
        names: returns the names of the job's services, by their endpoints.
        tell: called with a line about the file, or the reason why there is none.

    Yields:
        The environment variables for each process of the job.
    """
    path = path.absolute()
    with tempfile.TemporaryDirectory(prefix=".spans-", dir=log_dir, ignore_cleanup_errors=True) as name:
        folder = Path(name).absolute()
        try:
            yield {TRACE_VARIABLE: str(folder)}
        finally:
            parts = [read_part(file.read_bytes()) for file in sorted(folder.glob("*.spans"))]
            tell(_write_trace(path, [part for part in parts if part is not None], names()))


def _write_trace(path: Path, parts: list[ProcessTrace], names: Mapping[str, str]) -> str:
    if not parts:
        return f"no trace was written to {path}: no process recorded anything"
    try:
        wrote = write_trace(path, parts, names=names)
    except OSError as error:
        return f"no trace was written to {path}: {error.strerror}"
    missing = f" ({wrote.dropped} more were dropped)" if wrote.dropped else ""
    what = f"{wrote.spans} spans of {wrote.processes} processes{missing}"
    return f"the trace: {path}, {what}; open it at https://ui.perfetto.dev"
