"""Networks for tests: one inside the process, and one that loses, delays and repeats what skips another.

Faults are drawn from a seed, one draw a request, so a run can be repeated. A lost request is a connection cut: before
the request is delivered, or after it was, when its answer comes; a repeated one is delivered again on a second
connection. That is what a network under TCP can do to a request, and nothing else is.
"""

from __future__ import annotations

import random
import select
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from anabranch.transport import Listener, MemoryTransport, Stream, Transport
from anabranch.transport.frame import frame_size

_PATIENCE = 5.0


class LossyTransport:
    """A network that fails on demand; see ``anabranch.transport.Transport``.

    >>> from anabranch.transport import Client, Deadline, Request, Server, Verb
    >>> network = MemoryTransport()
    >>> seen = []
    >>> def handler(call):
    ...     seen.append(call.identity)
    ...     call.reply()
    >>> count = Verb("count", handler, once=True)
    >>> lossy = LossyTransport(drop=0.3, duplicate=0.3, seed=1, transport=network)
    >>> client = Client(transport=lossy, retries=50)
    >>> with Server([count], transport=network) as server, client:
    ...     for _ in range(20):
    ...         request = Request(server.endpoint, "count", once=True)
    ...         _ = client.call(request, Deadline.after(30.0))
    >>> len(seen), lossy.dropped > 0, lossy.duplicated > 0
    (20, True, True)

    Args:
        drop: probability that a request's connection is cut, half of the times before the request is delivered, half of
            the times after.
        delay: the most seconds that a request waits before it is sent, drawn evenly from 0; below two heartbeats, or
            the client treats the server as lost.
        duplicate: probability that a request is delivered twice.
        bandwidth: bytes a second and connection, each way; ``None`` for no bound.
        seed: of all draws.
        transport: the network below; its own ``MemoryTransport`` by default.

    Raises:
        ValueError: a probability outside [0, 1], a negative delay, a bandwidth that is not above 0.
    """

    def __init__(
        self,
        drop: float = 0.0,
        delay: float = 0.0,
        duplicate: float = 0.0,
        bandwidth: float | None = None,
        seed: int = 0,
        *,
        transport: Transport | None = None,
    ) -> None:
        for name, value in (("drop", drop), ("duplicate", duplicate)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is a probability, got {value!r}")
        if delay < 0 or (bandwidth is not None and bandwidth <= 0):
            raise ValueError(f"delay is at least 0 and bandwidth above 0, got {delay!r} and {bandwidth!r}")
        self.drop = drop
        self.delay = delay
        self.duplicate = duplicate
        self.bandwidth = bandwidth
        self.dropped = 0
        self.duplicated = 0
        self._inner: Transport = transport if transport is not None else MemoryTransport()
        self._random = random.Random(seed)  # noqa: S311 - draws must repeat
        self._lock = threading.Lock()

    def listen(self, endpoint: str | None) -> Listener:
        """Listen on the network below; only what connects through this one meets its faults."""
        return self._inner.listen(endpoint)

    def connect(self, endpoint: str) -> Stream:
        """Connect over the network below."""
        return _LossyStream(self, endpoint)

    def _draw(self) -> tuple[float, float, bool]:
        with self._lock:
            fate, wait, twice = self._random.random(), self._random.random(), self._random.random()
            self.dropped += fate < self.drop
            self.duplicated += twice < self.duplicate
        return fate, wait * self.delay, twice < self.duplicate


class _LossyStream:
    """A stream whose requests meet a fate each: sent after received begins a new one."""

    def __init__(self, network: LossyTransport, endpoint: str) -> None:
        self._network = network
        self._endpoint = endpoint
        self._inner = network._inner.connect(endpoint)
        self._twins: list[Stream] = []
        self._sent = bytearray()
        self._greeting = b""
        self._sending = False
        self._answer_lost = self._twice = False
        self.descriptor, self.peer, self.ready_at = self._inner.descriptor, self._inner.peer, 0.0

    def handshake(self) -> bool:
        done = self._inner.handshake()
        self.peer = self._inner.peer
        return done

    def wants_write(self) -> bool:
        return self._inner.wants_write()

    def send(self, buffers: Sequence[memoryview]) -> int:
        if not self._sending:
            self._begin()
        if time.monotonic() < self.ready_at:
            return 0
        taken = self._inner.send(self._trim(buffers))
        left = taken
        for buffer in buffers:
            self._sent += buffer[:left]
            left -= min(left, len(buffer))
        self._pay(taken)
        return taken

    def receive_into(self, buffer: memoryview) -> int:
        if time.monotonic() < self.ready_at:
            return 0
        if self._twice and self._sending and self._whole():
            self._twice = False
            self._repeat()
        count = self._inner.receive_into(self._trim([buffer])[0])
        if count:
            self._sending = False
            if self._answer_lost:
                raise ConnectionResetError("the network lost the answer")
            self._pay(count)
        return count

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()
        self._close_twins()

    def finish(self) -> None:
        self._inner.finish()

    def _begin(self) -> None:
        self._close_twins()
        self._whole()
        self._sending = True
        self._sent.clear()
        fate, wait, self._twice = self._network._draw()
        self._answer_lost = self._network.drop / 2 <= fate < self._network.drop
        self.ready_at = time.monotonic() + wait
        if fate < self._network.drop / 2:
            raise ConnectionResetError("the network lost the request")

    def _trim(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        """As much as passes in 5 ms."""
        if self._network.bandwidth is None:
            return buffers
        return [buffers[0][: max(1, int(self._network.bandwidth * 0.005))]]

    def _pay(self, count: int) -> None:
        if self._network.bandwidth is not None and count:
            self.ready_at = max(time.monotonic(), self.ready_at) + count / self._network.bandwidth

    def _whole(self) -> bool:
        """Return True if the request has been sent to its end."""
        if not self._greeting and frame_size(self._sent) is not None:
            self._greeting = bytes(self._sent[: frame_size(self._sent)])
            del self._sent[: len(self._greeting)]
        size = frame_size(self._sent)
        return size is not None and len(self._sent) >= size

    def _repeat(self) -> None:
        """Deliver the request once more, behind the greeting that opened this connection."""
        twin = self._network._inner.connect(self._endpoint)
        self._twins.append(twin)
        rest = memoryview(self._greeting + bytes(self._sent))
        until = time.monotonic() + _PATIENCE
        poller = select.poll()
        poller.register(twin.descriptor, select.POLLOUT)
        with suppress(OSError):
            while not twin.handshake() and time.monotonic() < until:
                poller.poll(10)
            while rest and time.monotonic() < until:
                rest = rest[twin.send([rest]) :]
                poller.poll(10)

    def _close_twins(self) -> None:
        for twin in self._twins:
            twin.close()
        self._twins.clear()
