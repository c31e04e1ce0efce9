"""Frames: the layout of a message in bytes, and the checks on every byte from outside.

::

    preamble, 28 bytes, little endian
    +-------+---------+------+-------+---------------+-------------+-------+-------+
    | ANBR  | version | kind | zeros | header length | body length | zeros | crc32 |
    |  4 s  |   u8    |  u8  |  u16  |      u32      |     u64     |  u32  |  u32  |
    +-------+---------+------+-------+---------------+-------------+-------+-------+
    header: msgpack of the kind's struct, an array; lists each tensor's dtype, shape, offset and bytes
    body:   the tensors' memory, one after the other, nothing between

The checksum covers the preamble before it and the header: CRC-32 as in Ethernet (polynomial 0x04C11DB7). TLS
authenticates every record, and bytes through a Unix socket cross no wire, so bodies have none.

Magic and version have the same place in every version, so peers of two versions can refuse each other. A reader
allocates nothing unchecked: lengths are checked against ``Limits`` before the header is read, shapes against lengths
before a tensor is made, and the caller's ``accept`` sees the header before the body is given memory.
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
from anabranch.tensors.dtypes import DTYPE_CODES, DTYPES
from anabranch.transport.network.streams import Stream
from anabranch.transport.tensor_memory import bytes_of, check_bools, dense_on_cpu, plain_bytes

__all__ = [
    "Accept",
    "FailureFrame",
    "Frame",
    "FrameKind",
    "FrameReader",
    "FrameWriter",
    "Header",
    "Heartbeat",
    "Hello",
    "Limits",
    "ReplyHeader",
    "RequestHeader",
    "TensorHeader",
    "allocate",
    "encode",
    "frame_size",
    "pack",
    "unpack",
    "unpacker",
]

MAGIC = b"ANBR"
VERSION = 2
_PREAMBLE = struct.Struct("<4sBBHIQ4xI")
_CHECKED = _PREAMBLE.size - 4
_VERSION_AT = 4
_MOST_BYTES = 1 << 62
_AHEAD = 16 << 10

_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MOST_BYTES)]
# NaN and infinity are refused: both would make waits unbounded.
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
_Word: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds on what a reader accepts from a peer.

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


class FrameKind(IntEnum):
    """The kinds of frame; a number's meaning never changes."""

    HELLO = 1
    REQUEST = 2
    REPLY = 3
    FAILURE = 4
    BEAT = 5


class TensorHeader(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One tensor of a body, before its bytes arrive."""

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
    """The first frame of each side: seconds between a server's beats, and the bytes that the side accepts in a body."""

    heartbeat: _Seconds = 0.0
    body: _Size = 0
    tensors: _Tensors = ()


class RequestHeader(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The header of a client's request.

    ``epoch`` and ``sequence`` identify the request for ever, on any connection; no request of this epoch below
    ``settled`` will ever be retried. An empty epoch marks an idempotent request. The answer repeats ``sequence``, so
    that a duplicate is not mistaken for the answer to the next request. A client's first sequence is random, so that it
    does not mistake the answer to another client's request for its own.
    """

    verb: _Word
    target: _Word = ""
    epoch: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    sequence: _Size = 0
    settled: _Size = 0
    seconds: _Seconds = 0.0
    schema: Annotated[bytes, msgspec.Meta(max_length=40)] = b""
    payload: bytes = b""
    tensors: _Tensors = ()


class ReplyHeader(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Return a server's answer to the request of that ``sequence``."""

    payload: bytes = b""
    sequence: _Size = 0
    tensors: _Tensors = ()


class FailureFrame(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The reason why a server does not answer; ``failures.py`` converts errors to it and back.

    Without a ``sequence`` it concerns the connection, and its last frame.
    """

    code: _Word
    message: str = ""
    remote_type: str = ""
    remote_traceback: str = ""
    sequence: _Size | None = None
    tensors: _Tensors = ()


class Heartbeat(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A heartbeat: the server is alive and still has the request."""

    tensors: _Tensors = ()


_T = TypeVar("_T")
Header: TypeAlias = Hello | RequestHeader | ReplyHeader | FailureFrame | Heartbeat
_HeaderT = TypeVar("_HeaderT", Hello, RequestHeader, ReplyHeader, FailureFrame, Heartbeat)
Accept: TypeAlias = Callable[[Header], Sequence[Tensor] | None]
"""Looks at a header before its body is read: returns the tensors to fill, ``None`` to skip the body, or raises."""

_KINDS: dict[type[Header], FrameKind] = {
    Hello: FrameKind.HELLO,
    RequestHeader: FrameKind.REQUEST,
    ReplyHeader: FrameKind.REPLY,
    FailureFrame: FrameKind.FAILURE,
    Heartbeat: FrameKind.BEAT,
}
_DECODERS: dict[int, msgspec.msgpack.Decoder[Header]] = {
    int(kind): msgspec.msgpack.Decoder(header) for header, kind in _KINDS.items()
}
_ENCODER = msgspec.msgpack.Encoder()


def encode(header: _HeaderT, tensors: Sequence[Tensor] = ()) -> list[memoryview]:
    """Return the buffers of a frame, in order; tensors here are not copied.

    >>> frame = encode(RequestHeader("pull", "emb"), [torch.zeros(2, 3)])
    >>> [len(buffer) for buffer in frame][1:]
    [24]

    Raises:
        ValueError: more tensors, dimensions or header bytes than a frame may carry.
        TypeError: a tensor that cannot be sent.
    """
    limits = _LIMITS
    bodies: list[memoryview] = []
    offset = 0
    if tensors:
        if len(tensors) > limits.tensors:
            raise ValueError(
                f"a frame carries at most {limits.tensors} tensors, got {len(tensors)}; send fewer at a time"
            )
        described: list[TensorHeader] = []
        for tensor in tensors:
            shape = tuple(tensor.shape)
            if len(shape) > limits.dimensions:
                raise ValueError(f"only tensors of at most {limits.dimensions} dimensions can be sent, got {shape}")
            memory = plain_bytes(tensor)
            if memory is None:
                tensor = dense_on_cpu(tensor)
                memory = bytes_of(tensor)
            nbytes = len(memory)
            described.append(TensorHeader(DTYPE_CODES[tensor.dtype], shape, offset, nbytes))
            if nbytes:
                offset += nbytes
                bodies.append(memory)
        header = msgspec.structs.replace(header, tensors=tuple(described))
    packed = _ENCODER.encode(header)
    if len(packed) > limits.header:
        raise ValueError(f"the header is {len(packed)} bytes, over the {limits.header} that a frame carries; send less")
    kind = _KINDS[type(header)]
    start = _PREAMBLE.pack(MAGIC, VERSION, kind, 0, len(packed), offset, 0)[:_CHECKED]
    whole = zlib.crc32(packed, zlib.crc32(start))
    return [memoryview(start + whole.to_bytes(4, "little") + packed), *bodies]


def frame_size(data: bytes | bytearray) -> int | None:
    """Return the bytes of the frame at the start of ``data``; ``None`` while its preamble is incomplete."""
    if len(data) < _PREAMBLE.size:
        return None
    _, _, _, _, header, body, _ = _PREAMBLE.unpack_from(data)
    return _PREAMBLE.size + int(header) + int(body)


_unpackers: dict[Any, Callable[[bytes], Any]] = {}
_making = threading.Lock()


def allocate(headers: Sequence[TensorHeader]) -> list[Tensor]:
    """Return new tensors in main memory, with undefined contents, for the body that ``headers`` describe."""
    return [torch.empty(header.shape, dtype=DTYPES[header.code], device="cpu") for header in headers]


def pack(value: object) -> bytes:
    """Pack a request's or answer's payload: numbers, texts, bytes, lists, dicts, msgspec structs."""
    return _ENCODER.encode(value)


def unpack(payload: bytes, kind: type[_T]) -> _T:
    """Unpack the payload as a ``kind``, checked field by field.

    >>> unpack(pack({"ids": [1, 2]}), dict[str, list[int]])
    {'ids': [1, 2]}

    Raises:
        ProtocolError: it is of another kind.
    """
    return unpacker(kind)(payload)


def unpacker(kind: type[_T]) -> Callable[[bytes], _T]:
    """``unpack`` prepared for one kind: making a decoder takes many times as long as using it.

    Built under a lock: msgspec caches type information on a struct, and a half-built cache crashes a second thread.
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
            raise ProtocolError(f"the payload is not a {kind}: {error}") from None

    return unpack_it


class Frame(msgspec.Struct, frozen=True, eq=False):
    """One message as read; ``tensors`` is ``None`` if its body was skipped."""

    header: Header
    tensors: Sequence[Tensor] | None


class FrameWriter:
    """Outgoing frames of one stream, in order; holds the bytes that the stream has not taken yet."""

    def __init__(self) -> None:
        self.waiting: list[memoryview] = []
        """The bytes not sent yet; other classes only read it."""

    def put(self, frame: Sequence[memoryview]) -> None:
        """Add a frame after the waiting ones."""
        self.waiting.extend(frame)

    def send(self, frame: Sequence[memoryview], stream: Stream, nbytes: int = -1) -> None:
        """Add a frame, ``nbytes`` in total, and send as much as the stream takes."""
        if not self.waiting:
            taken = stream.send(frame)
            if taken == (sum(map(len, frame)) if nbytes < 0 else nbytes):
                return
            self.waiting.extend(frame)
            self._drop(taken)
        else:
            self.waiting.extend(frame)
        self.flush(stream)

    def flush(self, stream: Stream) -> int:
        """Send as much as the stream takes; returns the number of bytes."""
        total = 0
        while waiting := self.waiting:
            taken = stream.send(waiting)
            if not taken:
                break
            total += taken
            if taken == sum(map(len, waiting)):
                waiting.clear()
            else:
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


def _nothing_more(header: Header) -> None:
    raise ConnectionResetError("the connection was closed on this side")


class FrameReader:
    """Reads frames from one stream incrementally, and trusts no byte of it.

    Args:
        limits: the sizes that the peer may send.
        accept: sees each checked header before its body is read; it may ``postpone`` the frame.
    """

    def __init__(self, limits: Limits, accept: Accept) -> None:
        self._limits = limits
        self._accept = accept
        # Bytes received and not yet parsed: a small frame takes one system call, not three.
        self._ahead = bytearray(0)
        self._view = memoryview(self._ahead)
        self._start = self._end = 0
        self.received = 0
        """Bytes since the reader was made: a sign of progress for timeouts."""
        self._postponed = False
        self._restart()

    def _restart(self) -> None:
        self._header: Header | None = None
        self._body = 0
        self._accepted = False
        self._tensors: Sequence[Tensor] | None = ()
        self._skip = 0
        self._views: list[memoryview] = []

    def idle(self) -> bool:
        """Return True if the reader is between two frames, without bytes of the next."""
        return self._header is None and self._start == self._end

    def holds_more(self) -> bool:
        """Return True if bytes were received that belong to the next frame."""
        return self._start != self._end

    def drop(self) -> None:
        """Free its memory, and its owner, which its ``accept`` holds in a cycle until the next collection."""
        self._restart()
        self._accept = _nothing_more
        self._view = memoryview(b"")
        self._ahead = bytearray(0)
        self._start = self._end = 0

    def postpone(self) -> None:
        """Postpone this frame, from ``accept``; the next ``advance`` offers it again."""
        self._postponed = True

    def advance(self, stream: Stream) -> Frame | None:
        """Return the next frame if it is complete, ``None`` once the stream has nothing more for now, or it is
        postponed.

        Raises:
            ProtocolError: the bytes are not a frame, or break a limit; the stream cannot be used any more.
            ConnectionError: the stream has ended: the request or answer must be sent again.
        """
        header = self._header
        if header is None:
            header = self._header = self._read_head(stream)
            if header is None:
                return None
        if not self._accepted and not self._place(header):
            return None
        if (self._views or self._skip) and not self._fill(stream):
            return None
        frame = Frame(header, self._tensors)
        if frame.tensors:
            self._check_content(frame.tensors)
        # The rest is as it was when the frame began.
        self._header, self._accepted, self._tensors = None, False, ()
        return frame

    def _fetch(self, stream: Stream, least: int) -> int:
        """Receive all available bytes after those already buffered, in a buffer of at least ``least`` bytes."""
        start, end = self._start, self._end
        if start == end and least <= len(self._ahead):
            start = end = 0
        elif start or least > len(self._ahead):
            rest = bytes(self._view[start:end])
            if least > len(self._ahead):
                self._ahead = bytearray(max(least, _AHEAD))
                self._view = memoryview(self._ahead)
            start, end = 0, end - start
            self._view[:end] = rest
        count = stream.receive_into(self._view[end:] if end else self._view)
        self._start, self._end = start, end + count
        self.received += count
        return count

    def _check_version(self) -> None:
        magic = bytes(self._view[self._start : self._start + _VERSION_AT])
        version = self._ahead[self._start + _VERSION_AT]
        if magic != MAGIC:
            raise ProtocolError(f"the first bytes are {magic!r}, not {MAGIC!r}: the peer uses another protocol")
        if version != VERSION:
            raise ProtocolError(
                f"the peer uses version {version} of the protocol, this side version {VERSION}; update one"
            )

    def _check_content(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor.dtype is torch.bool and not check_bools(tensor):
                raise ProtocolError("a bool tensor holds bytes other than 0 and 1")

    def _read_head(self, stream: Stream) -> Header | None:
        """Return the next frame's header, checked; ``None`` while it is incomplete."""
        while (came := self._end - self._start) < _PREAMBLE.size:
            if came > _VERSION_AT:
                # Another version's preamble may be shorter, and its frame with it.
                self._check_version()
            if not self._fetch(stream, _PREAMBLE.size):
                return None
        magic, version, kind, flags, length, body, checksum = _PREAMBLE.unpack_from(self._ahead, self._start)
        if magic != MAGIC or version != VERSION:
            self._check_version()
        if kind not in _DECODERS or flags:
            raise ProtocolError(f"there is no frame of kind {kind} with flags {flags:#x}")
        limits = self._limits
        if length > limits.header:
            raise ProtocolError(f"a header of {length} bytes is over the limit of {limits.header}")
        if body > limits.body:
            raise ProtocolError(f"a body of {body} bytes is over the limit of {limits.body}")
        while self._end - self._start < _PREAMBLE.size + length:
            if not self._fetch(stream, _PREAMBLE.size + length):
                # The received bytes are parsed again with the next ones.
                return None
        start, view = self._start, self._view
        begin = start + _PREAMBLE.size
        packed = view[begin : begin + length]
        if zlib.crc32(packed, zlib.crc32(view[start : start + _CHECKED])) != checksum:
            raise ProtocolError("the header's checksum does not match: bytes were lost or changed")
        try:
            header = _DECODERS[kind].decode(packed)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"the header of kind {FrameKind(kind).name} does not decode: {error}") from None
        self._start = begin + length
        if body or header.tensors:
            self._check_layout(header.tensors, body)
        self._body = body
        return header

    def _place(self, header: Header) -> bool:
        """Get the body's memory from ``accept``; false if the frame is postponed."""
        tensors = self._accept(header)
        body = self._body
        if self._postponed:
            self._postponed = False
            return False
        self._accepted = True
        self._tensors = tensors
        if not body:
            return True
        if tensors is None:
            self._skip = body
        elif body <= self._end - self._start:
            for tensor in tensors:
                if nbytes := tensor.nbytes:
                    bytes_of(tensor)[:] = self._view[self._start : self._start + nbytes]
                    self._start += nbytes
        else:
            self._views = [bytes_of(tensor) for tensor in tensors if tensor.numel()]
        return True

    def _fill(self, stream: Stream) -> bool:
        """Fill the body's memory; true once all of it has arrived."""
        views = self._views
        while views:
            view = views[0]
            size = len(view)
            start = self._start
            ahead = self._end - start
            if not ahead and size >= _AHEAD:
                count = stream.receive_into(view)
                if not count:
                    return False
                self.received += count
            elif ahead:
                count = min(size, ahead)
                view[:count] = self._view[start : start + count]
                self._start = start + count
            elif self._fetch(stream, _AHEAD):
                continue
            else:
                return False
            if count == size:
                del views[0]
            else:
                views[0] = view[count:]
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
        most = self._limits.dimensions
        for header in headers:
            shape, nbytes = header.shape, header.nbytes
            dtype = DTYPES.get(header.code)
            if dtype is None:
                raise ProtocolError(f"{header.code} is not the number of a dtype")
            if len(shape) > most:
                raise ProtocolError(f"{len(shape)} dimensions are over the limit of {most}")
            expected = math.prod(shape) * dtype.itemsize
            if nbytes != expected or header.offset != offset:
                raise ProtocolError(
                    f"a tensor of shape {shape} and {nbytes} bytes at {header.offset} "
                    f"should be {expected} bytes at {offset}"
                )
            offset += nbytes
            # Huge shapes with a zero size overflow torch's strides although they hold nothing.
            if not nbytes and math.prod(max(size, 1) for size in shape) > _MOST_BYTES:
                raise ProtocolError(f"shape {shape} has strides that are impossible for a tensor")
        if offset != body:
            raise ProtocolError(f"the tensors are {offset} bytes, the body {body}")
