"""Frames: what goes in comes out, versions stay readable, and no byte from outside is believed."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anabranch import errors
from anabranch.errors import ProtocolError
from anabranch.tensors.dtypes import DTYPES
from anabranch.transport import frame as frames
from anabranch.transport.failures import error_of, failure_of
from anabranch.transport.frame import (
    FailureFrame,
    Heartbeat,
    Hello,
    ReplyHeader,
    RequestHeader,
    TensorHeader,
    bytes_of,
    encode,
    memory_to_send,
    pack,
    unpack,
)
from frame_reading import Bytes, Frame, join, next_frame, wire_of


def read(data: bytes, *, step: int = 1 << 30, **limits: int) -> Frame:
    return next_frame(wire_of(Bytes(data, step), **limits))


def signed(kind: int, header: bytes, body: bytes = b"", *, claimed: int | None = None, version: int = 2) -> bytes:
    """A frame with a right checksum, whatever its header says."""
    size = len(body) if claimed is None else claimed
    start = struct.pack("<4sBBHIQI", b"ANBR", version, kind, 0, len(header), size, 0)
    return start + struct.pack("<I", zlib.crc32(header, zlib.crc32(start))) + header + body


@given(code=st.sampled_from(sorted(DTYPES)), shape=st.lists(st.integers(0, 4), max_size=8), step=st.integers(1, 64))
@settings(max_examples=60, deadline=None)
def test_any_dtype_and_shape_survives_the_way(code: int, shape: list[int], step: int) -> None:
    tensor, other = torch.zeros(shape, dtype=DTYPES[code]), torch.tensor([1, -(2**62), 2**53 + 1])
    if tensor.numel():
        tensor.view(-1)[0] = 1
    frame = read(join(encode(ReplyHeader(b"note"), [tensor, other])), step=step)
    assert frame.header.payload == b"note"
    for sent, came in zip([tensor, other], frame.tensors, strict=True):
        assert (came.dtype, came.shape) == (sent.dtype, sent.shape)
        assert torch.equal(came, sent)


def test_frames_behind_one_another_are_read_one_by_one() -> None:
    data = (
        join(encode(Heartbeat()))
        + join(encode(ReplyHeader(), [torch.ones(2)]))
        + join(encode(FailureFrame("schema", "no")))
    )
    wire = wire_of(Bytes(data))
    kinds = [type(next_frame(wire).header) for _ in range(3)]
    assert kinds == [Heartbeat, ReplyHeader, FailureFrame]
    assert wire.idle()


@pytest.mark.parametrize(
    ("buffers", "expected"),
    [
        (encode(Hello(1.0)), "414e4252020100000b000000000000000000000000000000825febd392cb3ff000000000000090"),
        (
            encode(
                RequestHeader("pull", "emb", b"0123456789abcdef", 7, 5, 0.5, b"s", b"p"),
                [torch.tensor([1, 2], dtype=torch.int32), torch.tensor([True])],
            ),
            (
                "414e4252020200003a0000000900000000000000000000009375d53199a470756c6ca3656d62c4103031323334"
                "35363738396162636465660705cb3fe0000000000000c40173c401709294059102000894019101080101000000"
                "0200000001"
            ),
        ),
        (
            encode(ReplyHeader(b"p", 7), [torch.tensor([1.0, 2.0], dtype=torch.bfloat16)]),
            "414e4252020300000c000000040000000000000000000000b4273c3c93c401700791940891020004803f0040",
        ),
        (
            encode(FailureFrame("not_found", "no such uid", sequence=7)),
            (
                "414e4252020400001b00000000000000000000000000000046da1a7396a96e6f745f666f756e64ab6e6f207375"
                "636820756964a0a00790"
            ),
        ),
        (encode(Heartbeat()), "414e42520205000002000000000000000000000000000000786ced589190"),
    ],
    ids=["hello", "request", "reply", "failure", "beat"],
)
def test_the_bytes_of_version_2_never_change(buffers: list[memoryview], expected: str) -> None:
    assert join(buffers).hex() == expected
    frame = read(bytes.fromhex(expected))
    assert join(encode(frame.header, frame.tensors)) == join(buffers)


def test_a_header_that_claims_a_terabyte_costs_nothing() -> None:
    tensor = TensorHeader(9, (1 << 38,), 0, 1 << 40)
    header = msgspec.msgpack.encode(RequestHeader("verb", tensors=(tensor,)))
    data = signed(2, header, claimed=1 << 40)
    read(join(encode(Heartbeat())))
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="over the limit"):
        read(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def request_with(*tensors: TensorHeader) -> bytes:
    return msgspec.msgpack.encode(RequestHeader("verb", tensors=tensors))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"HTTP/1.1 200 OK\r\n" + bytes(20), "another protocol"),
        (b"HTTP/1.1 400", "another protocol"),  # before a whole preamble has arrived
        # Every version has its number there; what follows may have another form.
        (signed(5, b"\x91\x90", version=3), "uses version 3 of the protocol, this side version 2; update one"),
        (b"ANBR\x03", "version 3"),
        (signed(9, b""), "kind 9"),
        (signed(2, bytes((64 << 10) + 1)), "over the limit"),
        (signed(2, b"\xc1"), "does not decode"),
        (signed(2, b""), "does not decode"),
        (signed(2, msgspec.msgpack.encode(["verb", 5])), "does not decode"),
        (signed(2, msgspec.msgpack.encode(RequestHeader("verb", seconds=float("nan")))), "does not decode"),
        (signed(2, msgspec.msgpack.encode(RequestHeader("verb", seconds=float("inf")))), "does not decode"),
        (signed(1, msgspec.msgpack.encode(Hello(heartbeat=float("nan")))), "does not decode"),
        (signed(2, request_with(TensorHeader(9, (2,), 0, 8)), bytes(7)), "the body 7"),
        (signed(2, request_with(TensorHeader(9, (2,), 0, 4)), bytes(4)), "should be 8 bytes"),
        (signed(2, request_with(TensorHeader(9, (2,), 4, 8)), bytes(12)), "should be 8 bytes at 0"),
        (signed(2, request_with(TensorHeader(99, (2,), 0, 8)), bytes(8)), "not the number of a dtype"),
        (signed(2, request_with(TensorHeader(9, (1,) * 9, 0, 4)), bytes(4)), "does not decode"),
        (signed(2, request_with(*[TensorHeader(9, (0,), 0, 0)] * 65)), "does not decode"),
        (signed(2, request_with(TensorHeader(9, (0, 1 << 40, 1 << 40), 0, 0))), "strides"),
        (signed(2, request_with(TensorHeader(9, (1 << 33, 1 << 33), 0, 0))), "should be"),
        (signed(2, request_with(TensorHeader(1, (1,), 0, 1)), b"\x02"), "bool"),
    ],
)
def test_a_broken_rule_is_a_protocol_error_that_names_it(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        read(data)


def test_a_changed_bit_anywhere_before_the_body_is_noticed() -> None:
    data = join(encode(RequestHeader("verb", "target"), [torch.ones(3)]))
    for position in range(len(data) - 12):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            with pytest.raises((ProtocolError, EOFError)):
                read(bytes(changed))


@pytest.mark.parametrize("count", [4_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_mutated_frames_give_only_protocol_errors_and_no_growth(count: int) -> None:
    rng = random.Random(0)
    header = msgspec.msgpack.encode(
        RequestHeader("verb", "target", b"e" * 16, 3, 1, 0.5, b"", b"payload", (TensorHeader(9, (2, 3), 0, 24),))
    )
    outcomes = {"whole": 0, "refused": 0, "incomplete": 0}
    peak = 0
    for number in range(count):
        changed = bytearray(header)
        for _ in range(rng.randint(1, 4)):
            kind = rng.random()
            position = rng.randrange(len(changed))
            if kind < 0.6:
                changed[position] = rng.randrange(256)
            elif kind < 0.8:
                del changed[position]
            else:
                changed.insert(position, rng.randrange(256))
        # The checksum is right, so that what lies behind it is what is tried.
        data = bytearray(signed(2, bytes(changed), bytes(24)))
        if rng.random() < 0.2:
            data[rng.randrange(len(data))] = rng.randrange(256)
        if number == count // 10:
            tracemalloc.start()
        try:
            read(bytes(data), max_body=1 << 12)
            outcomes["whole"] += 1
        except ProtocolError:
            outcomes["refused"] += 1
        except EOFError:
            outcomes["incomplete"] += 1
        if number == count // 10 + 500:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert sum(outcomes.values()) == count
    assert outcomes["refused"] > count // 4
    assert peak < 1 << 20


def test_tensors_that_no_frame_carries_are_refused_before_sending() -> None:
    with pytest.raises(ValueError, match="at most 64 tensors"):
        encode(ReplyHeader(), [torch.zeros(1)] * 65)
    with pytest.raises(ValueError, match="at most 8 dimensions"):
        encode(ReplyHeader(), [torch.zeros([1] * 9)])
    with pytest.raises(ValueError, match="over the 65536"):
        encode(ReplyHeader(bytes(70_000)))
    with pytest.raises(TypeError, match="strided"):
        encode(ReplyHeader(), [torch.eye(2).to_sparse()])


def test_a_payload_of_another_type_is_a_protocol_error() -> None:
    assert unpack(pack([1, 2]), list[int]) == [1, 2]
    with pytest.raises(ProtocolError, match="not a list"):
        unpack(pack(["one"]), list[int])
    with pytest.raises(ProtocolError):
        unpack(b"\xc1", list[int])


ROWS = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("tensor", "plain"),
    [
        (ROWS, True),
        (ROWS.double(), True),
        (ROWS[1:], True),
        (ROWS.reshape(-1)[2], True),
        (ROWS.t(), False),
        (ROWS[:, 1], False),
        (ROWS[:0], False),
        (torch.ones(1).expand(1, 1), True),
        (ROWS.clone().requires_grad_(), True),
        (ROWS.bool(), False),
        (ROWS.bfloat16(), False),
        (torch.complex(ROWS, ROWS).conj().imag, False),
        (torch.complex(ROWS, ROWS).conj(), False),
        (ROWS.clone().requires_grad_().t(), False),
    ],
)
def test_the_fast_path_through_numpy_gives_the_same_bytes(tensor: Tensor, plain: bool) -> None:
    memory = memory_to_send(tensor)
    assert bytes(memory) == bytes(bytes_of(tensor.detach().resolve_conj().resolve_neg().clone().contiguous()))
    if plain:
        assert memory.obj is not None
        tensor.detach().fill_(7)  # it is its own memory
        assert bytes(memory) == bytes(bytes_of(tensor.detach().contiguous()))
    frame = read(b"".join(encode(ReplyHeader(), [tensor])))
    assert torch.equal(frame.tensors[0], tensor)


def test_a_kind_is_learnt_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that learnt one struct's fields at once read memory that was not there."""
    make = msgspec.msgpack.Decoder
    learnt: list[type] = []

    def learn(kind: type) -> object:
        assert frames._making.locked()
        learnt.append(kind)
        return make(kind)

    class Point(msgspec.Struct):
        x: int

    monkeypatch.setattr(msgspec.msgpack, "Decoder", learn)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: unpack(pack(Point(3)), Point), range(2)))
    assert [point.x for point in found] == [3, 3]
    assert learnt == [Point]


KINDS = [
    "CheckpointError", "DeadlineExceeded", "NonFinite", "NotFound", "Overloaded", "PeerLost", "ProtocolError",
    "RolledBack", "SchemaError", "Unauthorized",
]  # fmt: skip


@pytest.mark.parametrize("sequence", [None, 0, 2**40])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_arrives_with_its_type_as_the_answer_to_its_own_request(kind: str, sequence: int | None) -> None:
    lost = {"lost": 2**40} if kind == "RolledBack" else {}
    sent = failure_of(getattr(errors, kind)("why", **lost), sequence)
    failure = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=FailureFrame)
    error = error_of(failure, peer="unix:shard", operation="rows.push", step=7, elapsed=1.5)
    assert type(error) is getattr(errors, kind)
    assert failure.sequence == sequence
    assert str(error).startswith("why")
    where = str(error) if isinstance(error, errors.BoundaryError) else " ".join(error.__notes__)
    assert "unix:shard" in where
    assert "rows.push" in where
    assert getattr(error, "lost", None) == lost.get("lost")
