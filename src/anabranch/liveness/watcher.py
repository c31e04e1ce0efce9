"""A small process beside each worker that beats for it to the workers of other hosts, and hears them.

A worker that holds the interpreter's lock, while it unpickles a large list for instance, runs no thread of its own. So
another process says that it lives, as the kernel sees it, and remembers who else does, in memory that both have::

    worker ── Watcher ──> process ══ datagrams, every half heartbeat ══ process <── Watcher ── worker of another host
       └───── reads when each was heard last ─────┘

The process beats while its worker is neither stopped nor gone, and ends with it; one that is killed is started again as
its worker next waits. It starts in milliseconds, as it is this file, run by its path, and needs the standard library
alone. Datagrams need no connection: where a firewall lets none through nobody is heard, and nobody is lost by that.
While its worker is stopped, as by Ctrl-Z, or itself was, or did not run for long, the others are forgiven their
silence.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

# When, and how many seconds lie between two beats; the first is of this process itself. Native: written in one move.
_HEARD = struct.Struct("dd")
_BEAT = struct.Struct("=d")  # these seconds; the name of the worker follows
_ENDED = -1.0  # in their place
_STARTING = 2.5  # before the process of a busy host has started
_MOST = 1 << 16
_MOST_AT_ONCE = 1 << 12  # beats that are heard before its own is due
_ANYWHERE = "192.0.2.1"  # an address that nobody has; the way there is that to other hosts
_LONGEST = 0.5
_END_SECONDS = 5.0
_LAST_BEATS = 3  # one may be lost on its way


@functools.lru_cache(maxsize=1)
def own_socket(pid: int) -> tuple[socket.socket, str] | None:
    """Return the socket for beats to process ``pid``, the caller, and its address for others; ``None`` without network.

    The address is the one from which the caller reaches ``MASTER_ADDR``, or other hosts where a script has met in
    another way. On that host itself it may be of no use to others, where the host's name stands for 127.0.1.1: they
    answer to the source of what they hear.
    """
    master = os.environ.get("MASTER_ADDR", _ANYWHERE)
    with suppress(OSError):
        family, _, _, _, there = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # sends nothing
            here = str(probe.getsockname()[0])
        beats = socket.socket(family, socket.SOCK_DGRAM)
        by_name = here.startswith("127.") and master not in ("localhost", here)
        beats.bind(("" if by_name else here, 0))
        return beats, f"{here}:{beats.getsockname()[1]}"
    return None


class Watcher:
    """The worker's side.

    Args:
        name: the worker's, among those of the job.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._memory = open(os.memfd_create("anabranch-beats"), "r+b")  # noqa: SIM115 - closed by `close`
        self._memory.truncate(_MOST * _HEARD.size)
        self._heard = mmap.mmap(self._memory.fileno(), _MOST * _HEARD.size)
        self._slots: dict[str, int] = {}
        self._every = math.inf
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, others: Mapping[str, str], heartbeat: float) -> None:
        """Beat to these, too, by name and address, and at least every ``heartbeat``."""
        every, own = min(self._every, heartbeat / 2, _LONGEST), own_socket(os.getpid())
        if own is None or (every == self._every and others.keys() <= self._slots.keys()):
            return
        self._end_process()
        self._every = every
        for name in others:
            self._slots.setdefault(name, len(self._slots) + 1)
        _send(own[0], _STARTING, self._name, map(_address, others.values()))
        self._others = {one: (self._slots[one], where) for one, where in others.items()}
        self._beats = own[0].fileno()
        self._start()

    def _start(self) -> None:
        end, beats, memory = os.pidfd_open(os.getpid()), self._beats, self._memory.fileno()
        table = {"worker": os.getpid(), "name": self._name, "every": self._every, "others": self._others}
        table |= {"end": end, "socket": beats, "memory": memory}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[memory, beats, end],
            process_group=0,  # who kills the worker's does not kill it, too: it says that the worker has ended
        )
        os.close(end)
        with suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(table).encode() + b"\n")
            self._process.stdin.close()

    def silence(self, name: str, heartbeat: float) -> tuple[float, float]:
        """Return for how many seconds one has been silent (0: never heard; inf: ended), and for how many it may be."""
        if self._process is not None and self._process.poll() is not None:
            self._start()  # it was killed
        looked, _ = _HEARD.unpack_from(self._heard)
        when, every = _HEARD.unpack_from(self._heard, self._slots.get(name, 0) * _HEARD.size)
        silent = math.inf if every == _ENDED else looked - when if when else 0.0
        return silent, 2 * max(heartbeat, 2 * every)

    def close(self) -> None:
        """End the process, for good."""
        self._end_process()
        self._memory.close()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            self._process = None


def main() -> None:
    """Beat for the worker that stdin names, and hear the others, until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the worker decides when it ends
        signal.signal(number, signal.SIG_IGN)
    table = json.loads(sys.stdin.readline())  # not to the end, which a process forked meanwhile may hold open
    worker, name, every, end = table["worker"], table["name"], table["every"], table["end"]
    beats, heard = socket.socket(fileno=table["socket"]), mmap.mmap(table["memory"], _MOST * _HEARD.size)
    beats.setblocking(False)
    slots = {name.encode(): slot for name, (slot, _) in table["others"].items()}
    where = {name.encode(): _address(text) for name, (_, text) in table["others"].items()}

    def forgive(now: float) -> None:
        for slot in slots.values():
            when, theirs = _HEARD.unpack_from(heard, slot * _HEARD.size)
            if when:
                _HEARD.pack_into(heard, slot * _HEARD.size, now, theirs)

    poller = select.poll()
    for descriptor in (beats.fileno(), end):
        poller.register(descriptor, select.POLLIN)
    last, due = -math.inf, time.monotonic()
    while True:
        ready = {descriptor for descriptor, _ in poller.poll(max(0.0, due - time.monotonic()) * 1000)}
        now = time.monotonic()
        if now - last > 2 * every:
            forgive(now)
        last = now
        with suppress(OSError):  # nothing more is there, or what was sent has come back
            for _ in range(_MOST_AT_ONCE):
                data, source = beats.recvfrom(1 << 12)
                if (other := data[_BEAT.size :]) in slots:
                    where[other] = source
                    _HEARD.pack_into(heard, slots[other] * _HEARD.size, now, *_BEAT.unpack_from(data))
        if end in ready:
            break
        if now >= due:
            due = now + every
            with suppress(OSError), open(f"/proc/{worker}/stat") as file:  # it may be gone by now
                if file.read().rpartition(")")[2].split()[0] in "Tt":
                    forgive(now)
                else:
                    _send(beats, every, name, where.values())
            _HEARD.pack_into(heard, 0, now, every)
    for _ in range(_LAST_BEATS):
        _send(beats, _ENDED, name, where.values())


def _send(beats: socket.socket, seconds: float, name: str, addresses: Iterable[tuple[str, int]]) -> None:
    for address in addresses:
        with suppress(OSError):
            beats.sendto(_BEAT.pack(seconds) + name.encode(), address)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


if __name__ == "__main__":
    main()
