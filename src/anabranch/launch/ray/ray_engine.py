"""A job on a Ray cluster: each role in its own actor, watched as those of one machine are.

::

    launcher ── Supervisor, the local engine's ── RemoteProcess ──follow──> RoleActor (Ray's) ── the role's process
                                                                                on the node that Ray has chosen

The launcher decides the memberships, as on one machine. What it and the workers publish for one another are files on
each host, see ``liveness/membership.py``: the actors carry them over.

Ray places and connects; data moves over our transport, under certificates made for each attempt, and over
``torch.distributed``. A process of an earlier attempt that lives on where Ray has lost its node has the certificates of
another job, and is let in nowhere.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from anabranch.errors import AnabranchError
from anabranch.job import JOINED_VARIABLE
from anabranch.launch.job import Attempt, Site, run_job
from anabranch.launch.meeting.addresses import tcp_place
from anabranch.launch.meeting.rendezvous import rendezvous
from anabranch.launch.ray.role_actor import RemoteProcess, RoleActor, published_for
from anabranch.launch.spec import JobSpec, Resources
from anabranch.launch.supervision.outcome import JobOutcome
from anabranch.launch.supervision.signals import collect_signals
from anabranch.launch.supervision.worker import ProcessSpec, RoleProcess
from anabranch.record.process import TRACE_VARIABLE
from anabranch.transport import make_keys
from anabranch.transport.endpoints import PrivateFolder

_VERSION = "2.60.0"
_ANSWER_SECONDS = 5.0
_CPU = {"worker": 0.5, "server": 0.25, "expert": 0.25}
_NOT_SHIPPED = (".git", ".venv*", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", "node_modules")
_PLACE_SECONDS = 120.0
_CALL_SECONDS = 60.0
_END_SECONDS = 5.0
_LOOK_SECONDS = 0.5  # between two checks for a signal
# The role that a certificate names, by the job's.
_KEYS = {"parameters": "parameters", "expert": "experts", "worker": "worker"}


def launch_on_ray(
    spec: JobSpec, tell: Callable[[str], None] = lambda line: None, *, address: str | None = None
) -> JobOutcome:
    """Run a job on the Ray cluster at ``address``; see ``launch``.

    Raises:
        RayError: the cluster cannot be reached, or cannot run the job.
        ModuleNotFoundError: without the extra ``ray``.
    """
    with collect_signals():
        ray = import_ray()
        with connected(ray, address):
            return run_job(spec, partial(_on_cluster, ray), tell)


@contextmanager
def _on_cluster(ray: ModuleType, attempt: Attempt) -> Iterator[Site]:
    """Have Ray place an actor for each role; at the end they are given back."""
    site = _Site(ray, attempt)
    with ExitStack() as stack:
        site.meet(stack)
        attempt.raises = False  # Ray loses exceptions raised while it waits
        places = stack.enter_context(ExitStack())  # the last to go: Ray kills what is in a place that it takes back
        stack.callback(site.give_back)
        site.place(places)
        yield site


class _Site(Site):
    """Actors on the nodes of a cluster, by role and rank."""

    meeting = None
    keys = None  # each actor has its own
    directory: str | None = None
    parameters: Sequence[str] = ()

    def __init__(self, ray: ModuleType, attempt: Attempt) -> None:
        self._ray = ray
        self._attempt = attempt
        self._actors: dict[tuple[str, int], Any] = {}
        self._processes: dict[tuple[str, int], RemoteProcess] = {}
        self._blind = False  # it was said that a node does not see the launcher's folder

    def place(self, stack: ExitStack) -> None:
        """Have Ray keep room for all roles, and put an actor into each place."""
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, spec = self._ray, self._attempt.spec
        self._gpus = ray.cluster_resources().get("GPU", 0) > 0
        places = [(role, rank) for role, count in spec.counts.items() for rank in range(count)]
        bundles = [self._resources_of(role) for role, _ in places]
        group = placement_group(bundles, strategy="SPREAD", name=f"anabranch-{self._attempt.run_id}")
        stack.callback(remove_placement_group, group)
        until = time.monotonic() + _PLACE_SECONDS
        while not (placed := group.wait(_LOOK_SECONDS)) and time.monotonic() < until:
            self._attempt.check()
        if not placed:
            raise RayError(
                f"the cluster had no room within {_PLACE_SECONDS:.0f} s: the job needs {bundles}, and there are "
                f"{ray.available_resources()}; request less with --resources, or add nodes"
            )
        self._places: dict[tuple[str, int], Any] = {
            place: PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            for index, place in enumerate(places)
        }
        for role, rank in self._places:
            self._make_actor(role, rank)
        if spec.durability != "none" and spec.servers:
            self._attempt.tell(
                f"parameter servers store the state of --durability {spec.durability} on their own node's disk: it is "
                "lost with the node; then --max-restarts resumes from the script's own checkpoint"
            )
        calls = [self._actors["parameters", shard].place.remote() for shard in range(spec.servers)]
        self._folders: dict[str, str] = dict(map(self._ask, calls))
        self.parameters = [*self._folders]

    def _resources_of(self, role: str) -> dict[str, float]:
        return resources_of(role, self._attempt.spec.resources, gpus=self._gpus)

    def _make_actor(self, role: str, rank: int) -> None:
        """Let Ray place an actor."""
        resources = self._resources_of(role)
        own = {name: self._files[name] for name in ("authority.pem", f"{_KEYS[role]}.pem")}
        placed = self._ray.remote(RoleActor).options(
            num_cpus=resources.get("CPU", 0.0),
            num_gpus=resources.get("GPU", 0.0),
            resources={name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")},
            max_restarts=0,
            max_concurrency=8,
            scheduling_strategy=self._places.get((role, rank), "SPREAD"),
        )
        self._actors[role, rank] = placed.remote(own)

    def meet(self, stack: ExitStack) -> None:
        """Make the job's certificates, and start the rendezvous process, which is lost with the launcher alone."""
        from ray.util import get_node_ip_address

        attempt, folder = self._attempt, stack.enter_context(PrivateFolder())
        keys = make_keys(folder / "keys", job=attempt.run_id)
        self._files = {path.name: path.read_bytes() for path in keys.values()}
        host = str(get_node_ip_address())  # type: ignore[no-untyped-call, unused-ignore]
        if attempt.spec.has_services:
            self.directory = stack.enter_context(tcp_place(host, 0, folder / "keys")).directory
        running = rendezvous(attempt, RoleProcess, self.directory, folder / "keys", host)
        self.rendezvous, port = stack.enter_context(running)
        self.master, self.members = (host, port), folder / f"members-{port}"

    def state(self, shard: int) -> str:
        """Return a folder on the node of a parameter server."""
        return self._folders[self.parameters[shard]]

    def expert_listens(self, index: int) -> None:
        """Return nothing: an expert listens on any port of its node."""

    def start(self, spec: ProcessSpec, restarted: int) -> RemoteProcess:
        """Start a role in its actor, or in Ray's next one; one that joins the others, when there is room for it."""
        place = spec.role, spec.rank
        before = self._processes.get(place)
        if before is not None and before.lost:
            with suppress(Exception):
                self._ray.kill(self._actors.pop(place))  # it may live where Ray has lost its node
        if place not in self._actors:
            self._make_actor(*place)
        actor, begin = self._actors[place], partial(self._begin, self._actors[place], spec, restarted)
        if JOINED_VARIABLE in spec.environment:
            process = RemoteProcess(spec, restarted, actor, 0, self._get, partial(self._begin_in_time, actor, begin))
        else:
            process = RemoteProcess(spec, restarted, actor, begin(), self._get)
        self._processes[place] = process
        return process

    def _begin_in_time(self, actor: Any, begin: Callable[[], int], stopped: Callable[[], bool]) -> int:
        there = [actor.__ray_ready__.remote()]
        while not self._ray.wait(there, timeout=_LOOK_SECONDS)[0]:
            if stopped():
                return 0
        return begin()

    def _begin(self, actor: Any, spec: ProcessSpec, restarted: int) -> int:
        program = spec.program
        if not program.is_module and (path := Path(program.target).absolute()).is_relative_to(Path.cwd()):
            program = replace(program, target=str(path.relative_to(Path.cwd())))
        there = replace(spec, program=program, screen=None, restarts=None, cwd=os.getcwd())
        here = os.getcwd() if os.access(".", os.W_OK) else None
        with tempfile.NamedTemporaryFile(prefix=".anabranch-seen-", dir=here) as probe:
            start = actor.start.remote(there, restarted, probe.name, published_for(spec))
            pid, sees = self._ask(start)
        if not sees and not self._blind:
            self._blind = True
            self._attempt.tell(
                f"{spec.role} {spec.rank}, and maybe others, runs on a node that does not see {os.getcwd()}, in a copy "
                "of it: files that a script saves there by a relative path are lost; use shared storage"
            )
        self._attempt.job_file.began(spec.role, spec.rank, pid, spec.endpoint, elsewhere=True)
        return int(pid)

    def _ask(self, reference: Any, seconds: float = _CALL_SECONDS) -> Any:
        """Return a call's result while the job is made ready, where a signal ends the wait."""
        until = time.monotonic() + seconds
        while not self._ray.wait([reference], timeout=_LOOK_SECONDS)[0] and time.monotonic() < until:
            self._attempt.check()
        self._attempt.check()
        return self._get(reference, _LOOK_SECONDS, waited=seconds)

    def _get(self, reference: Any, seconds: float, waited: float = 0.0) -> Any:
        """Return a call's result; a failure is a ``RayError`` that names the cure."""
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=seconds)
        except exceptions.RuntimeEnvSetupError as error:
            text = f"Ray cannot ship {os.getcwd()} to its nodes: {_last_line(error)}; run the command in a small folder"
        except exceptions.GetTimeoutError:
            text = (
                f"a node of the cluster has not answered in {waited or seconds:.0f} s; check `ray status`, the newest "
                "files of Ray's logs there, and that Python's path has no space: Ray cannot start such a process"
            )
        except (exceptions.RayTaskError, exceptions.RayActorError) as error:
            cause = getattr(error, "cause", None)
            text = str(cause) if isinstance(cause, ValueError) else _last_line(error)
            if "No module named 'anabranch" in str(error):
                text = (
                    "a node of the cluster does not have Anabranch: pip install 'anabranch[ray]' of this version there"
                )
        raise RayError(text)

    def give_back(self) -> None:
        """End the actors, and with them their processes; bring here what these have recorded for the job's trace."""
        folder = self._attempt.base.get(TRACE_VARIABLE)
        ends = [(actor, actor.close.remote()) for actor in self._actors.values()]
        until = time.monotonic() + (_CALL_SECONDS if folder else _END_SECONDS)
        for actor, end in ends:
            with suppress(Exception):  # an actor that is lost, and what it recorded with it; one never placed
                recorded = self._ray.get(end, timeout=max(0.0, until - time.monotonic()))
                if folder is not None:
                    for name, contents in recorded.items():
                        Path(folder, name).write_bytes(contents)
            with suppress(Exception):
                self._ray.kill(actor)


def _last_line(error: BaseException) -> str:
    return [repr(error), *filter(str.strip, str(error).splitlines())][-1].strip()


# --- the connection to a cluster, its errors in one sentence each, and the resources that a role requests there


class RayError(AnabranchError):
    """The cluster cannot run the job; the message names the cure."""


def import_ray() -> ModuleType:
    """Return the module ``ray``.

    Raises:
        ModuleNotFoundError: it is not installed.
        RayError: it is another version.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ModuleNotFoundError("--engine ray needs Ray: pip install 'anabranch[ray]'", name="ray") from None
    if ray.__version__ != _VERSION:
        raise RayError(
            f"Ray {ray.__version__} is installed here, but this version of Anabranch needs {_VERSION}: "
            f"pip install 'ray=={_VERSION}', on all nodes"
        )
    module: ModuleType = ray
    return module


@contextmanager
def connected(ray: ModuleType, address: str | None) -> Iterator[None]:
    """Be connected to the cluster at ``address``, to which the current directory is shipped.

    An existing connection is used, with the files it ships, and is kept open.

    Raises:
        RayError: nothing answers there, or it is another version of Ray.
    """
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or None
    _check_answers(address)
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"working_dir": os.getcwd(), "excludes": list(_NOT_SHIPPED)},
        )
    except Exception as error:  # noqa: BLE001  Ray's are of many kinds
        raise RayError(
            f"no Ray cluster can be used at {address or 'this machine'}: {' '.join(str(error).split())[:300]}; check "
            f"that `ray status` answers, that all nodes have this version, pip install 'ray=={_VERSION}', and the same "
            "Python, and give --address HOST:6379 of the head node"
        ) from None
    # Ray prints events of its nodes on stdout, which is rank 0's; the pinned version has this switch.
    shown, ray._private.worker._worker_logs_enabled = ray._private.worker._worker_logs_enabled, False
    try:
        yield
    finally:
        ray.shutdown()
        ray._private.worker._worker_logs_enabled = shown


def _check_answers(address: str | None) -> None:
    if address is None or address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise RayError(
            f"--address {address!r} is not HOST:PORT of a head node, such as 10.0.0.1:6379, as `ray start --head` "
            "shows it; Ray Client and job addresses cannot place a job's roles"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise RayError(
            f"nothing answers at {address} ({error}); start the head node there with `ray start --head --port {port}`"
        ) from None


def parse_resources(text: str) -> Resources:
    """Return the parsed ``--resources``.

    >>> parse_resources('{"worker": {"CPU": 2, "GPU": 1}}')
    {'worker': {'CPU': 2, 'GPU': 1}}

    Raises:
        ValueError: other text.
    """
    try:
        return check_resources(json.loads(text))
    except json.JSONDecodeError:
        return check_resources(text)


def check_resources(resources: Any) -> Resources:
    """Return valid resources of roles; raise a ``ValueError`` for others."""
    with suppress(AttributeError, TypeError):
        amounts = [amount for of_role in resources.values() for amount in of_role.values()]
        if resources.keys() <= _CPU.keys() and all(amount >= 0 for amount in amounts):
            return dict(resources)
    raise ValueError(
        f'resources give amounts per role, such as {{"worker": {{"CPU": 2, "GPU": 1}}}}; roles are '
        f"{', '.join(_CPU)}; got {resources!r}"
    )


def resources_of(role: str, resources: Resources, *, gpus: bool) -> dict[str, float]:
    """Return what one process of ``role`` requests: fractions of a CPU, so that small jobs fit small nodes.

    >>> resources_of("worker", {}, gpus=True)
    {'CPU': 0.5, 'GPU': 1.0}
    """
    role = "server" if role == "parameters" else role
    own = {"CPU": _CPU[role], **({"GPU": 1.0} if gpus and role == "worker" else {}), **resources.get(role, {})}
    return {name: float(amount) for name, amount in own.items() if amount}
