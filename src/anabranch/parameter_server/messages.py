"""Messages between workers and shards: the payload of each verb, beside the tensors.

A message covers several tables and parameters at once, so that all requests of a step to a shard are one message. Their
ids are sent in one tensor: int32 if every id of all its tables fits, else int64. Their numbers are laid out by
``packing.py``, one part after the other, so the number of tensors never grows with the number of tables.

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

import struct
from dataclasses import dataclass
from typing import Annotated

import msgspec

from anabranch.tensors.packing import Compression

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
