"""Values between ranks: each arrives as it was sent, or is refused by name before anything is sent."""

from __future__ import annotations

import enum
import math

import msgspec
import pytest
import torch

from anabranch.pipeline.links.packet_codec import (
    HEADER_BYTES,
    Header,
    decode_header,
    encode_header,
    pack_message,
    unpack_message,
)
from anabranch.pipeline.schedule.schedule import Kind
from anabranch.pipeline.stage.packet import cut


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
    [
        None,
        True,
        -(2**63),
        2**80,
        math.inf,
        "ä",
        "x" * 3 * HEADER_BYTES,
        {},
        (),
        {"a": [1, (None,)], 2: {None: 0.5}},
    ],
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
