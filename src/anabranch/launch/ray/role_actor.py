"""``RoleActor``: starts a role on a node of the Ray cluster, as a process, like the launcher on one machine.

Runs inside a Ray actor, and is an ordinary class. The launcher *follows* it: each call brings the output since the last
one, and renews the actor's lease. An actor that is not followed kills its process when the lease is over: Ray may have
given up a node that lives on, and the launcher starts a successor no sooner than that.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from anabranch.launch.job_status import process_state
from anabranch.launch.meeting.addresses import held_port
from anabranch.launch.meeting.rendezvous import PROGRAM, Rendezvous
from anabranch.launch.python_program import PythonProgram
from anabranch.launch.supervision import parent_death
from anabranch.launch.supervision.orphans import adopt_orphans, kill_orphans
from anabranch.record.process import STATUS_VARIABLE, TRACE_VARIABLE
from anabranch.transport.network.certificates import KEYS_VARIABLE
from anabranch.transport.private_folder import PrivateFolder

__all__ = ["LEASE_SECONDS", "RoleActor", "RoleEvents", "names_of_keys"]

LEASE_SECONDS = 20.0
"""Seconds after which an actor that nobody follows kills its process."""

_MOST_BYTES = 1 << 20
_CHUNK = 1 << 16
_ANSWER_SECONDS = 1.0
_START_SECONDS = 60.0  # of a process that is started again, not its imports
# What describes the machine that a process runs on, and not the job.
_OF_THE_NODE = (
    *("PATH", "HOME", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES", "HOSTNAME"),
    *("PWD", "SHELL", "USER", "OMP_NUM_THREADS"),
)


@dataclass(frozen=True, slots=True)
class RoleEvents:
    """Events in an actor since the last request.

    Attributes:
        output: pieces of output, each with its stream (1 or 2).
        code: the exit code of a process that has ended.
        told: the process's status, see ``record/process.py``; empty if it has not changed.
        now: the time of the node's monotonic clock, to which times that are told refer.
        stopped: the process is frozen.
    """

    output: list[tuple[int, bytes]]
    code: int | None
    told: bytes = b""
    now: float = 0.0
    stopped: bool = False


class RoleActor:
    """The Ray actor of one role.

    Args:
        keys: the files of the role's certificates, by name.
        host: the node's address; by default the one that Ray knows it by.
    """

    def __init__(self, keys: Mapping[str, bytes], host: str | None = None) -> None:
        if host is None:
            from ray.util import get_node_ip_address

            host = str(get_node_ip_address())  # type: ignore[no-untyped-call]
        self._stack = ExitStack()
        self._host = host
        self._folder = self._stack.enter_context(PrivateFolder())
        for name, contents in keys.items():
            with os.fdopen(os.open(self._folder / name, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(contents)
        self._stack.enter_context(adopt_orphans())
        self._changed = threading.Condition()
        self._output: list[tuple[int, bytes]] = []
        self._bytes = 0
        self._code: int | None = None
        self._told = b""
        self._stem = self._folder / "role"
        self._running: subprocess.Popen[bytes] | None = None
        self._living: threading.Thread | None = None
        self._mark = ""
        self._rendezvous: Rendezvous | None = None
        self._followed = time.monotonic()
        self._closing = threading.Event()
        self._lease = threading.Thread(target=self._watch_lease, name="anabranch-lease", daemon=True)
        self._lease.start()

    def hold_endpoint(self) -> str:
        """Return a TCP endpoint of this node that is given to nobody else."""
        shown = f"[{self._host}]" if ":" in self._host else self._host
        return f"tcp://{shown}:{self._stack.enter_context(held_port(self._host))}"

    def sees(self, probe: str) -> bool:
        """Return True if a file of the launcher also exists here."""
        return Path(probe).exists()

    def start_rendezvous(self, directory: str | None, environment: Mapping[str, str]) -> tuple[int, str, int]:
        """Start the store and the directory; return the process id, and where the store will listen."""
        keys = self._folder if directory else None
        self._rendezvous = self._stack.enter_context(Rendezvous(directory, keys, self._host))
        pid = self._begin(PROGRAM, environment, None, self._rendezvous.descriptor, False)
        self._rendezvous.started()
        return pid, self._host, self._rendezvous.port

    def wait_until_ready(self) -> None:
        """Return when the directory of this actor answers, or will not; follow the actor meanwhile."""
        assert self._rendezvous is not None, "started"
        self._rendezvous.wait_until_ready()

    def is_announced(self, uid: str) -> bool:
        """Tell whether somebody serves ``uid``, by the directory of this actor."""
        return self._rendezvous is not None and self._rendezvous.is_announced(uid)

    def start(self, program: PythonProgram, environment: Mapping[str, str], directory: str | None, apart: bool) -> int:
        """Start ``program`` in ``directory`` and return its process id.

        ``apart``: keep stdout and stderr apart.

        Raises:
            ValueError: the program is not on this node.
        """
        if not program.is_module and not Path(directory or ".", program.target).exists():
            raise ValueError(
                f"node {self._host} has no {program.target!r}; keep the script below the folder in which the command "
                "is run, which is copied to the nodes, or on shared storage"
            )
        return self._begin(program, environment, directory, None, apart)

    def state_folder(self) -> str:
        """Return a folder that lives as long as the actor."""
        return str(self._folder / "state")

    def follow(self) -> RoleEvents:
        """Return the news since the last call; waits a moment for some."""
        with self._changed:
            self._followed = time.monotonic()
            self._changed.wait_for(lambda: self._output or self._code is not None, _ANSWER_SECONDS)
            output, self._output, self._bytes = self._output, [], 0
            self._changed.notify_all()
            running = self._running
            stopped = running is not None and process_state(running.pid) == "stopped"
            return RoleEvents(output, self._code, self._newly_told(), time.monotonic(), stopped)

    def recorded(self) -> dict[str, bytes]:
        """Return the files that the processes of this actor have recorded for a trace, by name."""
        return {path.name: path.read_bytes() for path in self._folder.glob("*.spans")}

    def _newly_told(self) -> bytes:
        with suppress(OSError):  # it has told nothing yet
            text = Path(f"{self._stem}.status").read_bytes()
            if text != self._told:
                self._told = text
                return text
        return b""

    def signal(self, number: int) -> None:
        """Send ``number`` to the process; a frozen one is woken to see it, unless this is to freeze it."""
        running = self._running
        if running is not None and running.poll() is None:
            running.send_signal(number)
            if number != signal.SIGSTOP:
                running.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill what runs here, and give everything back."""
        self.signal(signal.SIGKILL)
        if self._living is not None:
            self._living.join(LEASE_SECONDS)
        if self._mark:
            kill_orphans(self._mark, ())
        self._closing.set()
        self._lease.join(LEASE_SECONDS)
        self._stack.close()

    def _begin(
        self,
        program: PythonProgram,
        environment: Mapping[str, str],
        directory: str | None,
        stdin: int | None,
        apart: bool,
    ) -> int:
        own = {name: os.environ[name] for name in _OF_THE_NODE if name in os.environ}
        job = {name: value for name, value in environment.items() if name not in _OF_THE_NODE}
        env = {**os.environ, **job, **own, KEYS_VARIABLE: str(self._folder)}
        self._stem = self._folder / env.get(STATUS_VARIABLE, "role")
        env[STATUS_VARIABLE] = str(self._stem)
        if TRACE_VARIABLE in env:
            env[TRACE_VARIABLE] = str(self._folder)
        if "GLOO_SOCKET_IFNAME" not in env and (interface := _interface_of(self._host)):
            env["GLOO_SOCKET_IFNAME"] = interface
        self._mark = f"TORCHELASTIC_RUN_ID={env['TORCHELASTIC_RUN_ID']}"
        started = threading.Event()
        failed: list[OSError] = []
        self._code, self._running, self._followed = None, None, time.monotonic()
        command = [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), *program.command]

        def live() -> None:
            # The kernel ties the process to the thread that has started it: this one lives as long.
            try:
                process = subprocess.Popen(
                    command,
                    env=env,
                    cwd=directory,
                    stdin=subprocess.DEVNULL if stdin is None else stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE if apart else subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                failed.append(error)
                started.set()
                return
            pipes = [(1, process.stdout), *([(2, process.stderr)] if apart else [])]
            readers = tuple(
                threading.Thread(target=self._read, args=(stream, pipe.fileno()), daemon=True)
                for stream, pipe in pipes
                if pipe is not None
            )
            for reader in readers:
                reader.start()
            self._running = process
            started.set()
            while process.poll() is None:  # as long as it is followed
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=LEASE_SECONDS)
            code = process.returncode
            kill_orphans(self._mark, {process.pid})
            for reader in readers:
                reader.join(LEASE_SECONDS)
            for _, pipe in pipes:
                if pipe is not None:
                    pipe.close()
            with self._changed:
                self._code = code
                self._changed.notify_all()

        self._living = threading.Thread(target=live, name="anabranch-role", daemon=True)
        self._living.start()
        started.wait(_START_SECONDS)
        if failed:
            raise ValueError(f"node {self._host} cannot start {program.target!r}: {failed[0]}")
        running = self._running
        assert running is not None, "started"
        return running.pid

    def _read(self, stream: int, descriptor: int) -> None:
        while data := os.read(descriptor, _CHUNK):
            with self._changed:
                self._changed.wait_for(lambda: self._bytes < _MOST_BYTES, LEASE_SECONDS)
                self._output.append((stream, data))
                self._bytes += len(data)
                self._changed.notify_all()

    def _watch_lease(self) -> None:
        while True:
            left = self._followed + LEASE_SECONDS - time.monotonic()
            if left <= 0:
                self.signal(signal.SIGKILL)
                left = LEASE_SECONDS
            if self._closing.wait(left):
                return


def _interface_of(host: str) -> str | None:
    """Return the network interface that has the address ``host``."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(sock, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(found[20:24]) == host:
                return name
    return None


def names_of_keys(role: str, files: Sequence[str]) -> list[str]:
    """Return the certificates that a role needs: its own and the authority's."""
    return [name for name in files if name in ("authority.pem", f"{role}.pem")]
