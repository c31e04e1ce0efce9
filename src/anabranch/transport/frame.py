"""Frames: what one message looks like in bytes, and the checks that every byte from outside passes.

::

    preamble, 24 bytes, little endian
    +-------+---------+------+----------+---------------+-------------+-------+
    | ANBR  | version | kind | reserved | header length | body length | crc32 |
    |  4 s  |   u8    |  u8  |   u16    |      u32      |     u64     |  u32  |
    +-------+---------+------+----------+---------------+-------------+-------+
    header: msgpack of the kind's struct, an array; lists each tensor's dtype, shape, offset and bytes
    body:   the tensors' memory, one after the other, nothing between

The checksum covers the preamble before it and the header. A reader allocates nothing on a peer's word: lengths are
held against ``Limits`` before the header is read, shapes against lengths before a tensor is made, and the caller's
``accept`` sees the header before the body has a place to go.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, TypeAlias, TypeVar

import msgspec
import torch
from torch import Tensor

from anabranch.errors import ProtocolError
from anabranch.transport.streams import Stream
from anabranch.transport.tensor_memory import DTYPE_CODES, DTYPES, bytes_of, check_bools, dense_on_cpu

__all__ = [
    "Accept",
    "Beat",
    "Failure",
    "Frame",
    "FrameReader",
    "FrameWriter",
    "Header",
    "Hello",
    "Kind",
    "Limits",
    "ReplyHeader",
    "RequestHeader",
    "TensorHeader",
    "allocate",
    "encode",
    "pack",
    "unpack",
]

MAGIC = b"ANBR"
VERSION = 1
_PREAMBLE = struct.Struct("<4sBBHIQI")
_CHECKED = _PREAMBLE.size - 4
_MOST_BYTES = 1 << 62
_AHEAD = 4096

_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MOST_BYTES)]
# Neither NaN nor infinity passes: both would make waits without end.
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
_Word: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a reader takes from a peer.

    Attributes:
        header: bytes of a header.
        tensors: tensors in a frame.
        dimensions: dimensions of a tensor.
        body: bytes of a frame's tensors together.
    """

    header: int = 64 << 10
    tensors: int = 64
    dimensions: int = 8
    body: int = 1 << 30


class Kind(IntEnum):
    """What a frame is; numbers are never given another meaning."""

    HELLO = 1
    REQUEST = 2
    REPLY = 3
    FAILURE = 4
    BEAT = 5


class TensorHeader(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One tensor of a body, before it is there."""

    code: int
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=8)]
    offset: _Size
    nbytes: _Size

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return DTYPES[self.code]


_Tensors: TypeAlias = Annotated[tuple[TensorHeader, ...], msgspec.Meta(max_length=64)]


class Hello(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The first frame of each side: how often a server beats, in seconds, and the bytes it takes in a body."""

    heartbeat: _Seconds = 0.0
    body: _Size = 0
    tensors: _Tensors = ()


class RequestHeader(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a client asks.

    ``epoch`` and ``sequence`` name the request for ever, whatever connection it comes on; everything of this epoch
    below ``settled`` will never be asked again. An empty epoch asks for something that may as well be done twice.
    """

    verb: _Word
    target: _Word = ""
    epoch: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    sequence: _Size = 0
    settled: _Size = 0
    seconds: _Seconds = 0.0
    schema: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    payload: bytes = b""
    tensors: _Tensors = ()


class ReplyHeader(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a server answers."""

    payload: bytes = b""
    tensors: _Tensors = ()


class Failure(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Why a server does not answer; ``failures.py`` turns errors into it and back."""

    code: _Word
    message: str = ""
    remote_type: str = ""
    remote_traceback: str = ""
    tensors: _Tensors = ()


class Beat(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The server lives and has not forgotten the request."""

    tensors: _Tensors = ()


_T = TypeVar("_T")
Header: TypeAlias = Hello | RequestHeader | ReplyHeader | Failure | Beat
_HeaderT = TypeVar("_HeaderT", Hello, RequestHeader, ReplyHeader, Failure, Beat)
Accept: TypeAlias = Callable[[Header], Sequence[Tensor] | None]
"""Looks at a header before its body is read: where the tensors go, ``None`` to let them pass by, or raises."""

_KINDS: dict[type[Header], Kind] = {
    Hello: Kind.HELLO,
    RequestHeader: Kind.REQUEST,
    ReplyHeader: Kind.REPLY,
    Failure: Kind.FAILURE,
    Beat: Kind.BEAT,
}
_DECODERS: dict[int, msgspec.msgpack.Decoder[Header]] = {
    int(kind): msgspec.msgpack.Decoder(header) for header, kind in _KINDS.items()
}
_ENCODER = msgspec.msgpack.Encoder()


def encode(header: _HeaderT, tensors: Sequence[Tensor] = ()) -> list[memoryview]:
    """The buffers of a frame, in order; tensors in main memory are not copied.

    >>> frame = encode(RequestHeader("pull", "emb"), [torch.zeros(2, 3)])
    >>> [len(buffer) for buffer in frame][1:]
    [24]

    Raises:
        ValueError: more tensors, dimensions or header bytes than a frame carries.
        TypeError: a tensor that cannot cross.
    """
    limits = Limits()
    if len(tensors) > limits.tensors:
        raise ValueError(f"a frame carries at most {limits.tensors} tensors, got {len(tensors)}; send fewer at a time")
    bodies: list[memoryview] = []
    described: list[TensorHeader] = []
    offset = 0
    for tensor in tensors:
        if tensor.ndim > limits.dimensions:
            raise ValueError(f"tensors of at most {limits.dimensions} dimensions cross, got {tuple(tensor.shape)}")
        plain = dense_on_cpu(tensor)
        memory = bytes_of(plain)
        described.append(TensorHeader(DTYPE_CODES[plain.dtype], tuple(plain.shape), offset, len(memory)))
        offset += len(memory)
        if memory:
            bodies.append(memory)
    if described:
        header = msgspec.structs.replace(header, tensors=tuple(described))
    packed = _ENCODER.encode(header)
    if len(packed) > limits.header:
        raise ValueError(f"the header is {len(packed)} bytes, over the {limits.header} a frame carries; send less")
    kind = _KINDS[type(header)]
    start = _PREAMBLE.pack(MAGIC, VERSION, kind, 0, len(packed), offset, 0)[:_CHECKED]
    checksum = zlib.crc32(packed, zlib.crc32(start))
    return [memoryview(start + checksum.to_bytes(4, "little") + packed), *bodies]


def allocate(headers: Sequence[TensorHeader]) -> list[Tensor]:
    """New tensors in main memory, with undefined contents, for the body that ``headers`` describe."""
    return [torch.empty(header.shape, dtype=header.dtype) for header in headers]


def pack(value: object) -> bytes:
    """``value`` as the payload of a request or an answer: numbers, texts, bytes, lists, dicts, msgspec structs."""
    return _ENCODER.encode(value)


def unpack(payload: bytes, kind: type[_T]) -> _T:
    """The payload as a ``kind``, checked field by field.

    >>> unpack(pack({"ids": [1, 2]}), dict[str, list[int]])
    {'ids': [1, 2]}

    Raises:
        ProtocolError: it is something else.
    """
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the payload is no {kind}: {error}") from None


@dataclass(frozen=True, slots=True)
class Frame:
    """One message as it was read; ``tensors`` is ``None`` if its body was let pass by."""

    header: Header
    tensors: Sequence[Tensor] | None


class FrameWriter:
    """Frames on their way out of one stream, in order; holds what the stream did not take yet."""

    def __init__(self) -> None:
        self._buffers: list[memoryview] = []

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def put(self, frame: Sequence[memoryview]) -> None:
        """Adds a frame behind those that wait."""
        self._buffers.extend(frame)

    def flush(self, stream: Stream) -> int:
        """Gives the stream what it takes; returns how many bytes that was."""
        total = 0
        while self._buffers:
            taken = stream.send(self._buffers)
            if not taken:
                break
            total += taken
            self._drop(taken)
        return total

    def _drop(self, taken: int) -> None:
        whole = 0
        while taken and taken >= len(self._buffers[whole]):
            taken -= len(self._buffers[whole])
            whole += 1
        del self._buffers[:whole]
        if taken:
            self._buffers[0] = self._buffers[0][taken:]


class FrameReader:
    """Reads frames from one stream, as far as it has come, and believes nothing.

    Args:
        limits: what the peer may send.
        accept: sees each checked header before its body is read.
    """

    def __init__(self, limits: Limits, accept: Accept) -> None:
        self._limits = limits
        self._accept = accept
        self._preamble = bytearray(_PREAMBLE.size)
        self._scratch = memoryview(bytearray(0))
        # What came beyond what was asked for: a small frame takes one call of the kernel, not three.
        self._ahead = memoryview(bytearray(_AHEAD))
        self._held = self._ahead[:0]
        self.received = 0
        """Bytes since the reader was made: progress, for whoever watches for silence."""
        self._restart()

    def _restart(self) -> None:
        self._header: Header | None = None
        self._tensors: Sequence[Tensor] | None = ()
        self._packed: bytearray | None = None
        self._skip = 0
        self._views = [memoryview(self._preamble)]

    def idle(self) -> bool:
        """Whether the reader stands between two frames, and has nothing of the next."""
        between = self._packed is None and len(self._views) == 1 and len(self._views[0]) == _PREAMBLE.size
        return between and not self._held

    def holds_more(self) -> bool:
        """Whether bytes were received that belong to the next frame."""
        return bool(self._held)

    def advance(self, stream: Stream) -> Frame | None:
        """The next frame if it is complete, ``None`` once the stream has nothing more for now.

        Raises:
            ProtocolError: the bytes are no frame, or break a limit; the stream is of no further use.
            ConnectionError: the stream has ended.
        """
        while True:
            if not self._fill(stream):
                return None
            if self._packed is None:
                self._read_preamble()
            elif self._header is None:
                self._read_header()
            else:
                frame = Frame(self._header, self._tensors)
                self._check_values(frame)
                self._restart()
                return frame

    def _fill(self, stream: Stream) -> bool:
        while self._views:
            view = self._views[0]
            count = self._receive(stream, view)
            if not count:
                return False
            self.received += count
            if count == len(view):
                del self._views[0]
            else:
                self._views[0] = view[count:]
        while self._skip:
            count = self._receive(stream, self._scratch[: min(self._skip, len(self._scratch))])
            if not count:
                return False
            self.received += count
            self._skip -= count
        return True

    def _receive(self, stream: Stream, view: memoryview) -> int:
        if not self._held:
            if len(view) >= _AHEAD:
                return stream.receive_into(view)
            self._held = self._ahead[: stream.receive_into(self._ahead)]
        count = min(len(view), len(self._held))
        view[:count] = self._held[:count]
        self._held = self._held[count:]
        return count

    def _read_preamble(self) -> None:
        magic, version, kind, reserved, header, body, _ = _PREAMBLE.unpack(self._preamble)
        if magic != MAGIC:
            raise ProtocolError(f"the first bytes are {bytes(magic)!r}, not {MAGIC!r}: the peer speaks something else")
        if version != VERSION:
            raise ProtocolError(f"the peer speaks version {version} of the protocol, this side {VERSION}; update one")
        if kind not in _DECODERS or reserved:
            raise ProtocolError(f"no frame is of kind {kind} with reserved bits {reserved:#x}")
        if header > self._limits.header:
            raise ProtocolError(f"a header of {header} bytes is over the limit of {self._limits.header}")
        if body > self._limits.body:
            raise ProtocolError(f"a body of {body} bytes is over the limit of {self._limits.body}")
        self._packed = bytearray(header)
        self._views = [memoryview(self._packed)] if header else []

    def _read_header(self) -> None:
        assert self._packed is not None
        kind, body, checksum = self._preamble[5], *_PREAMBLE.unpack(self._preamble)[5:7]
        if zlib.crc32(self._packed, zlib.crc32(self._preamble[:_CHECKED])) != checksum:
            raise ProtocolError("the header's checksum does not match: bytes were lost or changed")
        try:
            header = _DECODERS[kind].decode(self._packed)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"the header of kind {Kind(kind).name} does not decode: {error}") from None
        self._check_layout(header.tensors, body)
        tensors = self._accept(header)
        self._header = header
        self._tensors = tensors
        if tensors is None:
            self._skip = body
            if body and not self._scratch:
                self._scratch = memoryview(bytearray(64 << 10))
        else:
            self._views = [bytes_of(tensor) for tensor in tensors if tensor.numel()]

    def _check_layout(self, headers: Sequence[TensorHeader], body: int) -> None:
        if len(headers) > self._limits.tensors:
            raise ProtocolError(f"{len(headers)} tensors are over the limit of {self._limits.tensors}")
        offset = 0
        for header in headers:
            if header.code not in DTYPES:
                raise ProtocolError(f"{header.code} is the number of no dtype")
            if len(header.shape) > self._limits.dimensions:
                raise ProtocolError(f"{len(header.shape)} dimensions are over the limit of {self._limits.dimensions}")
            nbytes = math.prod(header.shape) * header.dtype.itemsize
            if nbytes != header.nbytes or header.offset != offset:
                raise ProtocolError(
                    f"a tensor of shape {header.shape} and {header.nbytes} bytes at {header.offset} "
                    f"should be {nbytes} bytes at {offset}"
                )
            offset += nbytes
            # Zero-size shapes of huge sizes overflow torch's strides though they hold nothing.
            if math.prod(max(size, 1) for size in header.shape) > _MOST_BYTES:
                raise ProtocolError(f"shape {header.shape} has strides that no tensor can have")
        if offset != body:
            raise ProtocolError(f"the tensors are {offset} bytes, the body {body}")

    def _check_values(self, frame: Frame) -> None:
        for tensor in frame.tensors or ():
            if tensor.dtype is torch.bool and not check_bools(tensor):
                raise ProtocolError("a bool tensor holds bytes other than 0 and 1")
