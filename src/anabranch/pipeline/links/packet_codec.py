"""Messages between ranks: a small header of fixed size, then the tensors' bytes.

The header describes the rest, so shapes and dtypes may change from message to message and step to step. Values nest in
dict, list and tuple; numbers, strings and ``None`` are sent in the header. Received data is never evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import msgspec
import torch
from torch import Tensor

from anabranch.pipeline.links.exchange import Message
from anabranch.pipeline.schedule.actions import Kind
from anabranch.pipeline.stage.packet import Gradients, Packet
from anabranch.tensors import Structure, flatten
from anabranch.tensors.dtypes import dtype_name, dtype_named

__all__ = [
    "Facts",
    "Header",
    "InputKind",
    "PacketFault",
    "bytes_of",
    "decode_header",
    "describe",
    "described",
    "encode_header",
    "pack",
    "unpack",
]

HEADER_BYTES = 1024
"""Size of every header; a longer one continues in a second message, whose size it gives."""

_LENGTH_BYTES = 8


InputKind: TypeAlias = tuple[str, object, list[tuple[str, list[int]]], list[bool]]
"""A key, and what ``describe`` gives of inputs."""


class Facts(msgspec.Struct, array_like=True, frozen=True):
    """Facts about a call that all ranks must know before they start, sent by the first stage's rank.

    ``kinds`` are those of the microbatches of a split model.
    """

    step: int
    seed: int
    sizes: list[int]
    records: bool
    output: str
    keywords: list[str]
    kinds: list[InputKind] = []


class PacketFault(msgspec.Struct, array_like=True, frozen=True):
    """The error that ended a call, on the sending rank or on the first one reported to it."""

    rank: int
    type_name: str
    message: str
    traceback: str
    stage: int | None = None
    microbatch: int | None = None
    phase: str | None = None


class Header(msgspec.Struct, array_like=True, frozen=True):
    """A message's header: a sending action's data, the facts of a call, shares of tied gradients, or a turn's end."""

    turn: int
    operation: str
    kind: str
    stage: int = -1
    peer: int = -1
    microbatch: int = -1
    body: object = None
    tensors: list[tuple[str, list[int]]] = []
    facts: Facts | None = None
    fault: PacketFault | None = None


def encode_header(header: Header) -> list[Tensor]:
    """Return the header as one message, or two if it is long."""
    data = msgspec.msgpack.encode(header)
    first = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device="cpu")
    framed = len(data).to_bytes(_LENGTH_BYTES, "little") + data[: HEADER_BYTES - _LENGTH_BYTES]
    first[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
    rest = data[HEADER_BYTES - _LENGTH_BYTES :]
    return [first, torch.frombuffer(bytearray(rest), dtype=torch.uint8)] if rest else [first]


# Built at import: constructing a msgspec decoder is not thread-safe.
HEADERS = msgspec.msgpack.Decoder(Header)


def decode_header(first: Tensor, receive: Callable[[Tensor], None]) -> Header:
    """Return the header that starts with ``first``; ``receive`` fills a tensor with the rest, if there is any."""
    data = bytes(first.numpy())
    length, body = int.from_bytes(data[:_LENGTH_BYTES], "little"), data[_LENGTH_BYTES:]
    if length > len(body):
        rest = torch.empty(length - len(body), dtype=torch.uint8, device="cpu")
        receive(rest)
        body += bytes(rest.numpy())
    return HEADERS.decode(body[:length])


_Spec: TypeAlias = object


def pack(message: Message) -> tuple[_Spec, list[tuple[str, list[int]]], list[Tensor]]:
    """Pack a message: plain values for the header, its tensors' dtypes and shapes, and their bytes, where they are.

    Raises:
        TypeError: a value that is meaningless outside this process; names its type.
    """
    tensors: list[Tensor] = []
    specs = [
        [_encode(part.structure(), tensors), list(part.needs_grad), list(part.doubled)]
        if isinstance(part, Packet)
        else _encode(part, tensors)
        for part in message
    ]
    described = [(dtype_name(tensor.dtype), list(tensor.shape)) for tensor in tensors]
    return specs, described, bytes_of(tensors)


def describe(value: Structure) -> tuple[_Spec, list[tuple[str, list[int]]], list[bool]]:
    """Return plain values that describe ``value`` except the contents of its tensors.

    Raises:
        TypeError: a value that is meaningless outside this process; names its type.
    """
    tensors: list[Tensor] = []
    spec = _encode(value, tensors)
    shapes = [(dtype_name(tensor.dtype), list(tensor.shape)) for tensor in tensors]
    return spec, shapes, [tensor.requires_grad for tensor in tensors]


def described(spec: _Spec, shapes: Sequence[tuple[str, list[int]]], needs_grad: Sequence[bool]) -> Structure:
    """Return the value from the result of ``describe``, with meta tensors."""
    tensors = [
        torch.empty(shape, dtype=dtype_named(dtype), device="meta", requires_grad=needs)
        for (dtype, shape), needs in zip(shapes, needs_grad, strict=True)
    ]
    return _decode(spec, tensors)


def bytes_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the buffers to receive into, for those ``tensors`` that have bytes."""
    return [_as_bytes(tensor) for tensor in tensors if tensor.numel()]


def unpack(kind: Kind, spec: _Spec, tensors: list[Tensor]) -> Message:
    """Return the message of a sending action of ``kind``."""
    assert isinstance(spec, list)
    if kind is Kind.SEND_F:
        packets: list[Packet] = []
        for structure, needs_grad, doubled in spec:
            leaves, treedef = flatten(_decode(structure, tensors))
            packets.append(Packet(treedef, leaves, tuple(needs_grad), tuple(doubled)))
        return packets
    return cast(list[Gradients], [_decode(part, tensors) for part in spec])


def _encode(value: Structure, tensors: list[Tensor]) -> _Spec:
    if isinstance(value, Tensor):
        if value.layout is torch.sparse_coo and not value.requires_grad:
            value = value.coalesce()
            tensors += [value.indices(), value.values()]
            return ["s", [len(tensors) - 2, list(value.shape)]]
        if value.layout is not torch.strided or value.is_nested or value.is_quantized:
            kind = "nested" if value.is_nested else "quantized" if value.is_quantized else value.layout
            raise TypeError(f"a {kind} tensor cannot cross ranks; make it dense, or keep it within a stage")
        tensors.append(value)
        return ["t", len(tensors) - 1]
    if value is None or type(value) in (bool, int, float, str):
        return ["v", _checked(value)]
    if type(value) is tuple or type(value) is list:
        return ["u" if type(value) is tuple else "l", [_encode(item, tensors) for item in value]]
    if type(value) is dict:
        for key in value:
            if not (key is None or type(key) in (bool, int, float, str)):
                raise TypeError(f"the key {key!r} of a dict cannot cross ranks; keys are numbers, strings and None")
        return ["d", [[_checked(key), _encode(item, tensors)] for key, item in value.items()]]
    kind = (
        type(value).__qualname__
        if type(value).__module__ == "builtins"
        else f"{type(value).__module__}.{type(value).__qualname__}"
    )
    raise TypeError(
        f"a {kind} cannot cross ranks; send tensors, numbers, strings and None, nested in dict, list and tuple, of "
        "these exact types, not types derived from them"
    )


def _checked(value: object) -> object:
    """Return a plain value if MessagePack carries it.

    Raises:
        TypeError: a whole number of more than 64 bits, or a string that is not Unicode.
    """
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        raise TypeError(f"the number {value} cannot cross ranks: it has more than 64 bits; send it as a text")
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise TypeError(f"the text {value!r} cannot cross ranks: {error}") from None
    return value


def _decode(spec: _Spec, tensors: list[Tensor]) -> Structure:
    assert isinstance(spec, list)
    kind, content = spec
    if kind == "t":
        return tensors[content]
    if kind == "v":
        return content
    if kind == "s":
        first, shape = content
        return torch.sparse_coo_tensor(
            tensors[first],
            tensors[first + 1],
            shape,
            is_coalesced=True,
            check_invariants=False,
            device=tensors[first + 1].device,
        )
    if kind == "d":
        return {key: _decode(item, tensors) for key, item in content}
    items = [_decode(item, tensors) for item in content]
    return tuple(items) if kind == "u" else items


def _as_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)
