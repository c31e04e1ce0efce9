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
allocates nothing unchecked: lengths are checked against their limits before the header is read, shapes against lengths
before a tensor is made, and whoever reads sees the header before it gives the body its memory.

``Wire`` is the one place where a body is written to a stream, and the one where it is read.
"""

from __future__ import annotations

import math
import struct
import threading
import zlib
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import msgspec
import torch
from torch import Tensor

from anabranch.errors import ProtocolError
from anabranch.tensors.dtypes import DTYPE_CODES, DTYPES, as_bytes
from anabranch.transport.streams import Stream

MAGIC = b"ANBR"
VERSION = 2
_PREAMBLE = struct.Struct("<4sBBHIQ4xI")
_CHECKED = _PREAMBLE.size - 4
_VERSION_AT = 4
_MOST_BYTES = 1 << 62
_MOST_HEADER = 64 << 10  # bytes
_MOST_DIMENSIONS = 8
MOST_TENSORS = 64
"""The most tensors in a frame."""
MOST_BODY = 1 << 30
"""The most bytes of a frame's tensors together, unless a server says otherwise."""
_AHEAD = 16 << 10

_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MOST_BYTES)]
# NaN and infinity are refused: both would make waits unbounded.
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
_Word: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]


class TensorHeader(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One tensor of a body, before its bytes arrive."""

    code: int
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=_MOST_DIMENSIONS)]
    offset: _Size
    nbytes: _Size


_Tensors: TypeAlias = Annotated[tuple[TensorHeader, ...], msgspec.Meta(max_length=MOST_TENSORS)]


class Hello(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The first frame of each side: seconds between a server's beats."""

    heartbeat: _Seconds = 0.0
    tensors: _Tensors = ()


class RequestHeader(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The header of a client's request.

    ``epoch`` and ``sequence`` identify the request for ever, on any connection; no request of this epoch below
    ``settled`` will ever be retried. An empty epoch marks an idempotent request. The answer repeats ``sequence``.
    A client's first one is random, so that a trace tells the requests of several clients apart.
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
    """The header of a server's answer to the request of that ``sequence``."""

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

# A kind's number never changes its meaning.
_KINDS: dict[type[Header], int] = {Hello: 1, RequestHeader: 2, ReplyHeader: 3, FailureFrame: 4, Heartbeat: 5}
_DECODERS: dict[int, msgspec.msgpack.Decoder[Header]] = {
    kind: msgspec.msgpack.Decoder(header) for header, kind in _KINDS.items()
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
    bodies: list[memoryview] = []
    offset = 0
    if tensors:
        if len(tensors) > MOST_TENSORS:
            raise ValueError(
                f"a frame carries at most {MOST_TENSORS} tensors, got {len(tensors)}; send fewer at a time"
            )
        described: list[TensorHeader] = []
        for tensor in tensors:
            shape = tuple(tensor.shape)
            if len(shape) > _MOST_DIMENSIONS:
                raise ValueError(f"only tensors of at most {_MOST_DIMENSIONS} dimensions can be sent, got {shape}")
            memory = memory_to_send(tensor)
            nbytes = len(memory)
            described.append(TensorHeader(DTYPE_CODES[tensor.dtype], shape, offset, nbytes))
            if nbytes:
                offset += nbytes
                bodies.append(memory)
        header = msgspec.structs.replace(header, tensors=tuple(described))
    packed = _ENCODER.encode(header)
    if len(packed) > _MOST_HEADER:
        raise ValueError(f"the header is {len(packed)} bytes, over the {_MOST_HEADER} that a frame carries; send less")
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


_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_making = threading.Lock()


def allocate(headers: Sequence[TensorHeader]) -> list[Tensor]:
    """Return new tensors in main memory, with undefined contents, for the body that ``headers`` describe."""
    tensors = []
    for header in headers:
        tensors.append(torch.empty(header.shape, dtype=DTYPES[header.code], device="cpu"))  # noqa: PERF401
    return tensors


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
    decoder = _decoders.get(kind)
    if decoder is None:
        # Making a decoder takes many times as long as using it. Under a lock: msgspec caches type information on a
        # struct, and a half-built cache crashes a second thread.
        with _making:
            decoder = _decoders.get(kind) or msgspec.msgpack.Decoder(kind)
            _decoders[kind] = decoder
    try:
        return cast("_T", decoder.decode(payload))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the payload is not a {kind}: {error}") from None


# Dtypes that Python's memoryview knows: their bytes are read without another tensor.
_PLAIN = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8})


def memory_to_send(tensor: Tensor) -> memoryview:
    """Return the bytes of ``tensor`` as they are sent: without a copy where it is plain, contiguous and on the CPU.

    Raises:
        TypeError: its layout or dtype cannot be sent.
    """
    if tensor.dtype in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested and tensor.is_contiguous():
        # numpy refuses tensors on a device, conjugated or negated, memoryview those of no bytes.
        try:
            return (tensor.detach() if tensor.requires_grad else tensor).numpy().data.cast("B")
        except (RuntimeError, TypeError):
            pass
    if tensor.is_nested:
        raise TypeError("a nested tensor cannot cross a boundary; send torch.nested.to_padded_tensor(tensor, 0.0)")
    if tensor.is_meta:
        raise TypeError("a tensor on the meta device has no values that could cross a boundary")
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"only strided tensors cross a boundary, got {tensor.layout}; send indices and values separately"
        )
    if tensor.dtype not in DTYPE_CODES:
        raise TypeError(f"{tensor.dtype} cannot cross a boundary; allowed are {', '.join(map(str, DTYPE_CODES))}")
    return bytes_of(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous())


def bytes_of(tensor: Tensor) -> memoryview:
    r"""Return the memory of a contiguous tensor on the CPU, writable, without a copy.

    >>> memory = bytes_of(torch.tensor([1, 2], dtype=torch.int16))
    >>> bytes(memory)
    b'\x01\x00\x02\x00'
    """
    if tensor.dtype in _PLAIN and tensor.numel() > 1:
        return tensor.numpy().data.cast("B")
    return as_bytes(tensor).numpy().data


class Wire:
    """Frames over one stream: the place where a body is written, and the place where one is read.

    ``header`` returns the next frame's header, ``receive`` fills the memory that its body was given. Neither blocks,
    and no byte that arrives is trusted: a ``ProtocolError`` means that the stream cannot be used any more, a
    ``ConnectionError`` that it has ended.

    Args:
        stream: carries the bytes.
        max_body: bytes of tensors that the peer may send in a frame.

    Attributes:
        waiting: the bytes to send that the stream has not taken yet.
        received: bytes since the wire was made: a sign of progress for timeouts.
        more: true after a frame if bytes of the next have come.
    """

    def __init__(self, stream: Stream, max_body: int = MOST_BODY) -> None:
        self.stream = stream
        self.waiting: list[memoryview] = []
        self.received = 0
        self.more = False
        self._max_body = max_body
        # Bytes received and not yet parsed: a small frame takes one system call, not three.
        self._ahead = bytearray(0)
        self._view = memoryview(self._ahead)
        self._start = self._end = 0
        self._body = 0
        self._inside = False
        self._empty: list[memoryview] = []
        self._skip = 0

    def send(self, frame: Sequence[memoryview] = ()) -> int:
        """Send what waits, and then ``frame``, as far as the stream takes it; returns the number of bytes."""
        waiting = self.waiting
        waiting.extend(frame)
        total = 0
        while waiting:
            taken = self.stream.send(waiting)
            if not taken:
                break
            total += taken
            whole = 0
            for buffer in waiting:
                if taken < len(buffer):
                    break
                taken -= len(buffer)
                whole += 1
            del waiting[:whole]
            if taken:
                waiting[0] = waiting[0][taken:]
        return total

    def idle(self) -> bool:
        """Return True between two frames, without bytes of the next."""
        return not self._inside and self._start == self._end

    def drop(self) -> None:
        """Free all memory, of frames in either direction."""
        self.waiting.clear()
        self._empty = []
        self._view = memoryview(b"")
        self._ahead = bytearray(0)
        self._start = self._end = 0

    def header(self) -> Header | None:
        """Return the next frame's header, checked, once it has arrived; its body is then to be received."""
        while (came := self._end - self._start) < _PREAMBLE.size:
            if came > _VERSION_AT:
                # Another version's preamble may be shorter, and its frame with it.
                self._check_version()
            if not self._fetch(_PREAMBLE.size):
                return None
        magic, version, kind, flags, length, body, checksum = _PREAMBLE.unpack_from(self._ahead, self._start)
        if magic != MAGIC or version != VERSION:
            self._check_version()
        if kind not in _DECODERS or flags:
            raise ProtocolError(f"there is no frame of kind {kind} with flags {flags:#x}")
        if length > _MOST_HEADER:
            raise ProtocolError(f"a header of {length} bytes is over the limit of {_MOST_HEADER}")
        if body > self._max_body:
            raise ProtocolError(f"a body of {body} bytes is over the limit of {self._max_body}")
        while self._end - self._start < _PREAMBLE.size + length:
            if not self._fetch(_PREAMBLE.size + length):
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
            raise ProtocolError(f"the header of kind {kind} does not decode: {error}") from None
        self._start = begin + length
        offset = 0
        for tensor in header.tensors:
            shape, nbytes = tensor.shape, tensor.nbytes
            dtype = DTYPES.get(tensor.code)
            if dtype is None:
                raise ProtocolError(f"{tensor.code} is not the number of a dtype")
            expected = math.prod(shape) * dtype.itemsize
            if nbytes != expected or tensor.offset != offset:
                raise ProtocolError(
                    f"a tensor of shape {shape} and {nbytes} bytes at {tensor.offset} "
                    f"should be {expected} bytes at {offset}"
                )
            offset += nbytes
            # Huge shapes with a zero size overflow torch's strides although they hold nothing.
            if not nbytes and math.prod(max(size, 1) for size in shape) > _MOST_BYTES:
                raise ProtocolError(f"shape {shape} has strides that are impossible for a tensor")
        if offset != body:
            raise ProtocolError(f"the tensors are {offset} bytes, the body {body}")
        self._body, self._inside = body, True
        return header

    def receive(self, tensors: Sequence[Tensor] | None) -> bool:
        """Fill ``tensors``, made for the present header, with the body; true once it is whole. ``None`` skips it.

        Called again, with the same tensors, it goes on.
        """
        empty = self._empty
        if self._body:
            if tensors is None:
                self._skip = self._body
            else:
                for tensor in tensors:
                    if tensor.numel():
                        empty.append(bytes_of(tensor))
            self._body = 0
        while empty:
            size = len(empty[0])
            if not (ahead := self._end - self._start):
                if size < _AHEAD:
                    if not self._fetch(_AHEAD):
                        return False
                    continue
                count = self.stream.receive_into(empty[0])
                if not count:
                    return False
                self.received += count
            else:
                count = min(size, ahead)
                empty[0][:count] = self._view[self._start : self._start + count]
                self._start += count
            if count == size:
                del empty[0]
            else:
                empty[0] = empty[0][count:]
        while self._skip:
            if self._start == self._end and not self._fetch(_AHEAD):
                return False
            count = min(self._skip, self._end - self._start)
            self._start += count
            self._skip -= count
        for tensor in tensors or ():
            # Other bytes than 0 and 1 in a bool break torch's kernels.
            if tensor.dtype is torch.bool and tensor.numel() and tensor.reshape(-1).view(torch.uint8).max() > 1:
                raise ProtocolError("a bool tensor holds bytes other than 0 and 1")
        self._inside, self.more = False, self._start != self._end
        return True

    def _fetch(self, least: int) -> int:
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
        count = self.stream.receive_into(self._view[end:] if end else self._view)
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
