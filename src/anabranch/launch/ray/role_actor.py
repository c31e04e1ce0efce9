"""``RoleActor``: starts a role on a node of the Ray cluster, as its one child process, by the code of one machine.

Runs inside a Ray actor, and is an ordinary class. The launcher *follows* it: each call brings the output since the last
one, read from files. The kernel kills the process when the actor ends, however it does, and Ray ends the actors of a
launcher that has gone and of a node that it has lost.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from anabranch.launch.environment import LISTEN_VARIABLE
from anabranch.launch.job_status import process_state
from anabranch.launch.meeting.addresses import held_port
from anabranch.launch.meeting.rendezvous import Rendezvous
from anabranch.launch.supervision.orphans import adopt_orphans, kill_orphans
from anabranch.launch.supervision.worker import ProcessSpec, RoleProcess
from anabranch.record.process import TRACE_VARIABLE
from anabranch.transport.certificates import KEYS_VARIABLE
from anabranch.transport.endpoints import PrivateFolder

_MOST_BYTES = 1 << 20
_ANSWER_SECONDS = 1.0
_LOOK_SECONDS = 0.05
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
        self._shown = f"[{host}]" if ":" in host else host
        self._folder = self._stack.enter_context(PrivateFolder())
        for name, contents in keys.items():
            with os.fdopen(os.open(self._folder / name, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(contents)
        self._stack.enter_context(adopt_orphans())
        # The kernel ties a process to the thread that has started it: this one lives as long.
        self._starter = self._stack.enter_context(ThreadPoolExecutor(1, "anabranch-role"))
        self._lock = threading.Lock()  # of the end of the process, which two calls may see
        self._output: list[int] = []  # its files: one, or stdout and stderr apart
        self._places: list[int] = []  # what was read of each
        self._status = b""
        self._process: RoleProcess | None = None
        self._rendezvous: Rendezvous | None = None

    def hold_endpoint(self) -> str:
        """Return a TCP endpoint of this node that is given to nobody else."""
        return f"tcp://{self._shown}:{self._stack.enter_context(held_port(self._host))}"

    def make_rendezvous(self, directory: str | None) -> tuple[str, int]:
        """Return where the store will listen, once the rendezvous process is started."""
        keys = self._folder if directory else None
        self._rendezvous = self._stack.enter_context(Rendezvous(directory, keys, self._host))
        return self._host, self._rendezvous.port

    def wait_until_ready(self) -> None:
        """Return when the directory of this actor answers, or will not."""
        assert self._rendezvous is not None, "made"
        self._rendezvous.wait_until_ready()

    def state_folder(self) -> str:
        """Return a folder that lives as long as the actor."""
        return str(self._folder / "state")

    def start(self, spec: ProcessSpec, restarted: int, probe: str, apart: bool) -> tuple[int, bool]:
        """Start a role, and return its process id, and whether it runs in the launcher's folder: this node sees it.

        Args:
            spec: the role, with the launcher's folder.
            restarted: how often it was started before.
            probe: a file of the launcher in that folder.
            apart: keep stdout and stderr apart.

        Raises:
            ValueError: the program is not on this node, or cannot be started.
        """
        program, directory = spec.program, spec.cwd if Path(probe).exists() else None
        if not program.is_module and not Path(directory or ".", program.target).exists():
            raise ValueError(
                f"node {self._host} has no {program.target!r}; keep the script below the folder in which the command "
                "is run, which is copied to the nodes, or on shared storage"
            )
        log = self._folder / f"{spec.role}-{spec.rank}.log"
        for path in [log, log.with_suffix(".errors")][len(self._output) : 1 + apart]:
            self._output.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
            self._places.append(0)
        output = SimpleNamespace(stdout=self._output[0], stderr=self._output[-1])
        with open(os.devnull, "rb") as nothing:
            stdin = self._rendezvous.descriptor if self._rendezvous is not None else nothing.fileno()
            env = self._environment(spec.environment)
            here = replace(spec, environment=env, log=log, screen=output, stdin=stdin, cwd=directory)
            try:
                self._process = self._starter.submit(RoleProcess, here, restarted).result(_END_SECONDS)
            except OSError as error:
                raise ValueError(f"node {self._host} cannot start {program.target!r}: {error}") from None
        if self._rendezvous is not None:
            self._rendezvous.started()
        return self._process.pid, directory is not None

    def follow(self) -> RoleEvents:
        """Return the news since the last call; waits a moment for some."""
        process, until = self._process, time.monotonic() + _ANSWER_SECONDS
        assert process is not None, "started"
        while True:
            code = self._reap(_LOOK_SECONDS)  # what it wrote before that is in the files by now
            output = self._new_output()
            if output or code is not None or time.monotonic() > until:
                break
        stopped = code is None and process_state(process.pid) == "stopped"
        return RoleEvents(output, code, self._new_status(process), time.monotonic(), stopped)

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
        self._reap(_END_SECONDS)
        for descriptor in self._output:
            os.close(descriptor)
        self._stack.close()

    def _reap(self, seconds: float) -> int | None:
        """Return the exit code of a process that ends within this time, of which nothing is left then."""
        with self._lock:
            process = self._process
            if process is None:
                return None
            if process.running and select.select([process.pidfd], [], [], seconds)[0]:
                process.reap()
                kill_orphans(f"TORCHELASTIC_RUN_ID={process.spec.environment['TORCHELASTIC_RUN_ID']}", {process.pid})
            return process.exit_code

    def _new_output(self) -> list[tuple[int, bytes]]:
        news: list[tuple[int, bytes]] = []
        for number in reversed(range(len(self._output))):  # what came before on stdout is in the file then
            if data := os.pread(self._output[number], _MOST_BYTES, self._places[number]):
                self._places[number] += len(data)
                news.insert(0, (number + 1, data))
        return news

    def _new_status(self, process: RoleProcess) -> bytes:
        with suppress(OSError):  # there is none yet
            text = process.log.with_suffix(".status").read_bytes()
            if text != self._status:
                self._status = text
                return text
        return b""

    def _environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        own = {name: os.environ[name] for name in _OF_THE_NODE if name in os.environ}
        job = {name: value for name, value in environment.items() if name not in _OF_THE_NODE}
        env = {**os.environ, **job, **own, KEYS_VARIABLE: str(self._folder), LISTEN_VARIABLE: f"tcp://{self._shown}:0"}
        if TRACE_VARIABLE in env:
            env[TRACE_VARIABLE] = str(self._folder)
        if "GLOO_SOCKET_IFNAME" not in env and (interface := _interface_of(self._host)):
            env["GLOO_SOCKET_IFNAME"] = interface
        return env


def _interface_of(host: str) -> str | None:
    """Return the network interface that has the address ``host``."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(sock, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == host:
                    return name
    return None
