"""A network that counts its traffic for tests, and cuts its connections when they choose."""

from __future__ import annotations

from contextlib import suppress
from typing import cast

from anabranch.testing import MemoryTransport
from anabranch.transport import Stream


class CountingTransport(MemoryTransport):
    """Counts the bytes that its clients have received, and can cut their connections."""

    def __init__(self) -> None:
        super().__init__()
        self.received = 0
        self._streams: list[Stream] = []

    def connect(self, endpoint: str) -> Stream:
        stream = super().connect(endpoint)
        self._streams.append(stream)
        return cast(Stream, _CountingStream(self, stream))

    def cut(self) -> None:
        """Cut all connections: requests already sent arrive, answers in flight do not."""
        for stream in self._streams:
            with suppress(OSError):  # already closed
                stream.abort()
        self._streams.clear()


class _CountingStream:
    def __init__(self, network: CountingTransport, stream: Stream) -> None:
        self._network = network
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def receive_into(self, buffer: memoryview) -> int:
        count = self._stream.receive_into(buffer)
        self._network.received += count
        return count
