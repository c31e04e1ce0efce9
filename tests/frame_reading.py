"""Frames as a peer sends and reads them that is no client and no server."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from anabranch.transport import RequestHeader, Server
from anabranch.transport.frame import Header, Hello, Wire, allocate, encode


def join(buffers: Iterable[memoryview]) -> bytes:
    return b"".join(buffers)


GREETING = join(encode(Hello()))


def request(verb: str, target: str = "", sequence: int = 0, tensors: Sequence[Tensor] = ()) -> bytes:
    """The bytes of a request, for a minute."""
    return join(encode(RequestHeader(verb, target, sequence=sequence, seconds=60.0), tensors))


@contextmanager
def peer(server: Server, said: bytes = GREETING) -> Iterator[socket.socket]:
    """A socket connected to a server on a Unix socket, which has sent this first."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(server.endpoint.removeprefix("unix:"))
        sock.sendall(said)
        yield sock


class Frame(NamedTuple):
    header: Header
    tensors: Sequence[Tensor]


class Bytes:
    """A stream of bytes that are there already, handed out at most ``step`` at a time."""

    def __init__(self, data: bytes, step: int = 1 << 30) -> None:
        self._data = memoryview(data)
        self._step = step

    def receive_into(self, buffer: memoryview) -> int:
        count = min(len(buffer), len(self._data), self._step)
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        return count


class _Blocking:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def receive_into(self, buffer: memoryview) -> int:
        count = self._sock.recv_into(buffer)
        if not count:
            raise ConnectionResetError
        return count


def wire_of(stream: Any, **limits: int) -> Wire:
    """A wire over ``stream``: some bytes, or a blocking socket."""
    return Wire(_Blocking(stream) if isinstance(stream, socket.socket) else stream, **limits)


def next_frame(wire: Wire) -> Frame:
    """The next frame; an ``EOFError`` if its bytes come to an end."""
    while (header := wire.header()) is None:
        _progress(wire)
    tensors = allocate(header.tensors)
    while not wire.receive(tensors):
        _progress(wire)
    return Frame(header, tensors)


def _progress(wire: Wire) -> None:
    # Each pass takes at least a byte, so this ends.
    before = getattr(wire, "seen", -1)
    wire.seen = wire.received  # type: ignore[attr-defined]
    if before == wire.received:
        raise EOFError("the frame is not complete")
