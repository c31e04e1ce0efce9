"""A role on a node of the Ray cluster: the actor there starts its process, and the launcher follows that.

``RoleActor`` runs inside a Ray actor, and is an ordinary class: the role is its one child process, started by the code
of one machine. ``RemoteProcess`` is the launcher's side. It *follows* the actor: each call brings the output since the
last one, read from files. The kernel kills the process when the actor ends, however it does, and Ray ends the actors of
a launcher that has gone and of a node that it has lost.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anabranch.job import JOINED_VARIABLE, LISTEN_VARIABLE
from anabranch.launch.job_status import ahead
from anabranch.launch.meeting.addresses import held_port
from anabranch.launch.supervision.orphans import adopt_orphans, kill_orphans
from anabranch.launch.supervision.worker import ProcessSpec, RoleProcess, open_log, write_all
from anabranch.liveness.membership import MEMBERS_VARIABLE, files_beside, for_workers, put_beside
from anabranch.record.process import TRACE_VARIABLE, process_state, replace_text
from anabranch.transport.certificates import KEYS_VARIABLE
from anabranch.transport.endpoints import PrivateFolder

_MOST_BYTES = 1 << 20
_NEWS_SECONDS = 1.0  # for which an actor waits for some
_PUBLISHED_SECONDS = 0.25  # the same, of a worker, which is to see soon what the launcher publishes
_LOST_SECONDS = 20.0  # after which an actor that does not answer is lost
_STOPPED_SECONDS = 1.0  # what a call takes longer than it may where the launcher stood still
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
        published: what the process has published for the launcher, see ``liveness/membership.py``.
        status: the process's status, see ``record/process.py``; empty if it has not changed.
        now: the time of the node's monotonic clock, to which times in the status refer.
        stopped: the process is frozen.
    """

    output: list[tuple[int, bytes]]
    code: int | None
    status: bytes = b""
    now: float = 0.0
    stopped: bool = False
    published: Mapping[str, bytes] = field(default_factory=dict)


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
        self._output = self._open("stdout"), self._open("stderr")
        self._places = [0, 0]  # what was read of each
        self._status = b""
        self._process: RoleProcess | None = None
        self._members: Path | None = None
        self._seen: Mapping[str, bytes] = {}  # what the launcher has published
        self._published = set[str]()  # names

    def _open(self, name: str) -> int:
        descriptor = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._stack.callback(os.close, descriptor)
        return descriptor

    def place(self) -> tuple[str, str]:
        """Return a TCP endpoint of this node that is given to nobody else, and a folder that lives as long."""
        port = self._stack.enter_context(held_port(self._host))
        return f"tcp://{self._shown}:{port}", str(self._folder / "state")

    def start(self, spec: ProcessSpec, restarted: int, probe: str, files: Mapping[str, bytes]) -> tuple[int, bool]:
        """Start a role; return its process id, and whether it runs in the launcher's folder: this node sees it.

        Args:
            spec: the role, with the launcher's folder.
            restarted: how often it was started before.
            probe: a file of the launcher in that folder.
            files: what the launcher has published.

        Raises:
            ValueError: the program is not on this node, or cannot be started.
        """
        program, directory = spec.program, spec.cwd if Path(probe).exists() else None
        if not program.is_module and not Path(directory or ".", program.target).exists():
            raise ValueError(
                f"node {self._host} has no {program.target!r}; keep the script below the folder in which the command "
                "is run, which is copied to the nodes, or on shared storage"
            )
        with open(os.devnull, "rb") as nothing:
            env = self._environment(spec.environment)
            log = self._folder / f"{spec.role}-{spec.rank}.log"
            here = replace(spec, environment=env, log=log, screen=self._output, stdin=nothing.fileno(), cwd=directory)
            if MEMBERS_VARIABLE in env:
                self._members = Path(env[MEMBERS_VARIABLE])
                self._seen = files_beside(self._members)  # its predecessor's
                self._see(files)
            try:
                self._process = self._starter.submit(RoleProcess, here, restarted).result(_END_SECONDS)
            except OSError as error:
                raise ValueError(f"node {self._host} cannot start {program.target!r}: {error}") from None
        return self._process.pid, directory is not None

    def follow(self, files: Mapping[str, bytes]) -> RoleEvents:
        """Let the process see what the launcher has published; return the news since the last call, once some come."""
        self._see(files)
        process = self._process
        assert process is not None, "started"
        # One that is frozen sees nothing, and is looked at twice, the longer time apart.
        soon = self._members is not None and not process.frozen
        until = time.monotonic() + (_PUBLISHED_SECONDS if soon else _NEWS_SECONDS)
        while True:
            code = self._reap(_LOOK_SECONDS)  # what it wrote before that is in the files by now
            output = self._new_output()
            there = {} if self._members is None else files_beside(self._members)
            published = {what: contents for what, contents in there.items() if self._seen.get(what) != contents}
            if output or code is not None or published.keys() != self._published or time.monotonic() > until:
                break
        self._published = set(published)
        stopped, status = code is None and process_state(process.pid) == "stopped", b""
        with suppress(OSError):  # there is none yet
            text = process.log.with_suffix(".status").read_bytes()
            status, self._status = b"" if text == self._status else text, text
        return RoleEvents(output, code, status, time.monotonic(), stopped, published)

    def _see(self, files: Mapping[str, bytes]) -> None:
        if self._members is not None:
            put_beside(self._members, self._seen, files)
            self._seen = files

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send ``number`` to the process, a frozen one being woken to see it; or to all that it has started, too."""
        if self._process is not None:
            send = self._process.signal_group if group else self._process.signal
            send(signal.Signals(number))

    def close(self) -> dict[str, bytes]:
        """Kill what runs here, and give everything back; return what was recorded for a trace, by the file's name."""
        self.signal(signal.SIGKILL)
        self._reap(_END_SECONDS)
        recorded = {path.name: path.read_bytes() for path in self._folder.glob("*.spans")}
        self._stack.close()
        return recorded

    def _reap(self, seconds: float) -> int | None:
        """Return the exit code of a process that ends within this time, of which nothing is left then."""
        with self._lock:
            process = self._process
            if process is None:
                return None
            if process.running and select.select([process.pidfd], [], [], seconds)[0]:
                process.reap()
                kill_orphans(f"TORCHELASTIC_RUN_ID={process.spec.environment['TORCHELASTIC_RUN_ID']}", {process.pid})
            return None if process.running else process.code

    def _new_output(self) -> list[tuple[int, bytes]]:
        news: list[tuple[int, bytes]] = []
        for number in (1, 0):  # what came before on stdout is in the file then
            if data := os.pread(self._output[number], _MOST_BYTES, self._places[number]):
                self._places[number] += len(data)
                news.insert(0, (number + 1, data))
        return news

    def _environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        own = {name: os.environ[name] for name in _OF_THE_NODE if name in os.environ}
        job = {name: value for name, value in environment.items() if name not in _OF_THE_NODE}
        env = {**os.environ, **job, **own, KEYS_VARIABLE: str(self._folder), LISTEN_VARIABLE: f"tcp://{self._shown}:0"}
        if TRACE_VARIABLE in env:
            env[TRACE_VARIABLE] = str(self._folder)
        if MEMBERS_VARIABLE in env:
            env[MEMBERS_VARIABLE] = str(self._folder / Path(env[MEMBERS_VARIABLE]).name)
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


_publishing = threading.Lock()


def published_for(spec: ProcessSpec) -> Mapping[str, bytes]:
    """Return what the launcher has published for a process."""
    members = spec.environment.get(MEMBERS_VARIABLE)
    return for_workers(Path(members), joins=JOINED_VARIABLE in spec.environment) if members else {}


class RemoteProcess(RoleProcess):
    """A process in an actor; a thread follows the actor, writes what comes to the log and the screen, and sees the end.

    Args:
        spec: what was started.
        restarted: how often that was started before.
        actor: the Ray actor; its methods have ``remote``.
        pid: the process there; 0 before it is started.
        fetch: waits for a call's result, as ``ray.get`` does; raises when the actor is lost.
        begin: starts it once Ray has placed the actor, and returns ``pid``; 0 if its argument says before that it is
            not needed any more.

    Attributes:
        lost: whether the actor is lost.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        restarted: int,
        actor: Any,
        pid: int,
        fetch: Callable[[Any, float], Any],
        begin: Callable[[Callable[[], bool]], int] | None = None,
    ) -> None:
        self._actor = actor
        self._fetch = fetch
        self._begin = begin
        self._describe(spec, restarted)
        self.lost = False
        self._code = -signal.SIGKILL
        self.pid = pid
        self._looks_stopped = 0  # in a row, a second or more apart
        self._published: Mapping[str, bytes] = {}
        self._facts: dict[str, Any] = {}
        self._reported: dict[str, Any] = {}
        self._report("running")
        self.pidfd, self._end = os.pipe()
        with open_log(self.log, anew=not spec.screen and not restarted) as log:
            self._targets = [os.dup(descriptor) for descriptor in spec.screen or (log.fileno(),) * 2]
        self._follower = threading.Thread(target=self._follow, name=f"anabranch-{self.role}-{self.rank}", daemon=True)
        self._follower.start()

    @property
    def frozen(self) -> bool:
        """True if the actor, which was awake, has seen it stopped twice."""
        return self._looks_stopped > 1

    def signal(self, number: signal.Signals) -> None:
        """Send ``number``; does nothing if the actor is lost. One that has not begun does not begin."""
        if self.running:
            self.stopped = True
            self._send(number)

    def signal_group(self, number: int) -> None:
        """Stop, continue or kill it."""
        if self.running:
            self._send(number, group=True)

    def _send(self, number: int, *, group: bool = False) -> None:
        if not self.pid:
            return
        with suppress(Exception):  # Ray's errors are many, and the follower sees the loss
            self._actor.signal.remote(int(number), group=group)

    def reap(self) -> None:
        """Take the exit code of a process that has ended."""
        self._follower.join(_LOST_SECONDS)
        self._has_ended(self._code)
        if self.lost and self.role != "worker":  # its place is gone with it
            self.spec = replace(self.spec, restarts=None)

    def abandon(self) -> None:
        """Count a process whose node does not answer as killed."""
        self.lost = True
        super().abandon()

    def _has_ended(self, code: int) -> None:
        super()._has_ended(code)
        self.node_lost = self.lost and not self.stopped
        self._report("gone")

    def _follow(self) -> None:
        try:
            if self._begin is not None:
                self.pid = self._begin(lambda: self.stopped)
                if not self.pid:
                    self._code = 0
                    return
                if self.stopped:  # meanwhile
                    self._send(signal.SIGTERM)
            while True:
                news = self._news()
                if news.published != self._published:
                    with _publishing:
                        put_beside(Path(self.spec.environment[MEMBERS_VARIABLE]), self._published, news.published)
                    self._published = news.published
                if news.status:
                    self._facts = ahead(json.loads(news.status), time.monotonic() - news.now)
                self._looks_stopped = self._looks_stopped + 1 if news.stopped else 0
                self._report("stopped" if news.stopped else "running")
                for stream, data in news.output:
                    with suppress(OSError):
                        write_all(self._targets[stream - 1], data)
                if news.code is not None and not news.output:
                    self._code = news.code
                    return
        except Exception as error:  # noqa: BLE001  of Ray, whose errors are many: the actor is lost
            self.lost = True
            why = [*str(error).strip().splitlines(), repr(error)][0]
            what = "the Ray node of" if self.pid else "no Ray node for"
            with suppress(OSError):
                line = f"anabranch: {what} {self.role} {self.rank}{' was lost' * bool(self.pid)}: {why}\n"
                write_all(self._targets[1], line.encode())
        finally:
            if MEMBERS_VARIABLE in self.spec.environment and self._code and not self.stopped:
                # What the others had published by then is on its way: that a first step is done, who has closed.
                time.sleep(2 * _PUBLISHED_SECONDS)
            for descriptor in (*self._targets, self._end):
                os.close(descriptor)

    def _news(self) -> RoleEvents:
        """Return what came since the last call; asks again if this process was stopped (Ctrl-Z) in between."""
        began = time.monotonic()
        news: RoleEvents
        try:
            news = self._fetch(self._actor.follow.remote(published_for(self.spec)), _LOST_SECONDS)
        except Exception:
            if time.monotonic() - began < _LOST_SECONDS + _STOPPED_SECONDS:
                raise
            news = self._fetch(self._actor.follow.remote(published_for(self.spec)), _LOST_SECONDS)
        return news

    def _report(self, state: str) -> None:
        """Write what has changed of the process's status for ``anabranch status``, in times of this machine's clock."""
        facts = {**self._facts, "pid": self.pid, "elsewhere": state if self.running else "gone"}
        if facts != self._reported:
            self._reported = facts
            with suppress(OSError):  # a full disk, a folder that was removed
                replace_text(self.log.with_suffix(".status"), json.dumps(facts) + "\n")
