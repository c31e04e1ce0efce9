"""What workers and shards say to one another: the payload of each verb, beside the tensors.

A message speaks of several tables and parameters at once, so that what a step asks of a shard is one message. Their
ids travel in one tensor, of int32 where every id of all its tables fits and else of int64, and their numbers as
``packing.py`` has it, each part's one after the other, so the count of tensors never grows with the count of tables.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import torch
from torch import Tensor

from anabranch.parameter_server.packing import Compression

__all__ = [
    "BarrierMessage",
    "DropMessage",
    "ExportMessage",
    "InitMessage",
    "JoinMessage",
    "NormMessage",
    "Part",
    "PullMessage",
    "PullReply",
    "PushMessage",
    "ReleaseMessage",
    "RestoreMessage",
    "WITH_STATE",
    "short_versions",
]

WITH_STATE = -2  # the version of a row that is asked for whatever its version is, and its optimizer's state with it
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
_World = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
_Number = Annotated[int, msgspec.Meta(ge=-1, le=1 << 62)]


class Part(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One table's or parameter's share of a message: how many ids it has (0 for a dense parameter), and its rule."""

    name: str
    count: _Count = 0
    rule: int = 0


class InitMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A table, by its ``TableSpec``; or a dense parameter, whose value is the message's one tensor."""

    name: str
    rule: dict[str, float | str | bool]
    table: dict[str, object] | None = None


class DropMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A table or a parameter goes, so that a checkpoint's can take its place; ``""`` drops the job's steps too."""

    name: str


class RestoreMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Rows or a parameter of a checkpoint, state and stamps included.

    Tensors of a table: ids, values, stamps, sums, usage, history; of a parameter: its value and states.
    """

    name: str
    step: _Count


class ExportMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Asks for ``rows`` rows of a table from place ``first`` on, or for a parameter, as ``RestoreMessage`` has them."""

    name: str
    first: _Count = 0
    rows: _Count = 1 << 16


class NormMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Asks for the sum of squares of what the workers' held pushes of ``step`` come to on this shard."""

    rank: _Rank
    step: _Count


class ReleaseMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The held pushes of ``step`` are applied, times ``scale``; the first worker's release does it."""

    rank: _Rank
    step: _Count
    scale: float


class BarrierMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A worker is at its ``number``-th barrier of ``world`` workers."""

    rank: _Rank
    world: _World
    number: _Count


class JoinMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A worker of a job, and how the job's steps are ordered."""

    rank: _Rank
    world: _World
    consistency: str
    step: _Count = 0


class PullMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Reads rows and parameters. Tensors: all ids; and, if ``checked``, the short version that the asker has of each.

    With ``states`` each row whose version is asked as ``WITH_STATE`` comes with its optimizer's state, as
    ``RowTable.pull_with_state`` gives it, before the others of its part, which come without. ``rank`` is -1
    for one who belongs to no job; others are answered as of ``step``, as the job's consistency says.
    """

    parts: list[Part]
    training: bool = False
    checked: bool = False
    states: bool = False
    rank: _Number = -1
    step: _Number = -1
    compression: Compression | None = None


class PullReply(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """How many rows of each part were sent. Tensors: their positions among the part's ids, their versions, numbers.

    No positions are said of rows that all come, in order. If versions were asked about, those and positions are short:
    int32.
    """

    counts: list[_Count]


class PushMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Gradients of one step. Tensors: all ids; with ``squares`` those of each, bfloat16; then the numbers.

    ``weight`` is what the worker's gradients count beside those of the others: its rows, if they are means over them.
    A worker's push with ``step`` -1 lies beside the order of steps: it is done at once, by the worker's share in the
    last one. With ``hold`` what the workers' gradients come to waits for a ``ReleaseMessage``.
    """

    parts: list[Part]
    rules: list[dict[str, float | str | bool]]
    rank: _Number = -1
    step: _Number = -1
    weight: float = 1.0
    mean: bool = True
    hold: bool = False
    squares: bool = False
    compression: Compression | None = None


def short_versions(versions: Tensor) -> Tensor:
    """Versions as they travel, to be compared and no more: int32, in which -1 and ``WITH_STATE`` stay what they are.

    >>> short_versions(torch.tensor([7, (1 << 31) + 7, -1]))
    tensor([ 7,  7, -1], dtype=torch.int32)
    """
    return torch.where(versions < 0, versions, versions & 0x7FFFFFFF).to(torch.int32)
