"""Messages between workers and shards: the payload of each verb, beside the tensors.

A message covers several tables and parameters at once, so that all requests of a step to a shard are one message. Their
ids are sent in one tensor: int32 if every id of all its tables fits, else int64. Their numbers are in one tensor for
each dtype, one part after the other, so the number of tensors never grows with the number of tables.

Ids of one part that differ in kind are ordered by kind, and the part gives the number of each, so no id carries fields
that its kind does not need::

    pull   with state │ not known │ known        ages of the known ones only
    push   of one step │ sums over several       squares of the sums only

Whether a known row has changed is decided by steps, not by versions of rows: rows are read as of the table's step, and
a client that holds them sends that step with its next request. A row has changed if its last step is later. Steps are
not comparable if a shard did not continue from its earlier state: it was restarted, loaded rows or dropped tables. It
then has a new ``generation``, and for a client with an older one every known row has changed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Literal, cast

import msgspec
import torch
from torch import Tensor

from anabranch.errors import NonFinite, SchemaError
from anabranch.tensors.blocks import from_blocks, in_half, to_blocks

Compression = Literal["bfloat16", "int8"]

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
_World = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
_Number = Annotated[int, msgspec.Meta(ge=-1, le=1 << 62)]


class WorkerProgress(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A worker's progress, in every message that it sends as one; releases all steps before ``done``.

    ``number`` counts the memberships: a shard takes no message of a lower one, and the first of a higher one sets its
    ``world`` of members. ``done`` is the number of steps whose outcome the worker has. ``last`` is the newest of them
    that is to be applied, -1 for none yet, and ``scale`` the factor of its gradients; the steps after it are dropped.
    One is enough: a step is only begun to be applied when every shard has heard of the one before.
    """

    number: _Count = 0
    world: _World = 1
    done: _Count = 0
    last: _Number = -1
    scale: float = 1.0


class Merging(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A worker's gradients among those of the others in one step.

    ``weight`` is that of this worker's: its rows, if they are means over them. With ``mean`` gradients are averaged by
    weight, else added up. With ``hold`` they are kept until every worker's ``WorkerProgress`` releases the step.
    """

    weight: float = 1.0
    mean: bool = True
    hold: bool = False


class PushPart(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One table's or parameter's share of a push: the number of its ids (0 for a dense parameter), and its rule.

    The last ``sums`` of the ids have gradients that are sums over several steps.
    """

    name: str
    count: _Count = 0
    rule: int = 0
    sums: _Count = 0


class PullPart(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One table's or parameter's share of a pull: the number of its ids (0 for a dense parameter).

    The first ``with_state`` of them come with their optimizer's state, as ``Table.pull_with_state`` gives it. The
    last ``known`` come only if they have changed since the table's step ``since``, less each one's age.
    """

    name: str
    count: _Count = 0
    with_state: _Count = 0
    known: _Count = 0
    since: _Count = 0


class InitMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Makes a table by its ``TableSpec``; or a dense parameter, whose value is the message's one tensor."""

    name: str
    rule: dict[str, float | str | bool]
    table: dict[str, object] | None = None


class DropMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Drops a table or a parameter, so that a checkpoint's can take its place."""

    name: str


class RestoreMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Restores rows, or the step, of a table of a checkpoint, or a parameter, state and stamps included.

    Tensors of a table: the constants of its steps so far, before any rows; or, once it is at that step, those of a
    ``RowBlock``. Of a parameter: its value and states.
    """

    name: str
    step: _Count


class ExportMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Asks for a parameter, as ``RestoreMessage`` has it."""

    name: str


class SnapshotMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Begins a snapshot of ``names``, or of everything, if ``number`` is 0; else asks for its next part.

    Parts are asked for one after the other, and each again if its answer was lost. ``part`` -1 asks for none, so that
    the snapshot lives on; -2 ends it.
    """

    number: _Count = 0
    part: Annotated[int, msgspec.Meta(ge=-2, le=1 << 40)] = -1
    names: list[str] | None = None


class SnapshotPart(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A part of a snapshot: the group ``name`` of tensors that belong to no row, or a ``Piece`` of rows."""

    name: str
    tables: list[int] = []
    counts: list[int] = []


class NormMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Asks for the sum of squares of the merged held pushes of ``step`` on this shard."""

    rank: _Rank
    step: _Count
    turn: WorkerProgress | None = None


class ReleaseMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Says how far a worker is, and nothing else; a negative rank says it of all: their job has ended there.

    ``gone`` are ranks that have closed or are lost: where workers run apart, no read waits for them any more.
    """

    rank: _Number
    turn: WorkerProgress
    gone: list[_Rank] = []


class StepMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """In a log only: the held step was applied, times ``scale``, or dropped if that is ``None``."""

    step: _Count
    scale: float | None


class BarrierMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Announces a worker at its ``number``-th barrier of ``world`` workers."""

    rank: _Rank
    world: _World
    number: _Count


class JoinMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Registers a worker of a job, with the order of the job's steps; ``number`` as in ``WorkerProgress``.

    With a ``turn`` it is a newcomer, and the order of the others goes on.
    """

    rank: _Rank
    world: _World
    consistency: str
    step: _Count = 0
    number: _Count = 0
    turn: WorkerProgress | None = None


class PullMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Reads rows and parameters. Tensors: all ids; and, if any are known, the age of each that is, int16.

    ``generation`` is the shard's, as of the known rows. ``rank`` is -1 for a client without a job; others are
    answered as of ``step``, by the job's consistency.
    """

    parts: list[PullPart]
    training: bool = False
    generation: _Count = 0
    rank: _Number = -1
    step: _Number = -1
    compression: Compression | None = None
    turn: WorkerProgress | None = None


class PullReply(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The shard's generation, and of each part the step of its rows.

    ``pushed`` is the number of steps that every worker of the job has pushed.

    Tensors: if any ids were known, a bit for each that is, in their order, set if it has changed; eight in a byte, the
    first the highest. Then numbers: of each part with any, the rows that come with their state; then of each part the
    rows that come without, in the order of their ids, or the parameter.
    """

    generation: _Count
    steps: list[_Count]
    pushed: _Count = 0


class PushReply(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The push's number among its client's on this shard, and its tables that have had no room for an id so far."""

    number: _Count
    full: list[str] = []


class PushMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Gradients of one step. Tensors: all ids; if any are sums, the squares of those, bfloat16; then the numbers.

    A worker's push with ``step`` -1 is outside the order of steps: it is done at once, by the worker's share in the
    last one.
    """

    parts: list[PushPart]
    rules: list[dict[str, float | str | bool]]
    rank: _Number = -1
    step: _Number = -1
    merging: Merging = Merging()
    compression: Compression | None = None
    turn: WorkerProgress | None = None


MESSAGES: dict[str, type[msgspec.Struct]] = {
    "init": InitMessage, "join": JoinMessage, "pull": PullMessage, "push": PushMessage, "restore": RestoreMessage,
    "drop": DropMessage, "step": StepMessage, "release": ReleaseMessage, "norm": NormMessage, "export": ExportMessage,
    "barrier": BarrierMessage, "snapshot": SnapshotMessage,
}  # fmt: skip
"""The message of each verb that has one."""


# --- in every request -------------------------------------------------------------------------------------------------


_FORM = struct.Struct("<16sQQII")


@dataclass(frozen=True, slots=True)
class ExpectedState:
    """The facts about the client in one request.

    Attributes:
        epoch: the client's.
        pushes: the highest number in any answer.
        incarnation: the shard's, for clients that must learn of any loss; else 0.
        shard, shards: the index of the server's endpoint in the client's list, and the length of the list; 0 shards if
            the client does not send them.
    """

    epoch: bytes
    pushes: int = 0
    incarnation: int = 0
    shard: int = 0
    shards: int = 0

    def encode(self) -> bytes:
        """Return the state as 40 bytes."""
        return _FORM.pack(self.epoch, self.pushes, self.incarnation, self.shard, self.shards)

    @classmethod
    def decode(cls, memory: bytes) -> ExpectedState | None:
        """Decode the bytes of ``encode``; ``None`` for a request without one."""
        return cls(*_FORM.unpack(memory)) if len(memory) == _FORM.size else None


class AcknowledgedPushes:
    """The numbers of one client's pushes that one shard has acknowledged.

    Attributes:
        newest: the highest; 0 without any.
        incarnation: the shard's, which the client expects; 0 for any.

    >>> pushes = AcknowledgedPushes()
    >>> for number in (1, 2, 4, 5):  # nobody ever heard of the third
    ...     pushes.add(number)
    >>> pushes.newest, pushes.cut(2), pushes.newest
    (5, 2, 2)
    """

    def __init__(self) -> None:
        self._unheard = set[int]()  # below the newest, of no answer so far
        self.newest = self.incarnation = 0

    def add(self, number: int) -> None:
        """Record ``number``, from an answer; they may arrive in another order."""
        self._unheard.update(range(self.newest + 1, number))
        self._unheard.discard(number)
        self.newest = max(self.newest, number)

    def cut(self, holds: int) -> int:
        """Remove the numbers above ``holds``; returns their number."""
        lost = 0
        while self.newest > holds or self.newest in self._unheard:
            lost += self.newest not in self._unheard
            self._unheard.discard(self.newest)
            self.newest -= 1
        return lost


# --- the numbers of a message: one flat tensor for each dtype, rows rounded if the sender requests it
#
# Each table's and parameter's share follows the previous one. Under ``"bfloat16"`` rows and their gradients are rounded
# to half their bytes, under ``"int8"`` to 8 bits with a scale of 8 bits for 16 numbers: a row of 16 is 17 bytes instead
# of 64. Numbers above 4.5e18 have no such scale and are refused under ``"int8"``; those below 1.5e-22, or some 200
# times smaller than the largest of their 16, come to 0. An optimizer's state of a row has too wide a range for 8 bits:
# it travels as bfloat16 under either. Dense parameters, ids and versions are never rounded.

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ORDER = (*FLOATS, torch.int8, torch.uint8)
_DTYPE = attrgetter("dtype")
_BLOCK = 16
_UNIT = 144
_NO_NUMBER = 255
_SCALES = torch.cat(
    [
        torch.zeros(1, device="cpu"),
        torch.exp2((torch.arange(1, 255, device="cpu") - _UNIT) / 2),
        torch.tensor([torch.nan], device="cpu"),
    ]
)
"""Value of a scale's byte: powers of the root of 2, from 3e-22 to 4e16; 0; and NaN for a block with NaN or Inf."""
_LARGEST_SCALE = _SCALES[_NO_NUMBER - 1].item()
_LARGEST_CODE = 127
_MOST_OF_HALF = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True)
class Share:
    """One table's or parameter's share of the numbers.

    Attributes:
        dtype, shape: of the tensor.
        kind: rows that may be rounded, rows with their optimizer's state, or numbers that are exact.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: Literal["exact", "rows", "states"] = "exact"

    def travels_as(self, compression: Compression | None) -> torch.dtype:
        """Return the dtype of its numbers on the wire."""
        if compression is None or self.kind == "exact":
            return self.dtype
        if compression == "int8" and self.kind == "rows":
            return torch.int8
        return self.dtype if self.dtype == torch.float16 else torch.bfloat16

    def bytes(self, compression: Compression | None) -> int:
        """Return the number of bytes of its numbers in the message."""
        kind = self.dtype if compression is None else self.travels_as(compression)
        count = math.prod(self.shape)
        return count * kind.itemsize + (-(-count // _BLOCK) if kind == torch.int8 else 0)


def check_compression(given: str | None) -> Compression | None:
    """Return ``given`` if it is a compression; else raise ``ValueError``."""
    if given not in (None, "bfloat16", "int8"):
        raise ValueError(f"rows are sent uncompressed (None), as 'bfloat16' or as 'int8', not as {given!r}")
    return cast("Compression | None", given)


def expected(
    shares: Iterable[Share], compression: Compression | None = None
) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtype and shape of each tensor that carries these shares.

    >>> expected([Share(torch.float32, (10, 16), "rows"), Share(torch.float64, (3,))], "int8")
    [(torch.float64, (3,)), (torch.int8, (160,)), (torch.uint8, (10,))]
    """
    sizes: dict[torch.dtype, int] = {}
    for share in shares:
        kind = share.dtype if compression is None else share.travels_as(compression)
        sizes[kind] = sizes.get(kind, 0) + math.prod(share.shape)
    if torch.int8 in sizes:
        sizes[torch.uint8] = -(-sizes[torch.int8] // _BLOCK)
    return [(dtype, (sizes[dtype],)) for dtype in _ORDER if dtype in sizes]


def join(tensors: Iterable[Tensor], shares: Sequence[Share], compression: Compression | None = None) -> list[Tensor]:
    """Join ``tensors``, with these shares, into the tensors to send.

    Raises:
        NonFinite: a number is too large for ``"int8"``.
    """
    alike: dict[torch.dtype, list[Tensor]] = {}
    for tensor, share in zip(tensors, shares, strict=True):
        kind = share.dtype if compression is None else share.travels_as(compression)
        flat = tensor.detach().reshape(-1)
        if kind == torch.bfloat16 and flat.dtype != kind:
            flat = in_half(flat, kind)
        alike.setdefault(kind, []).append(_in_float32(flat) if kind == torch.int8 else flat)
    whole = {kind: parts[0].contiguous() if len(parts) == 1 else torch.cat(parts) for kind, parts in alike.items()}
    joined = [whole[dtype] for dtype in FLOATS if dtype in whole]
    if torch.int8 in whole:
        joined += _in_blocks(whole[torch.int8])
    return joined


def split(flat: Sequence[Tensor], shares: Sequence[Share], compression: Compression | None = None) -> list[Tensor]:
    """Split ``flat`` into the tensors that ``join`` got, up to rounding; views of its memory where nothing was rounded.

    Raises:
        SchemaError: the numbers are not as many, or not of the dtypes, that the shares need.
    """
    needed = expected(shares, compression)
    came = [(tensor.dtype, tuple(tensor.shape)) for tensor in flat]
    if came != needed:
        raise SchemaError(f"numbers of {needed} expected, got {came}")
    return views(flat, shares, compression)


def views(flat: Sequence[Tensor], shares: Sequence[Share], compression: Compression | None = None) -> list[Tensor]:
    """``split`` of tensors that are known to be as ``expected``."""
    whole = dict(zip(map(_DTYPE, flat), flat, strict=True))
    if torch.int8 in whole:
        whole[torch.int8] = from_blocks(whole[torch.int8], _SCALES[whole[torch.uint8].long()], _BLOCK)
    places = dict.fromkeys(whole, 0)
    tensors = []
    for share in shares:
        kind = share.dtype if compression is None else share.travels_as(compression)
        first, places[kind] = places[kind], places[kind] + math.prod(share.shape)
        mine = whole[kind][first : places[kind]]
        if kind != share.dtype == torch.float16:  # which the rounding may have passed
            mine = mine.clamp(-_MOST_OF_HALF, _MOST_OF_HALF)
        tensors.append(mine.to(share.dtype).view(share.shape))
    return tensors


def largest_gradient(dtype: torch.dtype) -> float:
    """Return the magnitude above which servers refuse a gradient: the square of a sum of some would not be finite."""
    return {torch.float16: 6e4, torch.float64: 1e150}.get(dtype, 1e18)


def acceptable(flat: Sequence[Tensor], compression: Compression | None = None) -> bool:
    """Return True if gradients that travel, or are to travel, as ``flat`` are finite and none is too large."""
    for tensor in flat:
        if tensor.dtype == torch.uint8 and bool((tensor == _NO_NUMBER).any()):
            return False
        if tensor.is_floating_point() and tensor.numel():
            limit = largest_gradient(torch.bfloat16 if compression == "bfloat16" else tensor.dtype)
            limit = _LARGEST_SCALE * _LARGEST_CODE if compression == "int8" else limit
            # One vectorised pass; PyTorch takes fifty times as long for the infinity norm. NaN is passed on.
            least, most = torch.aminmax(tensor.detach())
            if not (-limit <= least.item() and most.item() <= limit):
                return False
    return True


def _in_float32(flat: Tensor) -> Tensor:
    """Round to float32; saturate overflow, which is too large for 8 bits in any case; keep NaN and Inf."""
    if flat.dtype != torch.float64:
        return flat.float()
    most = torch.finfo(torch.float32).max
    return torch.where(torch.isfinite(flat), flat.clamp(-most, most), flat).float()


def _in_blocks(flat: Tensor) -> list[Tensor]:
    said: list[Tensor] = []

    def representable(scales: Tensor) -> Tensor:
        if scales.numel() and scales.max().item() > _LARGEST_SCALE:
            _refuse_large(flat)
        said.append(_bytes_of(scales))
        return _SCALES[said[0].long()]

    codes, _ = to_blocks(flat, _BLOCK, representable)
    return [codes, *said]


def _refuse_large(flat: Tensor) -> None:
    """Raise if a finite number is too large; NaN and Inf travel, and the remote side refuses them."""
    limit = _LARGEST_SCALE * _LARGEST_CODE
    largest = torch.where(torch.isfinite(flat), flat, 0.0).abs().amax().item()
    if largest > limit:
        raise NonFinite(
            f'rows hold a number of magnitude {largest:.4g}, and compression="int8" carries at most {limit:.4g}; use '
            '"bfloat16" or None (compression= of a ParameterClient, row_compression= of an Executor)'
        )


def _bytes_of(scales: Tensor) -> Tensor:
    """Return the smallest representable scales that are not below these."""
    steps = (torch.ceil(2 * torch.log2(scales)) + _UNIT).clamp(1, _NO_NUMBER - 1)
    steps = torch.where(torch.isfinite(scales), steps, _NO_NUMBER)
    return torch.where(scales == 0, 0, steps).to(torch.uint8)
