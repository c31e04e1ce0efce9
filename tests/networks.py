"""A network for tests that watch what passes, or cut it at a moment of their choosing."""

from __future__ import annotations

from contextlib import suppress
from typing import cast

from anabranch.testing import MemoryTransport
from anabranch.transport import Stream


class Watched(MemoryTransport):
    """Counts the bytes that its clients have received, and cuts their connections when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.received = 0
        self._streams: list[Stream] = []

    def connect(self, endpoint: str) -> Stream:
        stream = super().connect(endpoint)
        self._streams.append(stream)
        return cast(Stream, _WatchedStream(self, stream))

    def cut(self) -> None:
        """What was sent has arrived; what is on its way back does not."""
        for stream in self._streams:
            with suppress(OSError):  # one that was closed before
                stream.abort()
        self._streams.clear()


class _WatchedStream:
    def __init__(self, network: Watched, stream: Stream) -> None:
        self._network = network
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def receive_into(self, buffer: memoryview) -> int:
        count = self._stream.receive_into(buffer)
        self._network.received += count
        return count
