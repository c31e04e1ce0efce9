"""Values between ranks: each arrives as it was sent, in memory that is used again, or is refused before that."""

from __future__ import annotations

import enum
import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from anabranch.pipeline.links import connection
from anabranch.pipeline.links.connection import (
    HEADER_BYTES,
    Header,
    Inbox,
    decode_header,
    encode_header,
    pack,
    pack_message,
    unpack,
    unpack_message,
)
from anabranch.pipeline.links.shared_memory import MessageMemory
from anabranch.pipeline.schedule import Kind
from anabranch.pipeline.stage.packet import cut
from anabranch.tensors import Structure


class Colour(enum.IntEnum):
    RED = 1


class Word(enum.StrEnum):
    YES = "yes"


def through_a_header(value: object) -> object:
    spec, described, parts = pack_message([cut(value)[0]])
    tensors = [
        torch.frombuffer(bytearray(part.numpy().tobytes()), dtype=getattr(torch, dtype)).view(shape)
        for (dtype, shape), part in zip(described, parts, strict=True)
    ]
    first, *rest = encode_header(Header(1, "step", "send_f", body=spec, tensors=described))
    header = decode_header(first, lambda buffer: buffer.copy_(rest[0]))
    (packet,) = unpack_message(Kind.SEND_F, msgspec.to_builtins(header.body), tensors)
    return packet.structure()


@pytest.mark.parametrize(
    "value",
    [None, True, -(2**63), 2**80, math.inf, "ä", "x" * 3 * HEADER_BYTES, {}, (), {"a": [1, (None,)], 2: {None: 0.5}}],
    ids=lambda value: repr(value)[:20],
)
def test_plain_values_arrive_as_they_were_sent(value: object) -> None:
    found = through_a_header(value)
    assert found == value
    assert type(found) is type(value)


def test_a_sparse_tensor_arrives_coalesced() -> None:
    sparse = torch.sparse_coo_tensor([[0, 2, 2]], [1.0, 2.0, 3.0], (4,), check_invariants=True)
    found = through_a_header({"kept": sparse})
    assert found["kept"].is_coalesced()
    assert torch.equal(found["kept"].to_dense(), sparse.to_dense())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Colour.RED, "Colour cannot cross"),
        (Word.YES, "Word cannot cross"),
        ({Colour.RED: 1}, "Colour cannot cross"),
        ({1, 2}, "a set cannot cross"),
        (torch.Size([1]), "a torch.Size cannot cross"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_values_that_would_arrive_changed_are_refused_by_name(value: object, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        pack_message([cut(value)[0]])


@pytest.mark.filterwarnings("ignore")  # both are on their way out of PyTorch
@pytest.mark.parametrize("kind", ["nested", "quantized"])
def test_tensors_of_another_make_are_refused_where_they_are_sent(kind: str) -> None:
    if kind == "nested":
        value = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    else:
        value = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match=f"a {kind} tensor"):
        pack_message([[value]])


# Memory shared by the ranks of one host.

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
    assert len({crossed(pair, torch.zeros(0))[1] for _ in range(3)}) == 1, "nothing is freed at once"
    for memory in pair:
        memory.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_what_is_no_memory_of_a_pipe_is_not_opened(pair: Pair, tmp_path: Path):
    with (tmp_path / "file").open("w") as file, pytest.raises(FileNotFoundError, match="no memory of a pipe"):
        pair[1].tensors(0, (0, file.fileno(), 64), [("float32", [1])])


def test_memory_that_cannot_be_opened_is_said_rather_than_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    spec, described, parts = pack(torch.ones(4))
    header = Header(1, "step", "value", body=spec, tensors=described, slot=pair[0].put(1, parts))
    monkeypatch.setattr(connection.dist, "recv", lambda into, **_: into.copy_(encode_header(header)[0]))
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(OSError(errno.EMFILE, "Too many open files")))
    inbox = Inbox([0])
    inbox.begin(1, "step")
    connection._receive_all(None, 0, 7, inbox, pair[1])
    assert "Too many open files" in inbox.lost[0]
