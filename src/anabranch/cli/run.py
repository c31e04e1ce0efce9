"""``anabranch run``: a script as the workers of one job on this machine."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from anabranch.cli.job_end import show_end
from anabranch.cli.messages import plain_errors, tell
from anabranch.cli.options import Arguments, Experts, IsModule, OfTorchrun, Script, Servers, Workers
from anabranch.launch import Durability, JobOutcome, JobSpec, PythonProgram, RestartBudget, launch
from anabranch.launch.supervision.signals import collect_signals
from anabranch.transport.redis_directory import RedisLink, is_redis_url

_ASK_SECONDS = 10.0


def run(
    script: Script,
    arguments: Arguments = None,
    module: IsModule = False,
    of_torchrun: OfTorchrun = None,
    workers: Workers = 1,
    min_workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="M",
            help="Go on while at least M workers are left of those that are killed; by default the others wait for the "
            "replacement of each. In both cases the interrupted step is done again, with the same result, on "
            "the CPU with batches of ab.loaders.GlobalBatches or of functions. With other batches, and in comm_mode PS "
            "under ssp or asp, none is replaced: the others go on without its rows; without this option the job ends.",
        ),
    ] = None,
    worker_restarts: Annotated[
        str, typer.Option(metavar="N/SECONDSs", help="Replace a worker that is killed up to N times in any SECONDS.")
    ] = "3/600s",
    servers: Servers = 0,
    experts: Experts = 0,
    durability: Annotated[
        Durability, typer.Option(help="What is restored when a parameter server dies; `none` ends the job.")
    ] = "none",
    checkpoint_seconds: Annotated[
        float, typer.Option(min=0.001, metavar="S", help="How often parameter servers write a checkpoint.")
    ] = 300.0,
    max_restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="Restart a failed job N times, from its last complete checkpoint.")
    ] = 0,
    service_restarts: Annotated[
        str, typer.Option(metavar="N/SECONDSs", help="Restart a dead server or expert up to N times in any SECONDS.")
    ] = "3/600s",
    host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address of this machine where servers and experts listen on TCP, with certificates; by default they "
            "use Unix sockets.",
        ),
    ] = None,
    directory: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="Announce the experts in this directory, and look others up there: endpoints of `anabranch serve "
            "directory`, or a Redis URL. By default the job has its own.",
        ),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep each process's output here, as ROLE-RANK.log. By default logs are kept only after a failure.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace of all processes here at the end, for ui.perfetto.dev."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the errors of all processes, also those that follow from another.")
    ] = False,
    spawn: Annotated[
        bool, typer.Option("--spawn", help="Start processes from scratch, not as forks of one that has imported torch.")
    ] = False,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Run on this machine, or on the nodes of a Ray cluster.")
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Ray's head node; by default RAY_ADDRESS, or a cluster on this machine."
        ),
    ] = None,
    resources: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='Ray resources of each role, such as \'{"worker": {"CPU": 2, "GPU": 1}}\'; roles are worker, '
            "server, expert.",
        ),
    ] = None,
) -> None:
    """Run SCRIPT as one torch.distributed job, with its servers.

    The workers find the same environment as under torchrun. Rank 0 is live on the screen; `anabranch status --watch`
    shows how far the job is and how each process is. When a process fails, its rank and traceback are shown and the
    others stopped, except that a worker that is killed may be replaced; Ctrl-C stops all, Ctrl-Z pauses all. No process
    is left behind.

    An expert process that dies is restarted, and the job continues meanwhile with those that answer.

    Exit code: 0 if all succeeded, 1 if one failed, 130 on Ctrl-C, 2 for wrong arguments.
    """
    _check_engine(engine, address=address, resources=resources, host=host, spawn=spawn, directory=directory)
    with plain_errors():
        spec = JobSpec(
            program=PythonProgram(script, tuple(arguments or []), is_module=module, looks_here=module),
            log_dir=Path(),
            workers=workers,
            min_workers=min_workers,
            worker_restarts=RestartBudget.parse(worker_restarts),
            servers=servers,
            experts=experts,
            durability=durability,
            checkpoint_seconds=checkpoint_seconds,
            max_restarts=max_restarts,
            service_restarts=RestartBudget.parse(service_restarts),
            host=host,
            live=True,
            verbose=verbose,
            spawn=spawn,
            trace=trace,
        )
        if resources is not None:
            from anabranch.launch.ray.ray_engine import parse_resources

            spec = replace(spec, resources=parse_resources(resources))
    with plain_errors("--directory"):
        spec = replace(spec, directory=directory)
        if directory is not None and is_redis_url(directory):
            RedisLink(directory, _ASK_SECONDS).run(lambda client: client.time(), "directory.time")
    _tell_of_options(
        script, arguments or [], {"--workers": workers == 1, "--servers": not servers, "--experts": not experts}
    )
    logs = _log_directory(log_dir)
    outcome: JobOutcome | None = None
    with collect_signals():
        try:
            with plain_errors():
                spec = replace(spec, log_dir=logs)
                if engine == "ray":
                    from anabranch.launch.ray import launch_on_ray

                    outcome = launch_on_ray(spec, tell, address=address)
                else:
                    outcome = launch(spec, tell)
            show_end(outcome, logs, verbose=verbose)
        finally:
            if log_dir is None and (outcome is None or outcome.first_failure is None):
                shutil.rmtree(logs, ignore_errors=True)
    raise typer.Exit(outcome.exit_code)


def _check_engine(engine: str, **options: object) -> None:
    """Refuse options that mean nothing to the engine."""
    others = ("host", "spawn", "directory") if engine == "ray" else ("address", "resources")
    for name in others:
        if options[name]:
            cure = "leave it out" if engine == "ray" else "give --engine ray, too"
            raise typer.BadParameter(f"--engine {engine} does not use it; {cure}", param_hint=f"--{name}")


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
        logs = folder if number == 1 else folder.resolve().with_name(f"{folder.resolve().name}.{number}")
        try:
            logs.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(logs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            text = f"cannot make the directory {logs}: {error.strerror}"
            raise typer.BadParameter(text, param_hint="--log-dir") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        except OSError:  # a file system without locks
            os.close(descriptor)
        break
    if number > 1:
        tell(f"a running job writes to {folder}; the logs of this one: {logs}")
    return logs
