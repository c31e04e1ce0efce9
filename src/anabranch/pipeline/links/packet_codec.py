"""Messages between ranks: a small header of fixed size, then the tensors' bytes.

The header describes the rest, so shapes and dtypes may change from message to message and step to step. Containers and
plain values are in it, as the tree codec writes them. Received data is never evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, cast

import msgspec
import torch
from torch import Tensor

from anabranch.pipeline.links.shared_memory import Slot
from anabranch.pipeline.parts.part_program import TensorForm
from anabranch.pipeline.schedule.schedule import Kind
from anabranch.pipeline.stage.packet import Gradients, Message, Packet
from anabranch.tensors import Structure, flatten
from anabranch.tensors.dtypes import dtype_name, dtype_named
from anabranch.tensors.tree_codec import Path, decode, encode

HEADER_BYTES = 1024
"""Size of every header; a longer one continues in a second message, whose size it gives."""

_LENGTH_BYTES = 8


class Facts(NamedTuple):
    """Facts about a call that all ranks must know before they start, sent by the first stage's rank.

    ``kinds`` are those of the microbatches of a split model: a digest of the program and the form of the inputs.
    """

    step: int
    seed: int
    sizes: list[int]
    records: bool
    output: str
    keywords: list[str]
    kinds: Sequence[tuple[str, Structure]] = ()


class PacketFault(msgspec.Struct, array_like=True, frozen=True):
    """The error that ended a call, on the sending rank or on the first one reported to it: of a ``PipelineError``."""

    message: str
    stage: int | None
    microbatch: int | None
    phase: str | None
    remote_type: str
    remote_traceback: str


class Header(msgspec.Struct, array_like=True, frozen=True):
    """A message's header: a sending action's data, a value that all ranks are given, or a turn's end.

    The bytes of ``tensors`` follow it, or are in ``slot`` of shared memory.
    """

    turn: int
    operation: str
    kind: str
    stage: int = -1
    peer: int = -1
    microbatch: int = -1
    body: object = None
    tensors: list[tuple[str, list[int]]] = []
    fault: PacketFault | None = None
    slot: Slot | None = None


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


def pack(value: Structure, leaves: Iterable[object] = ()) -> tuple[object, list[tuple[str, list[int]]], list[Tensor]]:
    """Pack a value: plain ones for the header, its tensors' dtypes and shapes, and their bytes, where they are.

    Raises:
        TypeError: a value, or one of these ``leaves`` of it, that is meaningless outside this process; names its type.
    """
    tree, tensors = _encode(value, leaves)
    return tree, [(dtype_name(tensor.dtype), list(tensor.shape)) for tensor in tensors], bytes_of(tensors)


def unpack(tree: object, tensors: Sequence[Tensor]) -> Structure:
    """Return the value from what ``pack`` has made of it."""
    return decode(tree, {"$sparse": partial(_sparse, tensors), "$form": _form}, tensors=tensors)


def pack_message(message: Message) -> tuple[object, list[tuple[str, list[int]]], list[Tensor]]:
    """Pack the message of a sending action, like ``pack``."""
    parts = [
        [part.structure(), list(part.needs_grad), list(part.doubled)] if isinstance(part, Packet) else part
        for part in message
    ]
    return pack(parts, [leaf for part in message if isinstance(part, Packet) for leaf in part.leaves])


def unpack_message(kind: Kind, tree: object, tensors: list[Tensor]) -> Message:
    """Return the message of a sending action of ``kind``."""
    parts = unpack(tree, tensors)
    if kind is Kind.SEND_B:
        return cast("list[Gradients]", parts)
    packets: list[Packet] = []
    for structure, needs_grad, doubled in parts:
        leaves, treedef = flatten(structure)
        packets.append(Packet(treedef, leaves, tuple(needs_grad), tuple(doubled)))
    return packets


def bytes_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the buffers to receive into, for those ``tensors`` that have bytes."""
    return [_as_bytes(tensor) for tensor in tensors if tensor.numel()]


def _encode(value: Structure, leaves: Iterable[object]) -> tuple[object, list[Tensor]]:
    """Return a tree of plain values, and the tensors that its tags number; a sparse tensor is two."""
    tensors: list[Tensor] = []

    def own(leaf: object, path: Path) -> object:
        if isinstance(leaf, TensorForm):
            return {"$form": [list(leaf.shape), dtype_name(leaf.dtype), leaf.requires_grad]}
        if not isinstance(leaf, Tensor):
            raise _refusal(leaf)
        if leaf.layout is torch.sparse_coo and not leaf.requires_grad:
            leaf = leaf.coalesce()
            tensors.extend((leaf.indices(), leaf.values()))
            return {"$sparse": [len(tensors) - 2, list(leaf.shape)]}
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
            kind_of = "nested" if leaf.is_nested else "quantized" if leaf.is_quantized else leaf.layout
            raise TypeError(f"a {kind_of} tensor cannot cross ranks; make it dense, or keep it within a stage")
        tensors.append(leaf)
        return {"$tensor": len(tensors) - 1}

    if sets := [leaf for leaf in leaves if isinstance(leaf, set | frozenset)]:  # a pipe sees no tensors in them
        raise _refusal(sets[0])
    return encode(value, own), tensors


def class_name(kind: type) -> str:
    """Return its qualified name."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _refusal(value: object) -> TypeError:
    return TypeError(
        f"a {class_name(type(value))} cannot cross ranks; send tensors, numbers, strings and None, nested in dict, "
        "list and tuple, of these exact types, not types derived from them"
    )


def _sparse(tensors: Sequence[Tensor], content: tuple[int, list[int]]) -> Tensor:
    first, shape = content
    indices, values = tensors[first : first + 2]
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=True, check_invariants=False, device=values.device
    )


def _form(content: tuple[list[int], str, bool]) -> TensorForm:
    shape, dtype, requires_grad = content
    return TensorForm(tuple(shape), dtype_named(dtype), requires_grad)


def _as_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)
