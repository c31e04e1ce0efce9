"""``ShardRequest``: a message for a shard, checked once; ``read`` answers it, or ``apply`` takes its step.

::

    header ──check──> holders, shares, rules ──> body ──check_body──> ids are here, gradients finite ──> read, apply

``check`` sees the message and each tensor's dtype and shape, and needs no lock, which may be held for long: nothing of
a body is received in vain, and nothing below repeats it. ``check_body`` runs under the lock, before anything changes.
A request that waits while a table is made or dropped is checked again when it is used (``renewed``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from anabranch.errors import NonFinite, SchemaError
from anabranch.parameter_server.messages import (
    PullMessage,
    PullPart,
    PullReply,
    PushMessage,
    PushPart,
    Share,
    acceptable,
    expected,
    join,
    largest_gradient,
    views,
)
from anabranch.parameter_server.server.contents import Parts, ShardContents
from anabranch.record import spans
from anabranch.tables.dense_parameter import DenseParameter
from anabranch.tables.optimizers.row_optimizers import Family, RowOptimizer
from anabranch.tables.table import Table, side_by_side
from anabranch.tensors.dtypes import working_dtype
from anabranch.transport import Checked

Described = tuple[torch.dtype, tuple[int, ...]]
"""A tensor's dtype and shape."""

_NAME, _COUNT, _WEIGHT = attrgetter("name"), attrgetter("count"), attrgetter("message.merging.weight")
_COUNTS, _MARKED = attrgetter("counts"), attrgetter("marked")


@dataclass(slots=True)
class ShardRequest(Checked):
    """A request and the client that sends it, if it says so."""

    client: bytes = b""


@dataclass(slots=True)
class RowRequest(ShardRequest):
    """A pull or a push.

    Attributes:
        parts: the tables and parameters that it names.
        counts: of each part, the number of its ids.
        shares: of each run of parts, dtype and shape of its values.
        rules: of each part, its optimizer; empty if the message brings none.
        marked: how many ids are known, or have sums of several steps.
        chooses: rows of a pull come with their state, or only if they have changed.
        tensors: the body, once it is here; its ids are int64.
        numbers: those of the tensors that hold a push's gradients.
    """

    parts: Parts = field(default_factory=Parts)
    counts: list[int] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)
    rules: list[RowOptimizer] = field(default_factory=list)
    marked: int = 0
    chooses: bool = False
    tensors: Sequence[Tensor] = ()
    numbers: Sequence[Tensor] = ()

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Take the body."""
        self.tensors = [tensors[0].long(), *tensors[1:]]
        self.numbers = self.tensors[1 + (self.marked > 0) :]

    def gradients(self, share: float = 1.0) -> list[Tensor]:
        """Return the gradients of each part of a push, times ``share``."""
        values = views(self.numbers, self.shares, self.message.compression)
        return self.pieces(values if share == 1.0 else [value * share for value in values])

    def pieces(self, values: Iterable[Tensor]) -> list[Tensor]:
        """Return the values of each part, of those of each run."""
        pieces = list[Tensor]()
        for run, value in zip(self.parts.runs, values, strict=True):
            pieces += torch.split(value, self.counts[run.first : run.last]) if run.rows else [value]
        return pieces


def check(
    contents: ShardContents, message: PullMessage | PushMessage, came: list[Described], client: bytes = b""
) -> RowRequest:
    """Return the request, if the shard can do it and its tensors are as ``came``.

    Raises:
        NotFound: a table or parameter does not exist.
        SchemaError: a message that contradicts itself, or tensors that do not fit it.
        NonFinite: a weight that is NaN or Inf.
    """
    named: Sequence[PullPart | PushPart] = message.parts
    parts = contents.parts(tuple(map(_NAME, named)))
    request = RowRequest(message, client=client, parts=parts, counts=list(map(_COUNT, named)))
    for run in parts.runs:
        count = sum(request.counts[run.first : run.last])
        if run.rows:
            request.shares.append(Share(run.dtype, (count, *run.shape), "rows"))
        elif count:
            raise SchemaError(f"{parts.names[run.first]} is a dense parameter and has no ids")
        else:
            request.shares.append(Share(run.dtype, run.shape))
    ids_dtype = torch.int32 if came and came[0][0] == torch.int32 else torch.int64
    needed: list[Described] = [(ids_dtype, (sum(request.counts),))]
    if isinstance(message, PushMessage):
        _check_push(request, message)
        needed += [(torch.bfloat16, (request.marked,))] * (request.marked > 0)
        needed += expected(request.shares, message.compression)
    else:
        _check_pull(request, message)
        needed += [(torch.int16, (request.marked,))] * (request.marked > 0)
    if came != needed:
        raise SchemaError(f"tensors of {needed} expected, got {came}")
    return request


def _check_pull(request: RowRequest, message: PullMessage) -> None:
    for share in request.shares:
        request.answer_bytes += share.bytes(None)
    for part, holder in zip(message.parts, request.parts.holders, strict=True):
        special = part.with_state + part.known
        if special > part.count:
            raise SchemaError(
                f"{part.name} has {part.count} ids, of which {part.with_state} should come with state and {part.known} "
                "are known"
            )
        if special and isinstance(holder, Table):
            request.marked += part.known
            request.chooses = True
            width, dtype = holder.spec.width, holder.spec.dtype
            # Known rows are counted when the answer shows which of them have changed.
            request.answer_bytes -= special * width * dtype.itemsize
            request.answer_bytes += part.with_state * holder.rule.row_width(width) * working_dtype(dtype).itemsize


def _check_push(request: RowRequest, message: PushMessage) -> None:
    for part in message.parts:
        request.marked += part.sums
        if part.sums > part.count:
            raise SchemaError(f"{part.name} has {part.count} ids, of which {part.sums} have sums of several steps")
    weight = message.merging.weight
    if not (math.isfinite(weight) and weight >= 0):
        raise NonFinite(f"a weight is a finite number >= 0, got {weight}")
    if not message.rules:
        return
    rules = [_rule_of(rule) for rule in message.rules]
    for part, holder in zip(message.parts, request.parts.holders, strict=True):
        if not 0 <= part.rule < len(rules):
            raise SchemaError(f"{part.name} has rule {part.rule}; the message holds {len(rules)}")
        rule, own = rules[part.rule], holder.rule
        if rule is not own and not own.same_layout(rule):
            raise SchemaError(f"{part.name} is kept for another optimizer than {rule.family}")
        request.rules.append(rule)


def _rule_of(values: Mapping[str, object]) -> RowOptimizer:
    try:
        return RowOptimizer.from_dict(values)
    except (ValueError, TypeError, KeyError) as error:
        raise SchemaError(f"{values!r} is not an optimizer: {error}") from None


def renewed(contents: ShardContents, request: RowRequest) -> RowRequest:
    """Return the request, checked again: a table was made or dropped meanwhile."""
    return arrived(contents, request.message, request.tensors, request.client)


def arrived(
    contents: ShardContents, message: PullMessage | PushMessage, tensors: Sequence[Tensor], client: bytes = b""
) -> RowRequest:
    """Return the request of a message whose tensors are here."""
    request = check(contents, message, [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors], client)
    request.take(tensors)
    return request


def without(contents: ShardContents, request: RowRequest, name: str) -> RowRequest:
    """Return a push without its gradients of ``name``, which is still there."""
    message, stays = request.message, [k for k, other in enumerate(request.parts.names) if other != name]
    parts = [message.parts[k] for k in stays]
    ids = torch.split(request.tensors[0], request.counts)
    grads = request.gradients()
    tensors = [torch.cat([request.tensors[0][:0], *(ids[k] for k in stays)])]
    if any(part.sums for part in parts):
        squares = torch.split(request.tensors[1], [part.sums for part in message.parts])
        tensors.append(torch.cat([squares[k] for k in stays]))
    tensors += join([grads[k] for k in stays], [Share(grads[k].dtype, tuple(grads[k].shape)) for k in stays])
    message = msgspec.structs.replace(message, parts=parts, compression=None)
    return arrived(contents, message, tensors, request.client)


def check_body(request: RowRequest) -> None:
    """Check the ids and numbers of a request; changes nothing.

    Raises:
        NotFound: an id outside its table. A fixed table checks those of a pull when it reads them.
        NonFinite: NaN, Inf or a number too large among the gradients.
    """
    pushes = isinstance(request.message, PushMessage)
    for group, at, admits in request.parts.groups:
        if pushes or admits:
            group.check(*_ids_of(request.tensors[0], request.counts, at))
    if not pushes:
        return
    if request.marked:
        squares = request.tensors[1]
        if not bool((squares >= 0).all()) or not bool(torch.isfinite(squares).all()):
            raise NonFinite("squares are finite numbers >= 0; nothing was changed")
    if not acceptable(request.numbers):
        _refuse(request)


def _refuse(request: RowRequest) -> None:
    for name, grad in zip(request.parts.names, request.gradients(), strict=True):
        largest = grad.abs().amax().item() if grad.numel() else 0.0
        if not math.isfinite(largest):
            raise NonFinite(f"the gradients of {name} hold NaN or Inf; nothing was changed")
        if largest > largest_gradient(grad.dtype):
            raise NonFinite(
                f"the gradients of {name} hold numbers of {largest:.3g}; servers take {grad.dtype} up to "
                f"{largest_gradient(grad.dtype):g}, so that their squares stay finite; nothing was changed"
            )
    raise NonFinite("the gradients hold NaN, Inf or numbers too large; nothing was changed")


# --- reading ----------------------------------------------------------------------------------------------------------


def read(contents: ShardContents, request: RowRequest, pushed: int = 0) -> tuple[PullReply, list[Tensor]]:
    """Return the answer to a pull: what it names, except known rows that have not changed.

    ``pushed`` is the number of steps that every worker has pushed.
    """
    message, parts = request.message, request.parts
    for name in parts.names:
        contents.counts[name].pulls += 1
    if request.chooses:
        numbers = _choose(contents, request)
    else:
        numbers = [torch.empty(shape, dtype=dtype, device="cpu") for dtype, shape in expected(request.shares)]
        values = views(numbers, request.shares)
        pieces = request.pieces(values)
        for holder, value in zip(parts.holders, pieces, strict=True):
            if isinstance(holder, DenseParameter):
                value.copy_(holder.value)
        for group, at, _ in parts.groups:
            ids, counts = _ids_of(request.tensors[0], request.counts, at)
            out = _together(pieces, at)
            group.pull(ids, counts, out=out, training=message.training)
            if out.data_ptr() != pieces[at[0]].data_ptr():  # a copy: their values are not neighbours
                for k, rows in zip(at, torch.split(out, counts), strict=True):
                    pieces[k].copy_(rows)
        for name, count in zip(parts.names, request.counts, strict=True):
            contents.counts[name].rows_pulled += count
        if message.compression is not None:
            numbers = join(values, request.shares, message.compression)
    steps = [holder.step if isinstance(holder, Table) else 0 for holder in parts.holders]
    return PullReply(contents.generation, steps, pushed), numbers


def admit(request: RowRequest) -> None:
    """Give rows to ids of dynamic tables, as reading them in training does."""
    for group, at, admits in request.parts.groups:
        if admits:
            group.admit(*_ids_of(request.tensors[0], request.counts, at))


def _choose(contents: ShardContents, request: RowRequest) -> list[Tensor]:
    """Return the tensors of an answer of which rows come with their state, or only if they have changed."""
    message, parts = request.message, request.parts
    states, rows, changed = dict[int, Tensor](), dict[int, Tensor](), dict[int, Tensor]()
    since = _since(contents, request)
    for group, at, _ in parts.groups:
        ids, counts = _ids_of(request.tensors[0], request.counts, at)
        with_state, known = [message.parts[k].with_state for k in at], [message.parts[k].known for k in at]
        *came, others = group.answer(ids, counts, with_state, known, _together(since, at), training=message.training)
        for into, whole, sizes in zip((states, rows, changed), came, (with_state, others, known), strict=True):
            into |= zip(at, torch.split(whole, sizes), strict=True)
    numbers, shares = list[Tensor](), list[Share]()
    for k in sorted(states):
        if message.parts[k].with_state:
            numbers.append(states[k])
            shares.append(Share(states[k].dtype, tuple(states[k].shape), "states"))
    for k, (name, holder) in enumerate(zip(parts.names, parts.holders, strict=True)):
        if isinstance(holder, Table):
            contents.counts[name].rows_pulled += message.parts[k].with_state + len(rows[k])
            numbers.append(rows[k])
            shares.append(Share(rows[k].dtype, tuple(rows[k].shape), "rows"))
        else:
            numbers.append(holder.value)
            shares.append(Share(holder.value.dtype, tuple(holder.value.shape)))
    packed = join(numbers, shares, message.compression)
    if request.marked:
        packed.insert(0, torch.from_numpy(np.packbits(_together(changed, sorted(changed)).numpy())))
    return packed


def _since(contents: ShardContents, request: RowRequest) -> Sequence[Tensor]:
    """For each part's known rows the step at which they were read; -1, so that all count as changed, if unknown."""
    known = [part.known for part in request.message.parts]
    if not request.marked or request.message.generation != contents.generation:
        steps = torch.full((sum(known),), -1, device="cpu")
    else:
        since = np.repeat([part.since for part in request.message.parts], known)
        steps = torch.from_numpy(since.astype(np.int64)) - request.tensors[1]
    return torch.split(steps, known)


# --- applying ---------------------------------------------------------------------------------------------------------


def apply(
    contents: ShardContents,
    pushes: Sequence[RowRequest],
    scale: float = 1.0,
    total: float | None = None,
    begin: Callable[[], None] | None = None,
) -> None:
    """One optimizer step for each table and parameter that any of the pushes names, or none for any of it.

    ``total`` is the sum of weights to divide by, by default that of these pushes. ``begin`` is called when all new ids
    have found room, and before any number is changed.
    """
    step = merged(contents, pushes, scale, total)
    parts = step.parts
    for push in reversed(pushes):  # the rule of the lowest rank counts
        for holder, rule in zip(push.parts.holders, push.rules, strict=False):  # a message may bring none
            holder.rule = rule
    if len(parts.groups) > 1 or len(parts.runs) > 1:  # else the one group admits its ids before it moves
        for group, at, admits in parts.groups:
            if admits:
                group.admit(*_ids_of(step.ids, step.counts, at))
    if begin is not None:
        begin()
    with spans.span("optimizer", "compute", pushes=len(pushes)):
        for holder, grad in zip(parts.holders, step.gradients, strict=True):
            if isinstance(holder, DenseParameter):
                holder.push(grad)
        for group, at, _ in parts.groups:
            ids, counts = _ids_of(step.ids, step.counts, at)
            squares = None if group.tables[0].rule.family is Family.SGD else step.squares
            if squares is not None:
                squares = _ids_of(squares, step.counts, at)[0]
            group.push(ids, _together(step.gradients, at), counts, squares)
    for push in pushes:
        for name, count in zip(push.parts.names, push.counts, strict=True):
            contents.counts[name].pushes += 1
            contents.counts[name].rows_pushed += count


def _ids_of(ids: Tensor, counts: list[int], at: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Return what belongs to the ids of these parts, and the number of each."""
    if len(at) == len(counts):
        return ids, counts
    return _together(torch.split(ids, counts), at), list(map(counts.__getitem__, at))


def _together(tensors: Mapping[int, Tensor] | Sequence[Tensor], at: Sequence[int]) -> Tensor:
    """Return those tensors side by side."""
    return tensors[at[0]] if len(at) == 1 else side_by_side(list(map(tensors.__getitem__, at)))


class Merged(NamedTuple):
    """The gradients of one step, of all its pushes: of each part, the ids of all parts and the number of each, and the
    squares of each, ``None`` if all gradients are of one step.
    """

    parts: Parts
    gradients: list[Tensor]
    ids: Tensor
    counts: list[int]
    squares: Tensor | None


def merged(
    contents: ShardContents, pushes: Sequence[RowRequest], scale: float = 1.0, total: float | None = None
) -> Merged:
    """Return all workers' gradients, times share in the mean and ``scale``; of a table in the order of the pushes."""
    if total is None:
        total = sum(map(_WEIGHT, pushes))
    pushes = list(filter(_COUNTS, pushes)) or pushes[:1]
    marked, own = any(map(_MARKED, pushes)), dict[str, list[tuple[Tensor, ...]]]()
    for push in pushes:
        merging, ids = push.message.merging, push.tensors[0]
        grads = push.gradients(scale * ((merging.weight / total if total else 0.0) if merging.mean else 1.0))
        squares = _squares_of(push) if marked else None
        if len(pushes) == 1:
            return Merged(push.parts, grads, ids, push.counts, squares)
        each = torch.split(ids, push.counts)
        three = zip(each, grads, each if squares is None else torch.split(squares, push.counts), strict=True)
        for name, some in zip(push.parts.names, three, strict=True):
            own.setdefault(name, []).append(some)
    parts = contents.parts(tuple(own))
    ids_of, grads_of, squares_of = zip(*(zip(*some, strict=True) for some in own.values()), strict=True)
    gradients = [
        side_by_side(some) if isinstance(holder, Table) else functools.reduce(_sum_of, some)
        for holder, some in zip(parts.holders, grads_of, strict=True)
    ]
    counts = [sum(map(len, some)) for some in ids_of]
    squares = side_by_side(list(chain.from_iterable(squares_of))) if marked else None
    return Merged(parts, gradients, side_by_side(list(chain.from_iterable(ids_of))), counts, squares)


def _sum_of(one: Tensor, other: Tensor) -> Tensor:
    return torch.nan_to_num(one + other)  # which may pass what float16 holds


def _squares_of(push: RowRequest) -> Tensor:
    """Of each id the squares of its gradient, 1 for that of one step."""
    sums, counts = np.array([part.sums for part in push.message.parts]), np.array(push.counts)
    squares = torch.ones(int(counts.sum()), device="cpu")
    if push.marked:
        kinds = np.repeat(np.tile([False, True], len(counts)), np.stack([counts - sums, sums], 1).reshape(-1))
        squares[torch.from_numpy(kinds)] = push.tensors[1].float()
    return squares


def squared_sum(contents: ShardContents, pushes: Sequence[RowRequest]) -> float:
    """Return the sum of squares, in float64, of the merged gradients of these pushes, added up by id first."""
    step, total = merged(contents, pushes), 0.0
    each = torch.split(step.ids, step.counts)
    for holder, ids, grads in zip(step.parts.holders, each, step.gradients, strict=True):
        grads = grads.double()
        if isinstance(holder, Table):
            distinct, inverse = torch.unique(ids, return_inverse=True)
            grads = grads.new_zeros(len(distinct), grads.shape[1]).index_add_(0, inverse, grads)
        total += float(grads.square().sum())
    return total
