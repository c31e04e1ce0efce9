"""A job on this machine.

::

    launcher ── fork server         has imported everything; the roles are forked from it, see fork_server.py
        └── rendezvous, parameters, experts, workers

``meeting.addresses`` says where the services listen. All are plain processes where they cannot be forked, see
``forks/launcher_side.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from anabranch.launch.forks.launcher_side import ForkServer, ForkServerError, why_no_fork_server, why_not_forked
from anabranch.launch.job import Attempt, Site, run_job
from anabranch.launch.meeting.addresses import private_place, tcp_place
from anabranch.launch.meeting.rendezvous import rendezvous
from anabranch.launch.spec import JobSpec
from anabranch.launch.supervision.orphans import adopt_orphans, kill_orphans
from anabranch.launch.supervision.outcome import JobOutcome
from anabranch.launch.supervision.signals import collect_signals
from anabranch.launch.supervision.worker import ProcessSpec, RoleProcess
from anabranch.transport.certificates import KEYS_VARIABLE
from anabranch.transport.endpoints import PrivateFolder


def launch(
    spec: JobSpec, tell: Callable[[str], None] = lambda line: None, *, server: ForkServer | None = None
) -> JobOutcome:
    """Run a job on this machine, and wait for the end of its last process.

    Parameter servers and expert processes are stopped when the last worker has ended. An expert process that dies after
    it has served is restarted, as often as ``service_restarts`` allows; then the job continues without it. A parameter
    server that dies is restarted if ``durability`` lets it come back, and fails the job otherwise. A job that fails is
    restarted as a whole, ``max_restarts`` times.

    Args:
        spec: the job.
        tell: called with each line that a user should see at once.
        server: forks the processes; by default one of the job's own.

    Raises:
        ValueError: a host that is not an address of this machine, or a trace that cannot be written.
        OSError: this machine does not reach itself.
    """
    with ExitStack() as stack:
        stack.enter_context(collect_signals())
        if spec.spawn or why_no_fork_server(spec.base):
            server = None
        elif server is None:  # imports while the rest is made ready
            server = stack.enter_context(ForkServer(spec.base))
        return run_job(spec, partial(_here, server), tell)


@contextmanager
def _here(server: ForkServer | None, attempt: Attempt) -> Iterator[Site]:
    """Start the rendezvous process; at the end no process of the attempt is left."""
    with ExitStack() as stack:
        yield _Site(server, attempt, stack)


class _Site(Site):
    """The rendezvous process, and what is forked by ``server`` or started beside it, until the stack is left."""

    def __init__(self, server: ForkServer | None, attempt: Attempt, stack: ExitStack) -> None:
        spec = attempt.spec
        self._attempt = attempt
        self._server = server
        self._scratch = stack.enter_context(PrivateFolder())
        keys = attempt.base.get(KEYS_VARIABLE) or None
        self._place = stack.enter_context(
            private_place(spec.servers) if spec.host is None else tcp_place(spec.host, spec.servers, keys)
        )
        self.directory = spec.directory or (self._place.directory if spec.has_services else None)
        self.parameters = self._place.parameters
        self.keys = self._place.keys if self.directory is not None else None
        sessions = self._sessions = set[int]()
        stack.enter_context(adopt_orphans())
        stack.callback(lambda: kill_orphans(f"TORCHELASTIC_RUN_ID={attempt.run_id}", sessions))
        own = None if spec.directory is not None else self.directory
        self.rendezvous, port = stack.enter_context(rendezvous(attempt, self.start, own, self._place.keys))
        self.master = ("127.0.0.1", port)
        self.meeting = self.members = self._scratch / f"meeting-{port}"

    def state(self, shard: int) -> str:
        return str(self._scratch / "parameters")

    def expert_listens(self, index: int) -> str:
        return self._place.expert(index)

    def start(self, spec: ProcessSpec, restarted: int) -> RoleProcess:
        process = self._forked(spec, restarted) or RoleProcess(spec, restarted)
        self._sessions.add(process.pid)
        self._attempt.job_file.began(process.role, process.rank, process.pid, spec.endpoint)
        return process

    def _forked(self, spec: ProcessSpec, restarted: int) -> RoleProcess | None:
        if self._server is None or why_not_forked(spec.program, spec.environment, self._server.environment):
            return None
        try:
            return RoleProcess(spec, restarted, self._server)
        except ForkServerError as error:  # it may also have died since it forked this service's predecessor
            self._attempt.tell(f"starting a plain process, which takes longer: {error}")
            self._server = self._server if self._server.running else None
            return None
