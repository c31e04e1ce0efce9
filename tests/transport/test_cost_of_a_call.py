"""What a request that is asked alone costs: no table of those that wait, and few calls of the kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch

from anabranch.transport import Client, Deadline, Request, Server, Verb, client
from anabranch.transport.frame import ReplyHeader, encode
from anabranch.transport.sockets import _UNIX_BUFFER, SocketTransport
from anabranch.transport.streams import Stream


class Counting(SocketTransport):
    """A network whose clients' streams count what they ask of the kernel."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def connect(self, endpoint: str) -> Stream:  # type: ignore[override]
        return cast(Stream, _Counted(super().connect(endpoint), self._counts))


class _Counted:
    def __init__(self, stream: Stream, counts: Counter[str]) -> None:
        self._stream = stream
        self._counts = counts

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def send(self, buffers: Sequence[memoryview]) -> int:
        self._counts["send"] += 1
        return self._stream.send(buffers)

    def receive_into(self, buffer: memoryview) -> int:
        self._counts["receive"] += 1
        return self._stream.receive_into(buffer)


@pytest.mark.parametrize(("numbers", "receives"), [(0, 1), (100, 1), (16 << 10, 2)])
def test_a_request_alone_is_sent_at_once_and_its_answer_read_as_it_came(
    numbers: int, receives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    monkeypatch.setattr(client, "_Together", None)
    echo = Verb("echo", lambda call: call.reply(call.tensors), quick=True)
    with Server([echo]) as server, Client(transport=Counting(counts)) as asker:
        request = Request(server.endpoint, "echo", tensors=[torch.ones(numbers)])
        for _ in range(2):  # connects
            asker.call(request, Deadline.after(60.0))
        counts.clear()
        for _ in range(10):
            asker.call(request, Deadline.after(60.0))
    # The server writes header and body in one call, of which the reader's first look may see a part.
    assert counts["send"] == 10
    assert 10 * receives <= counts["receive"] <= 10 * receives + 10


@pytest.mark.skipif(
    int(Path("/proc/sys/net/core/wmem_max").read_text()) < _UNIX_BUFFER,
    reason="the kernel's limit on a socket's buffer (net.core.wmem_max) is lower than what is asked for",
)
def test_two_megabytes_and_their_header_leave_in_one_go() -> None:
    network = SocketTransport()
    listener = network.listen(None)
    stream = network.connect(listener.endpoint)
    try:
        assert stream.handshake()
        frame = encode(ReplyHeader(), [torch.zeros(512, 1024)])
        # Nobody reads.
        assert stream.send(frame) == sum(map(len, frame))
    finally:
        stream.close()
        listener.close()
