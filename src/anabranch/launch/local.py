"""Runs a script as one job on this machine: its workers, its expert processes, and the servers they use.

::

    launcher ── directory (in the launcher itself, so that it is there before all others and outlives them)
        ├── worker 0..W-1       SCRIPT, a torch.distributed job
        ├── expert 0..N-1       SCRIPT, up to job.serve()
        └── parameters 0..S-1   anabranch serve parameters

``place.py`` says where the services listen.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal

from anabranch.experts import Directory, DirectoryServer
from anabranch.launch.environment import expert_environment, service_environment, threads_each, worker_environment
from anabranch.launch.orphans import adopt_orphans, kill_orphans
from anabranch.launch.outcome import Outcome
from anabranch.launch.place import private_place, tcp_place
from anabranch.launch.roles import expert_mark
from anabranch.launch.screen import Screen
from anabranch.launch.signals import collect_signals
from anabranch.launch.store import host_store
from anabranch.launch.supervisor import Patience, Supervisor
from anabranch.launch.worker import Recipe, Worker
from anabranch.transport.keys import KEYS_VARIABLE
from anabranch.transport.private_folder import PrivateFolder

__all__ = ["Durability", "launch"]

Durability = Literal["none", "checkpoint", "log"]
_RESTARTS = 3


def launch(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    workers: int = 1,
    servers: int = 0,
    experts: int = 0,
    durability: Durability = "none",
    host: str | None = None,
    log_dir: Path,
    live: bool = False,
    environment: Mapping[str, str] | None = None,
    patience: Patience | None = None,
    seconds: float | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Runs ``script`` in ``workers`` processes that form a ``torch.distributed`` job, and waits for all of them.

    Parameter servers and expert processes are stopped when the last worker has ended. An expert process that dies after
    it has served is started again, three times; then the job goes on without it. A parameter server that dies is
    started again if ``durability`` lets it come back, and ends the job otherwise.

    When it returns, no process that the job started is left.

    Args:
        script: the Python file.
        arguments: what it finds in ``sys.argv[1:]``.
        workers: how many workers; at least 1.
        servers: how many parameter servers.
        experts: how many processes of the script have the role ``"expert"``, and serve in ``job.serve()``.
        durability: what a parameter server that is started again finds: nothing, so it is not; its last checkpoint; all
            that it had acknowledged.
        host: an address of this machine: the services listen there on TCP, under the certificates that
            ``ANABRANCH_KEYS`` names, or else ones made for this job; by default they have Unix sockets.
        log_dir: an existing directory; each process's output goes to ``<role>-<rank>.log`` there.
        live: show rank 0's output on this process's stdout and stderr, too.
        environment: what the workers' environment is made from; ``os.environ`` by default.
        patience: how long workers may take to end after a failure or a signal.
        seconds: end the job after this time; ``None`` for as long as it takes.
        tell: called with each line that a user should see at once.

    Raises:
        ValueError: a number of processes that cannot be, no such script, or a host that is no address of this machine.
    """
    if workers < 1:
        raise ValueError(f"a job has at least 1 worker, got workers={workers}")
    if servers < 0 or experts < 0:
        raise ValueError(f"a job cannot have fewer than 0 servers or experts, got servers={servers}, experts={experts}")
    if host is not None and not servers and not experts:
        raise ValueError(f"host={host!r} is where servers and experts listen, and this job has none; leave it out")
    if not script.exists():
        raise ValueError(f"there is no script {str(script)!r} here; it is looked up from {os.getcwd()!r}")
    run_id = uuid.uuid4().hex
    base = os.environ if environment is None else environment
    command = [sys.executable, "-u", str(script), *arguments]
    started = time.monotonic()
    with ExitStack() as stack:
        scratch = stack.enter_context(PrivateFolder())
        store = host_store()
        place = stack.enter_context(
            private_place(servers) if host is None else tcp_place(host, servers, base.get(KEYS_VARIABLE) or None)
        )
        directory = None
        if servers or experts:
            directory = stack.enter_context(DirectoryServer(place.directory, keys=place.keys))
            base = service_environment(place.parameters, place.directory, experts, keys=place.keys, base=base)
        screen = stack.enter_context(Screen(log_dir / "worker-0.log")) if live else None
        signals = stack.enter_context(collect_signals())
        running: list[Worker] = []
        services: list[Worker] = []
        sessions: set[int] = set()
        stack.enter_context(adopt_orphans())
        stack.callback(lambda: kill_orphans(f"TORCHELASTIC_RUN_ID={run_id}", sessions))

        def say(line: str) -> None:
            if screen:
                screen.finish_line()
            tell(line)

        def start(recipe: Recipe, restarted: int = 0) -> Worker:
            process = Worker(recipe, restarted)
            sessions.add(process.pid)
            return process

        supervisor = Supervisor(
            running,
            signals,
            services=services,
            start=start,
            screen=screen,
            patience=patience,
            seconds=seconds,
            tell=say,
        )
        stack.callback(supervisor.kill)
        threads = threads_each(workers + experts)
        for shard, endpoint in enumerate(place.parameters):
            services.append(
                start(
                    Recipe(
                        "parameters",
                        shard,
                        _serve_parameters(shard, servers, endpoint, durability, scratch / "parameters"),
                        {**base, "TORCHELASTIC_RUN_ID": run_id},
                        log_dir / f"parameters-{shard}.log",
                        restarts=0 if durability == "none" else _RESTARTS,
                        has_served=lambda: True,
                    )
                )
            )
        for index in range(experts):
            assert directory is not None
            services.append(
                start(
                    Recipe(
                        "expert",
                        index,
                        command,
                        expert_environment(index, experts, workers, run_id=run_id, threads=threads, base=base),
                        log_dir / f"expert-{index}.log",
                        restarts=_RESTARTS,
                        has_served=partial(_is_announced, directory.directory, expert_mark(index)),
                    )
                )
            )
        for rank in range(workers):
            env = worker_environment(
                rank,
                workers,
                run_id=run_id,
                store_port=store.port,
                error_file=scratch / f"error-{rank}.json",
                base=base,
                experts=experts,
            )
            running.append(
                start(
                    Recipe("worker", rank, command, env, log_dir / f"worker-{rank}.log", screen if rank == 0 else None)
                )
            )
        if screen:
            screen.started()
        supervisor.run()
    return Outcome(
        exits=tuple(process.exit for process in running),
        interrupted=supervisor.interrupted,
        timed_out=supervisor.timed_out,
        seconds=time.monotonic() - started,
        services=tuple(process.exit for process in services),
    )


def _serve_parameters(shard: int, shards: int, endpoint: str, durability: Durability, state: Path) -> list[str]:
    command = [sys.executable, "-u", "-P", "-m", "anabranch.cli", "serve", "parameters", "--listen", endpoint]
    command += ["--shard", str(shard), "--shards", str(shards), "--durability", durability]
    return command if durability == "none" else [*command, "--checkpoint-dir", str(state)]


def _is_announced(directory: Directory, uid: str) -> bool:
    return bool(directory.lookup([uid]))
