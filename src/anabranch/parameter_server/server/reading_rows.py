"""The answer to a pull: rows and parameters, with their state or only where they have changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anabranch.parameter_server.messages import PullMessage, PullReply
from anabranch.parameter_server.server.contents import ShardContents
from anabranch.parameter_server.server.message_checks import shares_of
from anabranch.tables.dense_parameter import DenseParameter
from anabranch.tables.table import Table, side_by_side
from anabranch.tables.table_spec import state_dtype
from anabranch.tensors.packing import Share, expected, join, split

__all__ = ["admit", "certain_bytes", "read"]


@dataclass(frozen=True, slots=True)
class _ReplyBuffer:
    """Memory for the values of an answer: flat tensors as they are sent, and each part's share of them."""

    flat: list[Tensor]
    parts: list[Tensor]

    def __getitem__(self, part: int) -> Tensor:
        return self.parts[part]


def read(
    contents: ShardContents, message: PullMessage, ids: Sequence[Tensor], ages: Tensor | None
) -> tuple[PullReply, list[Tensor]]:
    """Read the rows requested, except known rows that have not changed."""
    for part in message.parts:
        contents.counts[part.name].pulls += 1
    if ages is not None or any(part.with_state for part in message.parts):
        return _choose(contents, message, ids, ages)
    room = _room(contents, message)
    _fill(contents, room, message, ids)
    for part in message.parts:
        contents.counts[part.name].rows_pulled += part.count
    numbers = room.flat
    if message.compression is not None:
        numbers = join(room.parts, shares_of(contents, message), message.compression)
    return _reply(contents, message, [0] * len(message.parts)), numbers


def admit(contents: ShardContents, message: PullMessage, ids: Sequence[Tensor]) -> None:
    """Give rows to ids of dynamic tables, as reading them in training does."""
    by_name = {part.name: some for part, some in zip(message.parts, ids, strict=True) if contents.admits(part.name)}
    for group, names in contents.groups(list(by_name)):
        group.admit(side_by_side([by_name[name] for name in names]), [len(by_name[name]) for name in names])


def certain_bytes(contents: ShardContents, message: PullMessage) -> int:
    """Return the bytes of the parameters and of the rows that are sent whether or not they have changed."""
    total = 0
    for part in message.parts:
        holder = contents.holder(part.name)
        if isinstance(holder, Table):
            rows = part.count - part.known - part.with_state
            spec = holder.spec
            total += part.with_state * holder.rule.row_width(spec.width) * state_dtype(spec.dtype).itemsize
            total += rows * spec.width * spec.dtype.itemsize
        else:
            total += holder.value.nbytes
    return total


def _reply(contents: ShardContents, message: PullMessage, changed: list[int]) -> PullReply:
    tables = [contents.tables.get(part.name) for part in message.parts]
    return PullReply(contents.generation, [table.step if table else 0 for table in tables], changed)


def _choose(
    contents: ShardContents, message: PullMessage, ids: Sequence[Tensor], ages: Tensor | None
) -> tuple[PullReply, list[Tensor]]:
    """Return the answer if some rows come with their state, or only if they have changed."""
    parts = {part.name: part for part in message.parts}
    wanted = {part.name: some for part, some in zip(message.parts, ids, strict=True) if part.name in contents.tables}
    since = _since(contents, message, ages)
    states, rows, places = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
    for group, names in contents.groups(list(wanted)):
        with_state, known = [parts[name].with_state for name in names], [parts[name].known for name in names]
        counts = [parts[name].count for name in names]
        some_ids, some_since = (side_by_side([of[name] for name in names]) for of in (wanted, since))
        *came, found = group.answer(some_ids, counts, with_state, known, some_since, training=message.training)
        others = (np.array(counts) - with_state - known + found).tolist()
        for into, whole, sizes in zip((states, rows, places), came, (with_state, others, found), strict=True):
            into |= zip(names, torch.split(whole, sizes), strict=True)
    numbers, shares = list[Tensor](), list[Share]()
    for name in wanted:
        if parts[name].with_state:
            numbers.append(states[name])
            shares.append(Share(states[name].dtype, tuple(states[name].shape), "states"))
    for name in parts:
        if name in rows:
            numbers.append(rows[name])
            shares.append(Share(rows[name].dtype, tuple(rows[name].shape), "rows"))
            contents.counts[name].rows_pulled += parts[name].with_state + len(rows[name])
        else:
            numbers.append(contents.dense[name].value)
            shares.append(Share(numbers[-1].dtype, tuple(numbers[-1].shape)))
    said = join(numbers, shares, message.compression)
    if ages is not None:
        said.insert(0, side_by_side([places[name] for name in wanted]).to(torch.int32))
    return _reply(contents, message, [len(places[name]) if name in places else 0 for name in parts]), said


def _since(contents: ShardContents, message: PullMessage, ages: Tensor | None) -> dict[str, Tensor]:
    """For each part's known rows the step at which they were read; -1, so that all count as changed, if unknown."""
    known = [part.known for part in message.parts]
    if ages is None or message.generation != contents.generation:
        steps = torch.full((sum(known),), -1, device="cpu")
    else:
        since = np.repeat([part.since for part in message.parts], known)
        steps = torch.from_numpy(since.astype(np.int64)) - ages
    return dict(zip((part.name for part in message.parts), torch.split(steps, known), strict=True))


def _fill(contents: ShardContents, room: _ReplyBuffer, message: PullMessage, ids: Sequence[Tensor]) -> None:
    """Read everything requested, with as few copies as possible, into ``room``."""
    wanted: dict[str, Tensor] = {}
    places: dict[str, Tensor] = {}
    for part, some, place in zip(message.parts, ids, room.parts, strict=True):
        holder = contents.holder(part.name)
        if isinstance(holder, DenseParameter):
            place.copy_(holder.value)
        else:
            wanted[part.name], places[part.name] = some, place
    for group, names in contents.groups(list(wanted)):
        everyone, counts = side_by_side([wanted[name] for name in names]), [len(wanted[name]) for name in names]
        flat = side_by_side([places[name] for name in names])
        group.pull(everyone, counts, out=flat, training=message.training)
        if flat.data_ptr() != places[names[0]].data_ptr():  # a copy: their places are not neighbours
            for name, rows in zip(names, torch.split(flat, counts), strict=True):
                places[name].copy_(rows)


def _room(contents: ShardContents, message: PullMessage) -> _ReplyBuffer:
    shares = shares_of(contents, message)
    flat = [torch.empty(size, dtype=dtype, device="cpu") for dtype, size in expected(shares)]
    return _ReplyBuffer(flat, split(flat, shares))
