"""Two "hosts" on this machine, each with its own network, and a cable between them; needs root.

A host is a network namespace, and is there as long as a process in it: one that reads a pipe of ours to its end, and
those that a test starts. So nothing is left of it, however the test ends.

Run as a program, this file moves to a host and becomes what its arguments say, see ``start_on``.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from anabranch.launch.forks.fork_server import run_as_main
from anabranch.launch.python_program import PythonProgram as Runnable
from anabranch.tensors import TensorSpec
from programs import Program, start

_SECONDS = 30.0
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Host:
    """A host: its address, and the process that keeps it."""

    address: str
    pid: int


@dataclass(frozen=True, slots=True)
class Cable:
    """The connection between the hosts."""

    commands: IO[str]
    answers: IO[str]

    def cut(self, seconds: float) -> None:
        """Drop all packets for so long, from now on; neither side is notified."""
        print(seconds, file=self.commands, flush=True)
        assert self.answers.readline() == "cut\n"

    def swallowed(self) -> int:
        """Wait until a cut is over, and return how many packets it has swallowed."""
        return int(self.answers.readline())


def seeded_linear() -> dict[str, object]:
    """Return the same module on each host, for ``anabranch serve experts --module``."""
    torch.manual_seed(3)
    return {"module": torch.nn.Linear(8, 8), "args_schema": [TensorSpec(8)]}


def why_not() -> str | None:
    """Return the reason why two hosts are impossible here; ``None`` if they are possible."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {' and '.join(missing)}"
    if not Path("/dev/net/tun").exists():
        return "the cable between the namespaces needs /dev/net/tun"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=_SECONDS)
    return f"there are no network namespaces here: {tried.stderr.strip()}" if tried.returncode else None


@contextmanager
def two_hosts(*, delay: float = 0.0, bits_per_second: float = 1e9) -> Iterator[tuple[Host, Host, Cable]]:
    """Yield two hosts and the cable: a packet takes ``delay`` seconds in each direction."""
    with ExitStack() as stack:
        relay = [sys.executable, str(Path(__file__).with_name("relay.py")), str(delay), str(bits_per_second)]
        cable = Cable(*_pipes(stack, relay)[1:])
        devices = [cable.answers.readline().strip() for _ in range(2)]
        hosts = [Host(f"10.213.77.{number}", _new_host(stack)) for number in (1, 2)]
        for host, device in zip(hosts, devices, strict=True):
            _ip("link", "set", device, "netns", str(host.pid))
            there = ["nsenter", "--target", str(host.pid), "--net"]
            _ip("address", "add", f"{host.address}/24", "dev", device, there=there)
            for up in ("lo", device):
                _ip("link", "set", up, "up", there=there)
        yield hosts[0], hosts[1], cable


def start_on(host: Host, *words: object, environment: Mapping[str, str] | None = None, stderr: int = 2) -> Program:
    """Start a Python file or, behind ``-m``, a module with its arguments on a host."""
    return start(Path(__file__), host.pid, *words, environment=environment, stderr=stderr)


def _new_host(stack: ExitStack) -> int:
    pid, _, answers = _pipes(stack, ["unshare", "--net", "sh", "-c", "echo up; exec cat"])
    assert answers.readline() == "up\n"
    return pid


def _ip(*words: str, there: Sequence[str] = ()) -> None:
    subprocess.run([*there, "ip", *words], check=True, timeout=_SECONDS, capture_output=True)


def _pipes(stack: ExitStack, words: Sequence[str]) -> tuple[int, IO[str], IO[str]]:
    """Start a program that ends with its stdin; return its process id, its stdin and its stdout."""
    process = stack.enter_context(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    assert process.stdin is not None
    assert process.stdout is not None
    stack.callback(process.kill)
    return process.pid, process.stdin, process.stdout


def _move_to(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as network:
        if libc.setns(network.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot move to the network of process {pid}")


if __name__ == "__main__":
    _move_to(int(sys.argv[1]))
    module = sys.argv[2] == "-m"
    target, *arguments = sys.argv[2 + module :]
    run_as_main(Runnable(target, tuple(arguments), is_module=module))
