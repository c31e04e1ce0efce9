"""Runs a script as one job on this machine: its workers, its expert processes, and the servers they use.

::

    launcher ── fork server         has imported everything; the others are forked from it, see fork_server.py
        ├── rendezvous          the store and the directory, there before all others
        ├── worker 0..W-1       SCRIPT, a torch.distributed job
        ├── expert 0..N-1       SCRIPT, up to job.serve()
        └── parameters 0..S-1   anabranch serve parameters

``meeting.addresses`` says where the services listen. All are plain processes where they cannot be forked, see
``conditions.py``.
"""

from __future__ import annotations

import os
import select
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal

from anabranch.held_error import HELD_ERROR_VARIABLE, move_held_error
from anabranch.launch.environment import (
    LINGER_SECONDS,
    expert_environment,
    service_environment,
    threads_each,
    worker_environment,
)
from anabranch.launch.forks.conditions import why_no_fork_server, why_not_forked
from anabranch.launch.forks.launcher_side import ForkServer, ForkServerError
from anabranch.launch.job_file import JobFile
from anabranch.launch.job_trace import JobTrace
from anabranch.launch.meeting.addresses import check_directory, private_place, tcp_place
from anabranch.launch.meeting.rendezvous import PROGRAM, Rendezvous, expert_mark
from anabranch.launch.output.long_waits import LongWaits
from anabranch.launch.output.screen import Screen
from anabranch.launch.python_program import PythonProgram
from anabranch.launch.supervision.attempts import run_attempts
from anabranch.launch.supervision.budget import RestartBudget
from anabranch.launch.supervision.orphans import adopt_orphans, kill_orphans
from anabranch.launch.supervision.outcome import JobOutcome
from anabranch.launch.supervision.signals import SignalBox, Stopped, collect_signals
from anabranch.launch.supervision.supervisor import Monitor, Patience, Supervisor
from anabranch.launch.supervision.worker import ProcessSpec, RoleProcess
from anabranch.record.process import TRACE_VARIABLE
from anabranch.transport.network.certificates import KEYS_VARIABLE
from anabranch.transport.private_folder import PrivateFolder

__all__ = ["Durability", "launch"]

Durability = Literal["none", "checkpoint", "log"]
_END_SECONDS = 5.0


def launch(
    script: Path | str,
    arguments: Sequence[str] = (),
    *,
    is_module: bool = False,
    workers: int = 1,
    servers: int = 0,
    experts: int = 0,
    durability: Durability = "none",
    host: str | None = None,
    log_dir: Path,
    live: bool = False,
    verbose: bool = False,
    environment: Mapping[str, str] | None = None,
    patience: Patience | None = None,
    seconds: float | None = None,
    tell: Callable[[str], None] = lambda line: None,
    spawn: bool = False,
    server: ForkServer | None = None,
    max_restarts: int = 0,
    service_restarts: RestartBudget | None = None,
    checkpoint_seconds: float = 300.0,
    trace: Path | None = None,
    directory: str | None = None,
) -> JobOutcome:
    """Run ``script`` in ``workers`` processes that form a ``torch.distributed`` job, and wait for all of them.

    Parameter servers and expert processes are stopped when the last worker has ended. An expert process that dies after
    it has served is restarted, as often as ``service_restarts`` allows; then the job continues without it. A
    parameter server that dies is restarted if ``durability`` lets it come back, and fails the job otherwise. A job
    that fails is restarted as a whole, ``max_restarts`` times: see ``attempts.py``.

    When it returns, no process that the job started is left.

    Args:
        script: the Python file.
        arguments: its ``sys.argv[1:]``.
        is_module: whether ``script`` is the name of a module, which is found as ``python -m`` finds it.
        workers: how many workers; at least 1.
        servers: how many parameter servers.
        experts: how many processes of the script have the role ``"expert"``, and serve in ``job.serve()``.
        durability: what a parameter server that is restarted finds: nothing, so it is not; its last checkpoint; all
            that it had acknowledged.
        host: an address of this machine: the services listen there on TCP, under the certificates that
            ``ANABRANCH_KEYS`` names, or else ones made for this job; by default they have Unix sockets.
        log_dir: an existing directory; each process's output goes to ``<role>-<rank>.log`` there, and ``job.json``
            lists the processes, see ``job_file.py``.
        live: show rank 0's output on this process's stdout and stderr, too.
        verbose: show there, too, the tracebacks of rank 0 that only say that another rank was lost, or Ctrl-C.
        environment: the base of the workers' environment; ``os.environ`` by default.
        patience: how long workers may take to end after a failure or a signal.
        seconds: end the job after this time; ``None`` for as long as it takes.
        tell: called with each line that a user should see at once.
        spawn: start plain processes, none by forking.
        server: forks them; by default one of the job's own.
        max_restarts: how often a job that fails is restarted; its workers find ``TORCHELASTIC_RESTART_COUNT``.
        service_restarts: how often a service that dies is; three times in any ten minutes by default.
        checkpoint_seconds: how often a parameter server writes a checkpoint, if ``durability`` keeps any.
        trace: where a trace of all processes goes at the end of the job, however it ends; see ``record/trace.py``.
        directory: the endpoints of a directory, or the URL of a Redis, that outlives the job: its experts are announced
            there, and experts of others found; by default the job has its own directory.

    Raises:
        ModuleNotFoundError: a Redis without the ``redis`` extra.
        ValueError: an invalid number of processes, a missing script or module, a host that is not an address of this
            machine, or a trace that cannot be written.
    """
    if workers < 1:
        raise ValueError(f"a job has at least 1 worker, got workers={workers}")
    if servers < 0 or experts < 0:
        raise ValueError(f"a job cannot have fewer than 0 servers or experts, got servers={servers}, experts={experts}")
    if host is not None and not servers and not experts:
        raise ValueError(f"host={host!r} is where servers and experts listen, but this job has none; leave it out")
    program = PythonProgram(str(script), tuple(arguments), is_module, looks_here=is_module)
    program.check()
    if directory is not None:
        given = (os.environ if environment is None else environment).get(KEYS_VARIABLE)
        check_directory(directory, experts=experts, host=host, keys=given)
    # A job inside a process that is recorded is not part of that process's job.
    base = {
        name: value
        for name, value in (os.environ if environment is None else environment).items()
        if name != TRACE_VARIABLE
    }
    with ExitStack() as stack:
        signals = stack.enter_context(collect_signals())
        job_file = JobFile(log_dir, tell, trace=trace)
        if trace is not None:
            recorded = stack.enter_context(JobTrace(trace, log_dir, job_file.services, tell))
        if spawn or why_no_fork_server(base):
            server = None
        elif server is None:  # imports while the rest is made ready
            server = stack.enter_context(ForkServer(base))
        if trace is not None:
            base |= recorded
        started = time.monotonic()
        stack.callback(job_file.ended)
        job_file.expects({"worker": workers, "parameters": servers, "expert": experts})

        def attempt(number: int) -> JobOutcome:
            if number:
                job_file.all_return()
            return _attempt(
                program,
                number,
                workers=workers,
                servers=servers,
                experts=experts,
                durability=durability,
                host=host,
                log_dir=log_dir,
                job_file=job_file,
                live=live,
                verbose=verbose,
                base=base,
                signals=signals,
                patience=patience,
                seconds=None if seconds is None else max(seconds - (time.monotonic() - started), 0.0),
                tell=tell,
                server=server,
                service_restarts=service_restarts or RestartBudget(),
                checkpoint_seconds=checkpoint_seconds,
                directory=directory,
            )

        return replace(run_attempts(attempt, max_restarts, tell), seconds=time.monotonic() - started)


def _attempt(
    program: PythonProgram,
    number: int,
    *,
    workers: int,
    servers: int,
    experts: int,
    durability: Durability,
    host: str | None,
    log_dir: Path,
    job_file: JobFile,
    live: bool,
    verbose: bool,
    base: Mapping[str, str],
    signals: SignalBox,
    patience: Patience | None,
    seconds: float | None,
    tell: Callable[[str], None],
    server: ForkServer | None,
    service_restarts: RestartBudget,
    checkpoint_seconds: float,
    directory: str | None,
) -> JobOutcome:
    run_id = uuid.uuid4().hex
    started = time.monotonic()
    with ExitStack() as stack:
        scratch = stack.enter_context(PrivateFolder())
        place = stack.enter_context(
            private_place(servers) if host is None else tcp_place(host, servers, base.get(KEYS_VARIABLE) or None)
        )
        asked = directory or (place.directory if servers or experts else None)
        rendezvous = stack.enter_context(Rendezvous(asked, place.keys, elsewhere=directory is not None))
        run = None if directory is None else run_id
        if asked is not None:
            base = service_environment(place.parameters, asked, experts, keys=place.keys, run=run, base=base)
        log, held = log_dir.absolute() / "worker-0.log", log_dir.absolute() / "worker-0.error"
        stack.callback(move_held_error, held, log)
        screen = stack.enter_context(Screen(log, tell, goes_on=number > 0)) if live else None
        running: list[RoleProcess] = []
        services: list[RoleProcess] = []
        stack.enter_context(adopt_orphans())

        say = screen.say if screen else tell
        stopping = _StopSignals()
        stack.push(stopping.leave)
        stack.callback(signals.call_on_stop, None)
        signals.call_on_stop(stopping.stop)
        start = _Starter(server, say, job_file)
        stack.callback(lambda: kill_orphans(f"TORCHELASTIC_RUN_ID={run_id}", start.sessions))
        meeting_place = start(
            ProcessSpec(
                "rendezvous",
                0,
                PROGRAM,
                {**base, "TORCHELASTIC_RUN_ID": run_id},
                log_dir / "rendezvous-0.log",
                stdin=rendezvous.descriptor,
            )
        )
        stack.callback(_end, meeting_place, rendezvous, stopping)
        rendezvous.started()
        rendezvous.wait_until_ready()
        monitors: list[Monitor] = [LongWaits(log_dir, say)] if screen else []
        supervisor = Supervisor(
            running,
            signals,
            services=services,
            rendezvous=meeting_place,
            start=start,
            returns=lambda spec: job_file.returns(spec.role, spec.rank),
            screen=screen,
            monitors=monitors,
            patience=patience,
            seconds=seconds,
            tell=say,
        )
        stack.callback(supervisor.kill)
        signals.call_on_stop(None)  # from here on the supervisor's loop looks at them
        threads = threads_each(workers + experts)
        for shard, endpoint in enumerate(place.parameters):
            services.append(
                start(
                    ProcessSpec(
                        "parameters",
                        shard,
                        _serve_parameters(
                            shard, servers, endpoint, durability, scratch / "parameters", checkpoint_seconds
                        ),
                        {**base, "TORCHELASTIC_RUN_ID": run_id},
                        log_dir / f"parameters-{shard}.log",
                        restarts=None if durability == "none" else service_restarts.new(),
                        has_served=lambda: True,
                        endpoint=endpoint,
                    ),
                    number,
                )
            )
        services.extend(
            start(
                ProcessSpec(
                    "expert",
                    index,
                    program,
                    expert_environment(
                        index,
                        experts,
                        workers,
                        run_id=run_id,
                        threads=threads,
                        base=base,
                        listen=None if directory is None else place.expert_listens(index),
                    ),
                    log_dir / f"expert-{index}.log",
                    restarts=service_restarts.new(),
                    has_served=partial(rendezvous.is_announced, expert_mark(index, run)),
                    endpoint=place.expert(index),
                ),
                number,
            )
            for index in range(experts)
        )
        meeting = scratch / f"meeting-{rendezvous.port}"
        for rank in range(workers):
            env = worker_environment(
                rank,
                workers,
                run_id=run_id,
                store_port=rendezvous.port,
                error_file=scratch / f"error-{rank}.json",
                base=base,
                experts=experts,
                meeting=meeting,
            )
            if rank == 0 and screen and not verbose:
                env[HELD_ERROR_VARIABLE] = str(held)
            running.append(
                start(
                    ProcessSpec(
                        "worker", rank, program, env, log_dir / f"worker-{rank}.log", screen if rank == 0 else None
                    ),
                    number,
                )
            )
        if screen:
            screen.started()
        supervisor.run()
    if stopping.stopped is not None:
        tell(f"{stopping.stopped.name}: stopped before all processes had started")
        return JobOutcome((), stopping.stopped, timed_out=False, seconds=time.monotonic() - started)
    return JobOutcome(
        exits=tuple(process.exit for process in running),
        interrupted=supervisor.interrupted,
        timed_out=supervisor.timed_out,
        seconds=time.monotonic() - started,
        services=tuple(process.exit for process in (*services, *filter(lambda lost: lost.early, [meeting_place]))),
    )


class _StopSignals:
    """Ends a job at once at a signal that comes before any of the user's processes: nothing is lost by that."""

    stopped: signal.Signals | None = None

    def stop(self, number: signal.Signals) -> None:
        """Leave the block that makes the job ready; a handler."""
        if self.stopped is None:
            self.stopped = number
            raise Stopped(number)

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        """At the end of the block."""
        return isinstance(error, Stopped)


class _Starter:
    """Starts processes, forked if possible.

    Args:
        server: forks them.
        tell: called with each line that a user should see at once.
        job_file: records each.

    Attributes:
        sessions: those of all processes it has started.
    """

    def __init__(self, server: ForkServer | None, tell: Callable[[str], None], job_file: JobFile) -> None:
        self._job_file = job_file
        self.sessions: set[int] = set()
        self._server = server
        self._tell = tell

    def __call__(self, spec: ProcessSpec, restarted: int = 0) -> RoleProcess:
        spec = replace(spec, server=None)  # of a service that comes back: the server that forked it may be gone
        process = self._forked(spec, restarted) or RoleProcess(spec, restarted)
        self.sessions.add(process.pid)
        self._job_file.began(process.role, process.rank, process.pid, spec.endpoint)
        return process

    def _forked(self, spec: ProcessSpec, restarted: int) -> RoleProcess | None:
        if self._server is None or why_not_forked(spec.program, spec.environment, self._server.environment):
            return None
        try:
            return RoleProcess(replace(spec, server=self._server), restarted)
        except ForkServerError as error:
            self._tell(f"starting plain processes, which takes longer: {error}")
            self._server = None
            return None


def _end(process: RoleProcess, rendezvous: Rendezvous, stopping: _StopSignals) -> None:
    """End the rendezvous process, which exits when ``rendezvous`` is closed."""
    rendezvous.__exit__(None, None, None)
    if stopping.stopped is not None:  # it may still import
        process.signal(signal.SIGKILL)
    if process.running:
        if not select.select([process.pidfd], [], [], _END_SECONDS)[0]:
            process.signal(signal.SIGKILL)
        process.reap()
    with suppress(OSError):
        if not process.early and not process.log.stat().st_size:  # shown for one that was lost
            process.log.unlink()


def _serve_parameters(
    shard: int, shards: int, endpoint: str, durability: Durability, state: Path, checkpoint_seconds: float
) -> PythonProgram:
    arguments = ["serve", "parameters", "--listen", endpoint]
    arguments += ["--shard", str(shard), "--shards", str(shards), "--durability", durability]
    arguments += ["--linger", str(LINGER_SECONDS)]
    if durability != "none":
        arguments += ["--checkpoint-dir", str(state), "--checkpoint-seconds", str(checkpoint_seconds)]
    return PythonProgram("anabranch.cli", tuple(arguments), is_module=True)
