"""Messages between ranks of one host: whole, in order, in slots that are used again, and bounded in every wait."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from anabranch.pipeline.links.inbox import Inbox
from anabranch.pipeline.links.packet_codec import Header, pack_message
from anabranch.pipeline.links.shared_memory_channel import Meeting, SharedMemoryChannel
from anabranch.pipeline.schedule.actions import Kind
from anabranch.pipeline.stage.packet import cut
from anabranch.tensors import Structure

Pair = tuple[SharedMemoryChannel, SharedMemoryChannel, Inbox]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A channel that sends, one that receives, and the latter's inbox, in turn 1."""
    inboxes = Inbox([1]), Inbox([0])
    for inbox in inboxes:
        inbox.begin(1, "step")
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    posts = [SharedMemoryChannel({1 - rank: ends[rank]}, inboxes[rank]) for rank in range(2)]
    yield posts[0], posts[1], inboxes[1]
    for channel in posts:
        channel.close()


def post_value(channel: SharedMemoryChannel, value: Structure, i: int = 0) -> None:
    spec, described, parts = pack_message([cut(value)[0]])
    channel.send(1, Header(1, "step", Kind.SEND_F.value, 0, 1, i, spec, described), parts)


def taken(channel: SharedMemoryChannel, inbox: Inbox, i: int = 0) -> Structure:
    key = (Kind.SEND_F.value, 0, 1, i)
    channel.wait_for(lambda: key in inbox.data, 60.0)
    with inbox.changed:
        return inbox.data.pop(key)[0].structure()


def slots(channel: SharedMemoryChannel) -> list[object]:
    return channel._lines[1]._slots


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_every_dtype_arrive_as_they_were(pair: Pair, dtype: torch.dtype):
    sender, receiver, inbox = pair
    x = (torch.randn(3, 5, dtype=torch.complex64) * 9).to(torch.complex64)
    x = x.to(dtype) if dtype is torch.complex64 else x.real.to(dtype)
    value = {"x": x, "turned": x.t(), "empty": x[:0], "scalar": x[0, 0], "none": None, "number": 2.5}
    post_value(sender, value)
    found = taken(receiver, inbox)
    assert found.keys() == value.keys()
    for name, expected in value.items():
        if isinstance(expected, Tensor):
            assert found[name].dtype == dtype
            assert torch.equal(found[name], expected), name
        else:
            assert found[name] == expected


def test_received_tensors_are_not_copies_and_may_be_changed_in_place(pair: Pair):
    sender, receiver, inbox = pair
    x = torch.ones(4)
    post_value(sender, x)
    found = taken(receiver, inbox)
    found += 1
    assert torch.equal(x, torch.ones(4))
    assert found.data_ptr() != x.data_ptr()
    with torch.no_grad():
        assert slots(sender)[0]._whole[64:80].view(torch.float32).tolist() == [2.0] * 4


def test_messages_longer_than_a_frame_and_more_than_a_socket_holds_arrive_in_order(pair: Pair):
    sender, receiver, inbox = pair
    sender._lines[1].socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    for i in range(300):
        post_value(sender, ("x" * 100_000 if i % 100 == 0 else "short", torch.full((2,), float(i))), i)
    assert sender._lines[1].unsent, "the socket is full, and nobody was kept waiting"
    pumping = threading.Thread(target=lambda: sender.flush(60.0))
    pumping.start()
    for i in range(300):
        text, x = taken(receiver, inbox, i)
        assert len(text) == (100_000 if i % 100 == 0 else 5)
        assert x[0] == i
    pumping.join(timeout=60.0)
    assert not sender._lines[1].unsent


def test_last_words_are_heard_before_a_closed_connection_is_a_lost_peer(pair: Pair):
    sender, receiver, inbox = pair
    receiver.send(0, Header(1, "step", "end"))  # unread by whom it is for
    post_value(sender, "farewell")
    sender.close()
    receiver.send(0, Header(1, "step", "end"))
    assert taken(receiver, inbox) == "farewell"
    receiver.wait_for(lambda: bool(inbox.lost), 60.0)
    assert "closed" in inbox.lost[0] or "reset" in inbox.lost[0]


def test_ranks_meet_and_leave_no_file_behind():
    found: dict[int, dict[int, socket.socket]] = {}
    meetings = [Meeting(rank) for rank in range(3)]
    paths = [meeting.path for meeting in meetings]

    def meet(rank: int) -> None:
        with meetings[rank]:
            found[rank] = meetings[rank].connect(paths, 60.0)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60.0)
    assert {rank: set(sockets) for rank, sockets in found.items()} == {0: {1, 2}, 1: {0, 2}, 2: {0, 1}}
    found[2][0].send(b"from 2")
    assert found[0][2].recv(9) == b"from 2"
    for sockets in found.values():
        for sock in sockets.values():
            sock.close()
    assert not any(Path(path).parent.exists() for path in paths)
