"""Runs a script as one job on a Ray cluster: each role in its own actor, watched as those of one machine are.

::

    launcher ── Supervisor, the local engine's ── RemoteProcess ──follow──> RoleActor (Ray's) ── the role's process
                                                                                on the node that Ray has chosen

Ray places and connects; data moves over our transport, under certificates made for each attempt, and over
``torch.distributed``. An attempt is an epoch: a process of an earlier one that lives on where Ray has lost its node
has the certificates of another job, and is let in nowhere; and no attempt begins before the leases of actors that were
lost are over.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from anabranch.launch.environment import LINGER_SECONDS, expert_environment, service_environment, worker_environment
from anabranch.launch.job_file import JobFile
from anabranch.launch.job_trace import JobTrace
from anabranch.launch.local import Durability
from anabranch.launch.meeting.rendezvous import PROGRAM, expert_mark
from anabranch.launch.output.screen import Screen
from anabranch.launch.python_program import PythonProgram
from anabranch.launch.ray.cluster import RayError, connected, import_ray
from anabranch.launch.ray.remote_process import RemoteProcess
from anabranch.launch.ray.resources import Resources, resources_of
from anabranch.launch.ray.role_actor import LEASE_SECONDS, RoleActor, names_of_keys
from anabranch.launch.supervision.attempts import run_attempts
from anabranch.launch.supervision.budget import RestartBudget
from anabranch.launch.supervision.outcome import JobOutcome
from anabranch.launch.supervision.signals import Stopped, collect_signals
from anabranch.launch.supervision.supervisor import Patience, Supervisor
from anabranch.launch.supervision.worker import ProcessSpec, RoleProcess
from anabranch.record.process import STATUS_VARIABLE, TRACE_VARIABLE
from anabranch.transport import make_keys
from anabranch.transport.private_folder import PrivateFolder

__all__ = ["launch_on_ray"]

_PLACE_SECONDS = 120.0
_CALL_SECONDS = 60.0
_LOOK_SECONDS = 0.5  # between two checks for a signal
# The role that a certificate names, by the job's.
_KEYS = {"rendezvous": "directory", "parameters": "parameters", "expert": "experts", "worker": "worker"}


def launch_on_ray(
    program: PythonProgram,
    *,
    workers: int = 1,
    servers: int = 0,
    experts: int = 0,
    address: str | None = None,
    resources: Resources | None = None,
    durability: Durability = "none",
    log_dir: Path,
    live: bool = False,
    patience: Patience | None = None,
    tell: Callable[[str], None] = lambda line: None,
    max_restarts: int = 0,
    service_restarts: RestartBudget | None = None,
    checkpoint_seconds: float = 300.0,
    trace: Path | None = None,
) -> JobOutcome:
    """Run ``program`` as a job on the Ray cluster at ``address``; see ``launch``, which takes the same.

    Raises:
        RayError: the cluster cannot be reached, or cannot run the job.
        ModuleNotFoundError: without the extra ``ray``.
    """
    ray = import_ray()
    started = time.monotonic()
    with ExitStack() as stack:
        job_file = JobFile(log_dir, tell, trace=trace)
        recorded = None if trace is None else stack.enter_context(JobTrace(trace, log_dir, job_file.services, tell))
        stack.enter_context(connected(ray, address))
        stack.callback(job_file.ended)
        free_at = [0.0]

        def attempt(number: int) -> JobOutcome:
            if (pause := free_at[0] - time.monotonic()) > 0:
                tell(f"waiting {pause:.0f} s until processes that may still run on a lost node have ended")
                time.sleep(pause)
            if number:
                job_file.all_return()
            job = _Attempt(
                ray, program, workers, servers, experts, resources or {}, durability, checkpoint_seconds,
                job_file, recorded or {},
            )  # fmt: skip
            return job.run(number, log_dir, live, patience, tell, service_restarts or RestartBudget(), free_at)

        return replace(run_attempts(attempt, max_restarts, tell), seconds=time.monotonic() - started)


class _Attempt:
    def __init__(
        self,
        ray: ModuleType,
        program: PythonProgram,
        workers: int,
        servers: int,
        experts: int,
        resources: Resources,
        durability: Durability,
        checkpoint_seconds: float,
        job_file: JobFile,
        recorded: Mapping[str, str],
    ) -> None:
        self._ray = ray
        self._program = program
        self._counts = {"worker": workers, "parameters": servers, "expert": experts}
        self._resources = resources
        self._durability = durability
        self._checkpoint_seconds = checkpoint_seconds
        self._job_file = job_file
        self._recorded = recorded
        self._run_id = uuid.uuid4().hex
        self._stopped: signal.Signals | None = None
        self._begun = False
        self._actors: dict[tuple[str, int], Any] = {}
        self._directories: dict[tuple[str, int], str | None] = {}

    def run(
        self,
        number: int,
        log_dir: Path,
        live: bool,
        patience: Patience | None,
        tell: Callable[[str], None],
        service_restarts: RestartBudget,
        free_at: list[float],
    ) -> JobOutcome:
        workers, servers, experts = (self._counts[role] for role in ("worker", "parameters", "expert"))
        started = time.monotonic()
        everyone: list[RemoteProcess] = []
        running: list[RoleProcess] = []
        services: list[RoleProcess] = []
        with ExitStack() as stack:
            signals = stack.enter_context(collect_signals())
            signals.call_on_stop(self._stop)
            stack.push(_leave_where_stopped)
            screen = stack.enter_context(Screen(log_dir / "worker-0.log", tell, goes_on=number > 0)) if live else None

            say = screen.say if screen else tell
            places = stack.enter_context(ExitStack())  # the last to go: Ray kills what is in a place that it takes back
            stack.callback(self._give_back)
            stack.callback(self._collect_recorded)
            self._place(places)
            self._look_where_storage_is(say)

            def start(spec: ProcessSpec, restarted: int = 0) -> RemoteProcess:
                process = RemoteProcess(
                    spec,
                    restarted,
                    self._actors[spec.role, spec.rank],
                    partial(self._begin, spec),
                    self._get,
                    partial(self._job_file.seen_elsewhere, spec.role, spec.rank),
                )
                everyone.append(process)
                self._job_file.began(spec.role, spec.rank, process.pid, spec.endpoint, elsewhere=True)
                return process

            has_services = bool(servers or experts)
            meeting = self._actors["rendezvous", 0]
            directory = str(self._ask(meeting.hold_endpoint.remote())) if has_services else None
            base = {**os.environ, **self._recorded, "TORCHELASTIC_RUN_ID": self._run_id}
            endpoints: list[str] = []
            if directory is not None:
                endpoints = [
                    self._ask(self._actors["parameters", shard].hold_endpoint.remote()) for shard in range(servers)
                ]
                base = service_environment(endpoints, directory, experts, base=base)
            told = self._ask(meeting.start_rendezvous.remote(directory, {**base, STATUS_VARIABLE: "rendezvous-0"}))
            rendezvous = RemoteProcess(
                ProcessSpec("rendezvous", 0, PROGRAM, base, log_dir / "rendezvous-0.log"),
                0,
                meeting,
                lambda: int(told[0]),
                self._get,
            )
            everyone.append(rendezvous)
            self._ask(meeting.wait_until_ready.remote(), 2 * _CALL_SECONDS)  # an import of torch: followed meanwhile
            for shard, endpoint in enumerate(endpoints):
                state = self._ask(self._actors["parameters", shard].state_folder.remote())
                services.append(
                    start(
                        ProcessSpec(
                            "parameters",
                            shard,
                            self._serve(shard, servers, endpoint, state),
                            base,
                            log_dir / f"parameters-{shard}.log",
                            restarts=None if self._durability == "none" else service_restarts.new(),
                            has_served=lambda: True,
                            endpoint=endpoint,
                        )
                    )
                )
            for index in range(experts):
                env = expert_environment(index, experts, workers, run_id=self._run_id, threads=1, base=base)
                services.append(
                    start(
                        ProcessSpec(
                            "expert",
                            index,
                            self._program,
                            {**env, "TORCHELASTIC_RESTART_COUNT": str(number)},
                            log_dir / f"expert-{index}.log",
                            restarts=service_restarts.new(),
                            has_served=partial(self._is_announced, expert_mark(index)),
                        )
                    )
                )
            for rank in range(workers):
                env = worker_environment(
                    rank,
                    workers,
                    run_id=self._run_id,
                    store_port=told[2],
                    error_file=Path(tempfile.gettempdir(), f"anabranch-{self._run_id}-{rank}.json"),
                    base=base,
                    experts=experts,
                )
                # A rank has its actor, and so its GPU, for itself.
                env |= {
                    "MASTER_ADDR": told[1],
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "GROUP_RANK": str(rank),
                    "GROUP_WORLD_SIZE": str(workers),
                    "TORCHELASTIC_RESTART_COUNT": str(number),
                }
                shown = screen if rank == 0 else None
                running.append(
                    start(ProcessSpec("worker", rank, self._program, env, log_dir / f"worker-{rank}.log", shown))
                )
            if screen:
                screen.started()
            supervisor = Supervisor(
                running,
                signals,
                services=services,
                rendezvous=rendezvous,
                start=start,
                returns=lambda spec: self._job_file.returns(spec.role, spec.rank),
                screen=screen,
                patience=patience,
                tell=say,
            )
            stack.callback(supervisor.kill)
            self._begun = True
            supervisor.run()
        lost = [process.lost_at for process in everyone if process.lost_at is not None]
        free_at[0] = max(lost, default=0.0) + LEASE_SECONDS + 1.0 if lost else 0.0
        if not self._begun:
            assert self._stopped is not None, "or an error was raised"
            tell(f"{self._stopped.name}: stopped before all processes had started")
            return JobOutcome((), self._stopped, timed_out=False, seconds=time.monotonic() - started)
        return JobOutcome(
            exits=tuple(process.exit for process in running),
            interrupted=supervisor.interrupted,
            timed_out=False,
            seconds=time.monotonic() - started,
            services=tuple(process.exit for process in (*services, *filter(lambda lost: lost.early, [rendezvous]))),
        )

    def _stop(self, number: signal.Signals) -> None:
        """Record a received signal; Ray loses exceptions raised while it waits."""
        if self._stopped is None:
            self._stopped = number

    def _check_stopped(self) -> None:
        if self._stopped is not None and not self._begun:
            raise Stopped(self._stopped)

    def _place(self, stack: ExitStack) -> None:
        """Have Ray keep room for all roles, and put an actor into each place."""
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray = self._ray
        gpus = ray.cluster_resources().get("GPU", 0) > 0
        places = [(role, rank) for role, count in self._counts.items() for rank in range(count)]
        names = {"parameters": "server"}
        wants = [resources_of(names.get(role, role), self._resources, gpus=gpus) for role, _ in places]
        bundles = [dict(wanted) for wanted in wants]
        bundles[0]["CPU"] = bundles[0].get("CPU", 0.0) + 0.125  # of the rendezvous, beside worker 0
        group = placement_group(bundles, strategy="SPREAD", name=f"anabranch-{self._run_id}")
        stack.callback(remove_placement_group, group)
        until = time.monotonic() + _PLACE_SECONDS
        while not (placed := group.wait(_LOOK_SECONDS)) and time.monotonic() < until:
            self._check_stopped()
        if not placed:
            raise RayError(
                f"the cluster had no room for the job within {_PLACE_SECONDS:.0f} s: it needs {bundles}, and available "
                f"are {ray.available_resources()}; request less with --resources, or add nodes"
            )
        folder = stack.enter_context(PrivateFolder())
        keys = make_keys(folder / "keys", job=self._run_id)
        files = {path.name: path.read_bytes() for path in keys.values()}
        remote = ray.remote(RoleActor)
        for index, (role, rank) in enumerate([*places, ("rendezvous", 0)]):
            bundle = 0 if role == "rendezvous" else index
            wanted = {"CPU": 0.125} if role == "rendezvous" else wants[index]
            own = {name: files[name] for name in names_of_keys(_KEYS[role], list(files))}
            self._actors[role, rank] = remote.options(
                num_cpus=wanted.get("CPU", 0.0),
                num_gpus=wanted.get("GPU", 0.0),
                resources={name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU")},
                max_restarts=0,
                max_concurrency=8,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            ).remote(own)

    def _look_where_storage_is(self, say: Callable[[str], None]) -> None:
        """Let roles run in the launcher's own folder if their node sees it, else in the shipped copy; reports which."""
        with tempfile.NamedTemporaryFile(prefix=".anabranch-seen-", dir=_writable_here()) as probe:
            asked = {place: actor.sees.remote(probe.name) for place, actor in self._actors.items()}
            seen = {place: bool(self._ask(ref, _PLACE_SECONDS)) for place, ref in asked.items()}
        self._directories = {place: os.getcwd() if there else None for place, there in seen.items()}
        blind = [f"{role} {rank}" for (role, rank), there in seen.items() if not there and role != "rendezvous"]
        if blind:
            say(
                f"{', '.join(blind)} run on nodes without access to {os.getcwd()}, in a copy of it shipped with the "
                "job: files that a script saves there by a relative path are lost; use a path on shared storage"
            )
        if self._durability != "none" and self._counts["parameters"]:
            say(
                f"parameter servers store the state of --durability {self._durability} on their own node's disk, "
                "which other nodes cannot read: it restores a server that dies there, but is lost with the node; then "
                "--max-restarts resumes from the script's own checkpoint"
            )

    def _begin(self, spec: ProcessSpec) -> int:
        actor, place = self._actors[spec.role, spec.rank], (spec.role, spec.rank)
        program = spec.program
        if not program.is_module:
            path = Path(program.target).absolute()
            if path.is_relative_to(Path.cwd()):
                program = replace(program, target=str(path.relative_to(Path.cwd())))
        apart = spec.screen is not None
        environment = {**spec.environment, STATUS_VARIABLE: f"{spec.role}-{spec.rank}"}
        return int(self._get(actor.start.remote(program, environment, self._directories[place], apart)))

    def _serve(self, shard: int, shards: int, endpoint: str, state: str) -> PythonProgram:
        arguments = ["serve", "parameters", "--listen", endpoint, "--shard", str(shard), "--shards", str(shards)]
        arguments += ["--durability", self._durability, "--linger", str(LINGER_SECONDS)]
        if self._durability != "none":
            arguments += ["--checkpoint-dir", state, "--checkpoint-seconds", str(self._checkpoint_seconds)]
        return PythonProgram("anabranch.cli", tuple(arguments), is_module=True)

    def _is_announced(self, uid: str) -> bool:
        try:
            return bool(self._get(self._actors["rendezvous", 0].is_announced.remote(uid), LEASE_SECONDS))
        except RayError:
            return False

    def _ask(self, reference: Any, seconds: float = _CALL_SECONDS) -> Any:
        """Return a call's result while the job is made ready, where a signal ends the wait."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._check_stopped()
            if self._ray.wait([reference], timeout=_LOOK_SECONDS)[0]:
                break
        self._check_stopped()
        return self._get(reference, max(until - time.monotonic(), _LOOK_SECONDS))

    def _get(self, reference: Any, seconds: float = _CALL_SECONDS) -> Any:
        """Return a call's result; a failure is a ``RayError`` that names the cure."""
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=seconds)
        except exceptions.RuntimeEnvSetupError as error:
            raise RayError(
                f"Ray cannot ship {os.getcwd()} to its nodes: {_first_line(error)}; run the command in a small folder"
            ) from None
        except exceptions.GetTimeoutError:
            raise RayError(
                f"a node of the cluster has not answered in {seconds:.0f} s; check `ray status`, the newest files "
                "of Ray's logs there, and that Python's path has no space: Ray cannot start such a process"
            ) from None
        except (exceptions.RayTaskError, exceptions.RayActorError) as error:
            words = str(error)
            if "No module named 'anabranch" in words:
                raise RayError(
                    "a node of the cluster does not have Anabranch: pip install 'anabranch[ray]' of this version on "
                    "all nodes"
                ) from None
            cause = getattr(error, "cause", None)
            raise RayError(str(cause) if isinstance(cause, ValueError) else _first_line(error)) from None

    def _collect_recorded(self) -> None:
        """Bring here what the processes have recorded for the job's trace."""
        if not self._recorded:
            return
        for actor in self._actors.values():
            with suppress(Exception):  # an actor that is lost, and what it recorded with it
                for name, contents in self._get(actor.recorded.remote()).items():
                    Path(self._recorded[TRACE_VARIABLE], name).write_bytes(contents)

    def _give_back(self) -> None:
        for actor in self._actors.values():
            with suppress(Exception):  # an actor that is lost
                self._ray.get(actor.close.remote(), timeout=5.0)
            with suppress(Exception):
                self._ray.kill(actor)


def _leave_where_stopped(
    kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> bool:
    return isinstance(error, Stopped)


def _writable_here() -> str | None:
    return os.getcwd() if os.access(".", os.W_OK) else None


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else repr(error)
