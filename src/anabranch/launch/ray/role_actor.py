"""``RoleActor``: starts a role on a node of the Ray cluster, as its one child process, by the code of one machine.

Runs inside a Ray actor, and is an ordinary class. The launcher *follows* it: each call brings the output since the last
one. The kernel kills the process when the actor ends, however it does, and Ray ends the actors of a launcher that has
gone and of a node that it has lost.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from anabranch.launch.job_status import process_state
from anabranch.launch.meeting.addresses import held_port
from anabranch.launch.meeting.rendezvous import Rendezvous
from anabranch.launch.supervision.orphans import adopt_orphans, kill_orphans
from anabranch.launch.supervision.worker import ProcessSpec, RoleProcess
from anabranch.record.process import TRACE_VARIABLE
from anabranch.transport.certificates import KEYS_VARIABLE
from anabranch.transport.private_folder import PrivateFolder

__all__ = ["RoleActor", "RoleEvents", "names_of_keys"]

_MOST_BYTES = 1 << 20
_CHUNK = 1 << 16
_ANSWER_SECONDS = 1.0
_END_SECONDS = 20.0
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
        status: the process's status, see ``record/process.py``; empty if it has not changed.
        now: the time of the node's monotonic clock, to which times in the status refer.
        stopped: the process is frozen.
    """

    output: list[tuple[int, bytes]]
    code: int | None
    status: bytes = b""
    now: float = 0.0
    stopped: bool = False


class _Pipes:
    """The output of a process, to be read here; stdout and stderr are one unless they are to be kept apart."""

    def __init__(self, apart: bool) -> None:
        out, self.stdout = os.pipe()
        err, self.stderr = os.pipe() if apart else (None, self.stdout)
        self.sources = {1: out} if err is None else {1: out, 2: err}

    def started(self) -> None:
        """Close the process's ends here."""
        for descriptor in {self.stdout, self.stderr}:
            os.close(descriptor)


class RoleActor:
    """The Ray actor of one role.

    Args:
        keys: the files of the role's certificates, by name.
        host: the node's address; by default the one that Ray knows it by.
    """

    def __init__(self, keys: Mapping[str, bytes], host: str | None = None) -> None:
        if host is None:
            from ray.util import get_node_ip_address

            host = str(get_node_ip_address())  # type: ignore[no-untyped-call, unused-ignore]
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
        self._status = b""
        self._process: RoleProcess | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._rendezvous: Rendezvous | None = None

    def hold_endpoint(self) -> str:
        """Return a TCP endpoint of this node that is given to nobody else."""
        shown = f"[{self._host}]" if ":" in self._host else self._host
        return f"tcp://{shown}:{self._stack.enter_context(held_port(self._host))}"

    def sees(self, probe: str) -> bool:
        """Return True if a file of the launcher also exists here."""
        return Path(probe).exists()

    def make_rendezvous(self, directory: str | None) -> tuple[str, int]:
        """Return where the store will listen, once the rendezvous process is started."""
        self._rendezvous = self._stack.enter_context(
            Rendezvous(directory, self._folder if directory else None, self._host)
        )
        return self._host, self._rendezvous.port

    def wait_until_ready(self) -> None:
        """Return when the directory of this actor answers, or will not."""
        assert self._rendezvous is not None, "made"
        self._rendezvous.wait_until_ready()

    def is_announced(self, uid: str) -> bool:
        """Tell whether somebody serves ``uid``, by the directory of this actor."""
        return self._rendezvous is not None and self._rendezvous.is_announced(uid)

    def state_folder(self) -> str:
        """Return a folder that lives as long as the actor."""
        return str(self._folder / "state")

    def start(self, spec: ProcessSpec, restarted: int, directory: str | None, apart: bool) -> int:
        """Start a role in ``directory`` and return its process id.

        ``apart``: keep stdout and stderr apart.

        Raises:
            ValueError: the program is not on this node.
        """
        program = spec.program
        if not program.is_module and not Path(directory or ".", program.target).exists():
            raise ValueError(
                f"node {self._host} has no {program.target!r}; keep the script below the folder in which the command "
                "is run, which is copied to the nodes, or on shared storage"
            )
        stdin = None if spec.role != "rendezvous" or self._rendezvous is None else self._rendezvous.descriptor
        log = self._folder / f"{spec.role}-{spec.rank}.log"
        here = replace(spec, environment=self._environment(spec.environment), log=log, stdin=stdin, cwd=directory)
        started = threading.Event()
        self._code, self._process, self._error = None, None, None
        # The kernel ties the process to the thread that has started it: this one lives as long.
        self._thread = threading.Thread(
            target=self._live, args=(here, restarted, _Pipes(apart), started), name="anabranch-role", daemon=True
        )
        self._thread.start()
        started.wait(_END_SECONDS)
        if self._process is None:
            raise ValueError(f"node {self._host} cannot start {program.target!r}: {self._error}")
        if stdin is not None and self._rendezvous is not None:
            self._rendezvous.started()
        return self._process.pid

    def follow(self) -> RoleEvents:
        """Return the news since the last call; waits a moment for some."""
        with self._changed:
            self._changed.wait_for(lambda: self._output or self._code is not None, _ANSWER_SECONDS)
            output, self._output, self._bytes = self._output, [], 0
            self._changed.notify_all()
            process = self._process
            stopped = process is not None and process.running and process_state(process.pid) == "stopped"
            return RoleEvents(output, self._code, self._new_status(), time.monotonic(), stopped)

    def recorded(self) -> dict[str, bytes]:
        """Return the files that the processes of this actor have recorded for a trace, by name."""
        return {path.name: path.read_bytes() for path in self._folder.glob("*.spans")}

    def signal(self, number: int) -> None:
        """Send ``number`` to the process; a frozen one is woken to see it."""
        if self._process is not None:
            self._process.signal(signal.Signals(number))

    def signal_group(self, number: int) -> None:
        """Stop or continue the process, and those that it has started."""
        if self._process is not None:
            self._process.signal_group(number)

    def close(self) -> None:
        """Kill what runs here, and give everything back."""
        self.signal(signal.SIGKILL)
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
        self._stack.close()

    def _new_status(self) -> bytes:
        if self._process is not None:
            with suppress(OSError):  # there is none yet
                text = self._process.log.with_suffix(".status").read_bytes()
                if text != self._status:
                    self._status = text
                    return text
        return b""

    def _environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        own = {name: os.environ[name] for name in _OF_THE_NODE if name in os.environ}
        job = {name: value for name, value in environment.items() if name not in _OF_THE_NODE}
        env = {**os.environ, **job, **own, KEYS_VARIABLE: str(self._folder)}
        if TRACE_VARIABLE in env:
            env[TRACE_VARIABLE] = str(self._folder)
        if "GLOO_SOCKET_IFNAME" not in env and (interface := _interface_of(self._host)):
            env["GLOO_SOCKET_IFNAME"] = interface
        return env

    def _live(self, spec: ProcessSpec, restarted: int, pipes: _Pipes, started: threading.Event) -> None:
        try:
            with open(os.devnull, "rb") as nothing:
                stdin = nothing.fileno() if spec.stdin is None else spec.stdin
                process = RoleProcess(replace(spec, screen=pipes, stdin=stdin), restarted)
        except OSError as error:
            self._error = error
            started.set()
            return
        finally:
            pipes.started()
        readers = [threading.Thread(target=self._read, args=source, daemon=True) for source in pipes.sources.items()]
        for reader in readers:
            reader.start()
        self._process = process
        started.set()
        select.select([process.pidfd], [], [])
        process.reap()
        kill_orphans(f"TORCHELASTIC_RUN_ID={spec.environment['TORCHELASTIC_RUN_ID']}", {process.pid})
        for reader in readers:
            reader.join(_END_SECONDS)
        with self._changed:
            self._code = process.exit_code
            self._changed.notify_all()

    def _read(self, stream: int, descriptor: int) -> None:
        with open(descriptor, "rb", buffering=0) as source:
            while data := source.read(_CHUNK):
                with self._changed:
                    self._changed.wait_for(lambda: self._bytes < _MOST_BYTES, _END_SECONDS)
                    self._output.append((stream, data))
                    self._bytes += len(data)
                    self._changed.notify_all()


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
