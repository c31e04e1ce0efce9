"""Tensors between ranks of one host: as they were, in slots that are used again, without a descriptor left open."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from anabranch.pipeline.links import channel
from anabranch.pipeline.links.inbox import Inbox
from anabranch.pipeline.links.packet_codec import Header, encode_header, pack, unpack
from anabranch.pipeline.links.shared_memory import MessageMemory
from anabranch.tensors import Structure

Pair = tuple[MessageMemory, MessageMemory]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The memory of rank 0, which sends, and of rank 1."""
    pair = MessageMemory([os.getpid()] * 2), MessageMemory([os.getpid()] * 2)
    yield pair
    for memory in pair:
        memory.close()


def crossed(pair: Pair, value: Structure) -> tuple[Structure, int]:
    """The value as it arrives, and the number of its slot."""
    spec, described, parts = pack(value)
    slot = pair[0].put(1, parts)
    return unpack(spec, pair[1].tensors(0, slot, described)), slot[0]


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_every_dtype_arrive_as_they_were(pair: Pair, dtype: torch.dtype):
    x = (torch.randn(3, 5, dtype=torch.complex64) * 9).to(torch.complex64)
    x = x.to(dtype) if dtype is torch.complex64 else x.real.to(dtype)
    value = {"x": x, "turned": x.t(), "empty": x[:0], "scalar": x[0, 0], "none": None, "number": 2.5}
    found, _ = crossed(pair, value)
    assert found.keys() == value.keys()
    for name, expected in value.items():
        if isinstance(expected, Tensor):
            assert found[name].dtype == dtype
            assert torch.equal(found[name], expected), name
        else:
            assert found[name] == expected


def test_a_slot_is_used_again_once_its_tensors_are_freed_and_they_are_no_copies(pair: Pair):
    descriptors = len(os.listdir("/proc/self/fd"))
    x = torch.ones(4)
    (first, other), number = crossed(pair, (x, x))
    first += 1
    assert torch.equal(x, torch.ones(4))
    assert torch.equal(other, x)
    assert other._version == 0, "a change of its neighbour is none of its own"
    assert crossed(pair, x)[1] != number, "taken"
    view = other[:2]
    del first, other
    assert crossed(pair, x)[1] != number
    del view
    assert crossed(pair, x * 3)[1] == number
    assert crossed(pair, torch.ones(1 << 20))[1] not in (0, 1), "too small"
    for memory in pair:
        memory.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_what_is_no_memory_of_a_pipe_is_not_opened(pair: Pair, tmp_path: Path):
    with (tmp_path / "file").open("w") as file, pytest.raises(FileNotFoundError, match="no memory of a pipe"):
        pair[1].tensors(0, (0, file.fileno(), 64), [("float32", [1])])


def test_memory_that_cannot_be_opened_is_said_rather_than_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    spec, described, parts = pack(torch.ones(4))
    header = Header(1, "step", "value", body=spec, tensors=described, slot=pair[0].put(1, parts))
    monkeypatch.setattr(channel.dist, "recv", lambda into, **_: into.copy_(encode_header(header)[0]))
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(OSError(errno.EMFILE, "Too many open files")))
    inbox = Inbox([0])
    inbox.begin(1, "step")
    channel._receive_all(None, 0, 7, inbox, pair[1])
    assert "Too many open files" in inbox.lost[0]
