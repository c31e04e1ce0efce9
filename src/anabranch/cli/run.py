"""``anabranch run``: a script as the workers of one job on this machine."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from anabranch.cli.job_end import show_end, tell
from anabranch.cli.mistakes import plain_errors
from anabranch.cli.script_arguments import Arguments, IsModule, Script
from anabranch.deadline import check_seconds
from anabranch.launch import Durability, JobOutcome, JobSpec, PythonProgram, RestartBudget, launch
from anabranch.launch.meeting.addresses import check_directory
from anabranch.launch.supervision.signals import collect_signals
from anabranch.record.trace import check_trace_path
from anabranch.transport.certificates import KEYS_VARIABLE
from anabranch.transport.redis_directory import RedisLink, is_redis_url

__all__ = ["run"]

_ASK_SECONDS = 10.0


def run(
    script: Script,
    arguments: Arguments = None,
    module: IsModule = False,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="How many worker processes to start.")] = 1,
    servers: Annotated[int, typer.Option(min=0, metavar="N", help="How many parameter servers to start.")] = 0,
    experts: Annotated[
        int, typer.Option(min=0, metavar="N", help="How many additional processes run SCRIPT to serve experts.")
    ] = 0,
    durability: Annotated[
        Durability, typer.Option(help="What is restored when a parameter server dies; `none` ends the job.")
    ] = "none",
    host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address of this machine where servers and experts listen on TCP, with certificates; by default they "
            "use Unix sockets.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Run the processes on this machine, or on the nodes of a Ray cluster."),
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The head node of the Ray cluster; by default RAY_ADDRESS, or a cluster on this machine.",
            show_default=False,
        ),
    ] = None,
    resources: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='Ray resources of each role, such as \'{"worker": {"CPU": 2, "GPU": 1}}\'; roles are worker, '
            "server, expert.",
            show_default=False,
        ),
    ] = None,
    spawn: Annotated[
        bool,
        typer.Option(
            "--spawn", help="Start every process from scratch instead of forking it from one that has imported torch."
        ),
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Restart a failed job this many times, from its last complete checkpoint."
        ),
    ] = 0,
    service_restarts: Annotated[
        str,
        typer.Option(
            metavar="N/SECONDSs",
            help="Restart a server or expert that dies, up to N times in any SECONDS, after a pause.",
        ),
    ] = "3/600s",
    checkpoint_seconds: Annotated[
        float, typer.Option(min=0.001, metavar="S", help="How often parameter servers write a checkpoint.")
    ] = 300.0,
    directory: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="Announce the experts in this directory, and look others up there: endpoints of `anabranch serve "
            "directory`, or a Redis URL. By default the job has its own.",
            show_default=False,
        ),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            writable=True,
            help="Keep each process's output here, as ROLE-RANK.log. By default logs are kept only after a failure.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Record a trace of all processes and write it here at the end, for ui.perfetto.dev.",
            show_default=False,
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            help="Show the errors of all processes, including those that only follow from another.",
        ),
    ] = False,
) -> None:
    """Run SCRIPT in N processes that form one torch.distributed job, with the servers it uses.

    The workers find the same environment as under torchrun. Rank 0 is live on the screen; `anabranch status --watch`
    shows how far the job is and how each process is. When a process fails, its rank and traceback are shown and the
    others stopped; Ctrl-C stops all, Ctrl-Z pauses all. No process is left behind.

    An expert process that dies is restarted, and the job continues meanwhile with those that answer.

    Exit code: 0 if all succeeded, 1 if one failed, 130 on Ctrl-C, 2 for wrong arguments.
    """
    try:
        budget = RestartBudget.parse(service_restarts)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--service-restarts") from error
    with plain_errors("--checkpoint-seconds"):
        check_seconds(checkpoint_seconds=checkpoint_seconds)
    try:
        PythonProgram(script, is_module=module, looks_here=module).check()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="SCRIPT") from error
    try:
        trace = None if trace is None else check_trace_path(trace)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--trace") from error
    _check_engine(engine, address=address, resources=resources, host=host, spawn=spawn, directory=directory)
    if directory is not None:
        _ask_directory(directory, experts, host)
    wanted = None
    if resources is not None:
        from anabranch.launch.ray.cluster import parse_resources

        try:
            wanted = parse_resources(resources)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--resources") from error
    _tell_of_options(
        script, arguments or [], {"--workers": workers == 1, "--servers": not servers, "--experts": not experts}
    )
    logs = _log_directory(log_dir)
    with collect_signals():
        outcome: JobOutcome | None = None
        try:
            with plain_errors("--host" if host else "SCRIPT"):
                job = JobSpec(
                    program=PythonProgram(script, tuple(arguments or []), is_module=module, looks_here=module),
                    log_dir=logs,
                    workers=workers,
                    servers=servers,
                    experts=experts,
                    durability=durability,
                    checkpoint_seconds=checkpoint_seconds,
                    max_restarts=max_restarts,
                    service_restarts=budget,
                    host=host,
                    directory=directory,
                    live=True,
                    verbose=verbose,
                    spawn=spawn,
                    trace=trace,
                    resources=wanted or {},
                )
                outcome = _launch_on_ray(job, address) if engine == "ray" else launch(job, tell)
            show_end(outcome, logs, verbose=verbose)
        finally:
            failed = outcome is not None and outcome.first_failure is not None
            if log_dir is None and not failed:
                shutil.rmtree(logs, ignore_errors=True)
    raise typer.Exit(outcome.exit_code)


def _launch_on_ray(job: JobSpec, address: str | None) -> JobOutcome:
    from anabranch.launch.ray import RayError, launch_on_ray

    try:
        return launch_on_ray(job, tell, address=address)
    except RayError as error:
        tell(str(error))
        raise typer.Exit(1) from error


def _check_engine(engine: str, **given: object) -> None:
    """Refuse options that mean nothing to the engine."""
    others = ("host", "spawn", "directory") if engine == "ray" else ("address", "resources")
    for name in others:
        if given[name]:
            cure = "leave it out" if engine == "ray" else "give --engine ray, too"
            raise typer.BadParameter(f"--engine {engine} does not use it; {cure}", param_hint=f"--{name}")


def _ask_directory(directory: str, experts: int, host: str | None) -> None:
    """Refuse a directory that cannot be used, before anything is started."""
    with plain_errors("--directory"):
        check_directory(directory, experts=experts, host=host, keys=os.environ.get(KEYS_VARIABLE))
        if is_redis_url(directory):
            RedisLink(directory, _ASK_SECONDS).run(lambda client: client.time(), "directory.time")


def _tell_of_options(script: str, arguments: Sequence[str], missing: Mapping[str, bool]) -> None:
    """Warn about an option after the script, if it was not given before it."""
    for name, absent in missing.items():
        if absent and any(argument == name or argument.startswith(f"{name}=") for argument in arguments):
            tell(f"{name} comes after {script}, so the script gets it; options of `anabranch run` go before the script")


def _log_directory(folder: Path | None) -> Path:
    """Return a folder for the logs that no running job has, and hold it until this process ends."""
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="anabranch-logs-"))
    for number in itertools.count(1):
        logs = folder if number == 1 else folder.with_name(f"{folder.name}.{number}")
        try:
            logs.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(logs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise typer.BadParameter(
                f"cannot make the directory {logs}: {error.strerror}", param_hint="--log-dir"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        except OSError:  # a file system without locks
            os.close(descriptor)
        if logs != folder:
            tell(f"a running job writes to {folder}; the logs of this one: {logs}")
        return logs
    raise AssertionError("numbers do not end")
