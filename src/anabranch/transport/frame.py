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
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import msgspec
import torch
from torch import Tensor

from anabranch.errors import ProtocolError
from anabranch.transport.streams import Stream
from anabranch.transport.tensor_memory import DTYPE_CODES, DTYPES, bytes_of, check_bools, dense_on_cpu, plain_bytes

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
    "unpacker",
]

MAGIC = b"ANBR"
VERSION = 1
_PREAMBLE = struct.Struct("<4sBBHIQI")
_CHECKED = _PREAMBLE.size - 4
_MOST_BYTES = 1 << 62
_AHEAD = 16 << 10

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


_LIMITS = Limits()


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
    limits = _LIMITS
    if len(tensors) > limits.tensors:
        raise ValueError(f"a frame carries at most {limits.tensors} tensors, got {len(tensors)}; send fewer at a time")
    bodies: list[memoryview] = []
    described: list[TensorHeader] = []
    offset = 0
    for tensor in tensors:
        if tensor.ndim > limits.dimensions:
            raise ValueError(f"tensors of at most {limits.dimensions} dimensions cross, got {tuple(tensor.shape)}")
        memory = plain_bytes(tensor)
        if memory is None:
            tensor = dense_on_cpu(tensor)
            memory = bytes_of(tensor)
        described.append(TensorHeader(DTYPE_CODES[tensor.dtype], tuple(tensor.shape), offset, len(memory)))
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


_unpackers: dict[Any, Callable[[bytes], Any]] = {}
_making = threading.Lock()


def allocate(headers: Sequence[TensorHeader]) -> list[Tensor]:
    """New tensors in main memory, with undefined contents, for the body that ``headers`` describe."""
    return [torch.empty(header.shape, dtype=DTYPES[header.code]) for header in headers]


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
    return unpacker(kind)(payload)


def unpacker(kind: type[_T]) -> Callable[[bytes], _T]:
    """``unpack`` for one kind, made ready: making a decoder takes many times as long as using it.

    They are made one at a time. Whoever first meets a struct keeps what it learns of its fields with the struct while
    it learns, and another thread that came upon the half of it would follow pointers that are not there yet.
    """
    found = _unpackers.get(kind)
    if found is None:
        with _making:
            found = _unpackers.get(kind) or _new_unpacker(kind)
            _unpackers[kind] = found
    return cast("Callable[[bytes], _T]", found)


def _new_unpacker(kind: type[_T]) -> Callable[[bytes], _T]:
    decoder = msgspec.msgpack.Decoder(kind)

    def unpack_it(payload: bytes) -> _T:
        try:
            return decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"the payload is no {kind}: {error}") from None

    return unpack_it


class Frame(msgspec.Struct, frozen=True, eq=False):
    """One message as it was read; ``tensors`` is ``None`` if its body was let pass by."""

    header: Header
    tensors: Sequence[Tensor] | None


class FrameWriter:
    """Frames on their way out of one stream, in order; holds what the stream did not take yet."""

    def __init__(self) -> None:
        self.waiting: list[memoryview] = []
        """What has not left yet; for others to look at."""

    def put(self, frame: Sequence[memoryview]) -> None:
        """Adds a frame behind those that wait."""
        self.waiting.extend(frame)

    def send(self, frame: Sequence[memoryview], stream: Stream) -> None:
        """Adds a frame, and gives the stream what it takes."""
        if not self.waiting:
            taken = stream.send(frame)
            if taken == sum(map(len, frame)):
                return
            self.waiting.extend(frame)
            self._drop(taken)
        else:
            self.waiting.extend(frame)
        self.flush(stream)

    def flush(self, stream: Stream) -> int:
        """Gives the stream what it takes; returns how many bytes that was."""
        total = 0
        while self.waiting:
            taken = stream.send(self.waiting)
            if not taken:
                break
            total += taken
            self._drop(taken)
        return total

    def _drop(self, taken: int) -> None:
        whole = 0
        while taken and taken >= len(self.waiting[whole]):
            taken -= len(self.waiting[whole])
            whole += 1
        del self.waiting[:whole]
        if taken:
            self.waiting[0] = self.waiting[0][taken:]


class FrameReader:
    """Reads frames from one stream, as far as it has come, and believes nothing.

    Args:
        limits: what the peer may send.
        accept: sees each checked header before its body is read; it may ``postpone`` the frame.
    """

    def __init__(self, limits: Limits, accept: Accept) -> None:
        self._limits = limits
        self._accept = accept
        # What came and was not looked at yet: a small frame takes one call of the kernel, not three.
        self._ahead = bytearray(0)
        self._view = memoryview(self._ahead)
        self._start = self._end = 0
        self.received = 0
        """Bytes since the reader was made: progress, for whoever watches for silence."""
        self._postponed = False
        self._restart()

    def _restart(self) -> None:
        self._preamble: tuple[int, int, int, int, int] | None = None
        self._header: Header | None = None
        self._accepted = False
        self._tensors: Sequence[Tensor] | None = ()
        self._skip = 0
        self._views: list[memoryview] = []

    def idle(self) -> bool:
        """Whether the reader stands between two frames, and has nothing of the next."""
        return self._preamble is None and self._start == self._end

    def holds_more(self) -> bool:
        """Whether bytes were received that belong to the next frame."""
        return self._start != self._end

    def postpone(self) -> None:
        """Called from ``accept``: this frame is not taken now; the next ``advance`` asks again."""
        self._postponed = True

    def advance(self, stream: Stream) -> Frame | None:
        """The next frame if it is complete, ``None`` once the stream has nothing more for now, or it is postponed.

        Raises:
            ProtocolError: the bytes are no frame, or break a limit; the stream is of no further use.
            ConnectionError: the stream has ended.
        """
        if self._preamble is None:
            while self._end - self._start < _PREAMBLE.size:
                if not self._fetch(stream, _PREAMBLE.size):
                    return None
            self._read_preamble()
        assert self._preamble is not None
        kind, length, body, checksum, start = self._preamble
        if self._header is None:
            while self._end - self._start < length:
                if not self._fetch(stream, length):
                    return None
            self._header = self._read_header(kind, length, body, checksum, start)
        if not self._accepted and not self._place(self._header, body):
            return None
        if (self._views or self._skip) and not self._fill(stream):
            return None
        frame = Frame(self._header, self._tensors)
        for tensor in frame.tensors or ():
            if tensor.dtype is torch.bool and not check_bools(tensor):
                raise ProtocolError("a bool tensor holds bytes other than 0 and 1")
        self._restart()
        return frame

    def _fetch(self, stream: Stream, least: int) -> int:
        """Receives what there is behind what lies ahead, in a buffer that takes ``least`` bytes at least."""
        waiting = self._end - self._start
        if not waiting and least <= len(self._ahead):
            self._start = self._end = 0
        elif self._start or least > len(self._ahead):
            rest = bytes(self._view[self._start : self._end])
            if least > len(self._ahead):
                self._ahead = bytearray(max(least, _AHEAD))
                self._view = memoryview(self._ahead)
            self._view[:waiting] = rest
            self._start, self._end = 0, waiting
        count = stream.receive_into(self._view[self._end :])
        self._end += count
        self.received += count
        return count

    def _read_preamble(self) -> None:
        start = self._start
        magic, version, kind, reserved, header, body, checksum = _PREAMBLE.unpack_from(self._ahead, start)
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
        begun = zlib.crc32(self._view[start : start + _CHECKED])
        self._start = start + _PREAMBLE.size
        self._preamble = kind, header, body, checksum, begun

    def _read_header(self, kind: int, length: int, body: int, checksum: int, begun: int) -> Header:
        packed = self._view[self._start : self._start + length]
        if zlib.crc32(packed, begun) != checksum:
            raise ProtocolError("the header's checksum does not match: bytes were lost or changed")
        try:
            header = _DECODERS[kind].decode(packed)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"the header of kind {Kind(kind).name} does not decode: {error}") from None
        self._start += length
        self._check_layout(header.tensors, body)
        return header

    def _place(self, header: Header, body: int) -> bool:
        """Asks where the body goes; whether it may come now."""
        tensors = self._accept(header)
        if self._postponed:
            self._postponed = False
            return False
        self._accepted = True
        self._tensors = tensors
        if tensors is None:
            self._skip = body
        elif body and body <= self._end - self._start:
            for tensor in tensors:
                if nbytes := tensor.nbytes:
                    bytes_of(tensor)[:] = self._view[self._start : self._start + nbytes]
                    self._start += nbytes
        elif body:
            self._views = [bytes_of(tensor) for tensor in tensors if tensor.numel()]
        return True

    def _fill(self, stream: Stream) -> bool:
        """Fills the places of the body; whether all of it has come."""
        while self._views:
            view = self._views[0]
            if self._start != self._end or len(view) < _AHEAD:
                if self._start == self._end and not self._fetch(stream, _AHEAD):
                    return False
                count = min(len(view), self._end - self._start)
                view[:count] = self._view[self._start : self._start + count]
                self._start += count
            else:
                count = stream.receive_into(view)
                if not count:
                    return False
                self.received += count
            if count == len(view):
                del self._views[0]
            else:
                self._views[0] = view[count:]
        while self._skip:
            if self._start == self._end and not self._fetch(stream, _AHEAD):
                return False
            count = min(self._skip, self._end - self._start)
            self._start += count
            self._skip -= count
        return True

    def _check_layout(self, headers: Sequence[TensorHeader], body: int) -> None:
        if len(headers) > self._limits.tensors:
            raise ProtocolError(f"{len(headers)} tensors are over the limit of {self._limits.tensors}")
        offset = 0
        for header in headers:
            if header.code not in DTYPES:
                raise ProtocolError(f"{header.code} is the number of no dtype")
            if len(header.shape) > self._limits.dimensions:
                raise ProtocolError(f"{len(header.shape)} dimensions are over the limit of {self._limits.dimensions}")
            nbytes = math.prod(header.shape) * DTYPES[header.code].itemsize
            if nbytes != header.nbytes or header.offset != offset:
                raise ProtocolError(
                    f"a tensor of shape {header.shape} and {header.nbytes} bytes at {header.offset} "
                    f"should be {nbytes} bytes at {offset}"
                )
            offset += nbytes
            # Zero-size shapes of huge sizes overflow torch's strides though they hold nothing.
            if not nbytes and math.prod(max(size, 1) for size in header.shape) > _MOST_BYTES:
                raise ProtocolError(f"shape {header.shape} has strides that no tensor can have")
        if offset != body:
            raise ProtocolError(f"the tensors are {offset} bytes, the body {body}")
