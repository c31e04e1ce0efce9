"""``ShardRequest``: a message for a shard, checked once; ``read`` answers it, or ``apply`` takes its step.

::

    header ──check──> holders, shares, rules ──> body ──check_body──> ids are here, gradients finite ──> read, apply

``check`` sees the message and each tensor's dtype and shape, and needs no lock, which may be held for long: nothing of
a body is received in vain, and nothing below repeats it. ``check_body`` runs under the lock, before anything changes.
A request that waits while a table is made or dropped is checked again when it is used (``renewed``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
import numpy as np
import torch
from torch import Tensor

from anabranch.errors import NonFinite, SchemaError
from anabranch.parameter_server.messages import PullMessage, PullPart, PullReply, PushMessage, PushPart
from anabranch.parameter_server.server.contents import Parts, ShardContents
from anabranch.record import spans
from anabranch.tables.dense_parameter import DenseParameter
from anabranch.tables.kernels.memory import working_dtype
from anabranch.tables.optimizers.row_optimizers import Family, RowOptimizer
from anabranch.tables.table import Table, side_by_side
from anabranch.tensors.packing import Share, acceptable, all_finite, expected, join, largest_gradient, views
from anabranch.transport import Checked

Described = tuple[torch.dtype, tuple[int, ...]]
"""A tensor's dtype and shape."""

_NAME, _WEIGHT = attrgetter("name"), attrgetter("message.merging.weight")
_Gradient = tuple[Tensor, Tensor, Tensor | None]  # ids, gradients and, of sums over several steps, their squares


@dataclass(slots=True)
class ShardRequest(Checked):
    """A request and the client that sends it, if it says so."""

    client: bytes = b""


@dataclass(slots=True)
class RowRequest(ShardRequest):
    """A pull or a push.

    Attributes:
        parts: the tables and parameters that it names.
        counts, shares: of each part, the number of its ids, and dtype and shape of its values.
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

    def ids_of(self, at: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Return the ids of these parts, and the number of each."""
        if len(at) == len(self.counts):
            return self.tensors[0], self.counts
        return _together(torch.split(self.tensors[0], self.counts), at), list(map(self.counts.__getitem__, at))


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
    request = RowRequest(message, client=client, parts=parts)
    for part, holder in zip(named, parts.holders, strict=True):
        request.counts.append(part.count)
        if isinstance(holder, Table):
            request.shares.append(Share(holder.spec.dtype, (part.count, holder.spec.width), "rows"))
        elif part.count:
            raise SchemaError(f"{part.name} is a dense parameter and has no ids")
        else:
            request.shares.append(Share(holder.value.dtype, tuple(holder.value.shape)))
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
    for part, holder in zip(message.parts, request.parts.holders, strict=True):
        special = part.with_state + part.known
        if special > part.count:
            raise SchemaError(
                f"{part.name} has {part.count} ids, of which {part.with_state} should come with state and {part.known} "
                "are known"
            )
        request.marked += part.known
        request.chooses |= special > 0
        if isinstance(holder, DenseParameter):
            request.answer_bytes += holder.value.nbytes
            continue
        width, dtype = holder.spec.width, holder.spec.dtype
        # Known rows are counted when the answer shows which of them have changed.
        request.answer_bytes += (part.count - special) * width * dtype.itemsize
        if part.with_state:
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
    grads = views(request.numbers, request.shares, message.compression)
    tensors = [torch.cat([request.tensors[0][:0], *(ids[k] for k in stays)])]
    if any(part.sums for part in parts):
        squares = torch.split(request.tensors[1], [part.sums for part in message.parts])
        tensors.append(torch.cat([squares[k] for k in stays]))
    tensors += join([grads[k] for k in stays], [request.shares[k] for k in stays])
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
            group.check(*request.ids_of(at))
    if not pushes:
        return
    if request.marked:
        squares = request.tensors[1]
        if not bool((squares >= 0).all()) or not all_finite([squares]):
            raise NonFinite("squares are finite numbers >= 0; nothing was changed")
    if not acceptable(request.numbers):
        _refuse(request)


def _refuse(request: RowRequest) -> None:
    gradients = views(request.numbers, request.shares, request.message.compression)
    for name, grad in zip(request.parts.names, gradients, strict=True):
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
    changed = [0] * len(request.counts)
    for name in parts.names:
        contents.counts[name].pulls += 1
    if request.chooses:
        numbers = _choose(contents, request, changed)
    else:
        numbers = [torch.empty(shape, dtype=dtype, device="cpu") for dtype, shape in expected(request.shares)]
        values = views(numbers, request.shares)
        for holder, value in zip(parts.holders, values, strict=True):
            if isinstance(holder, DenseParameter):
                value.copy_(holder.value)
        for group, at, _ in parts.groups:
            ids, counts = request.ids_of(at)
            out = _together(values, at)
            group.pull(ids, counts, out=out, training=message.training)
            if out.data_ptr() != values[at[0]].data_ptr():  # a copy: their values are not neighbours
                for k, rows in zip(at, torch.split(out, counts), strict=True):
                    values[k].copy_(rows)
        for name, count in zip(parts.names, request.counts, strict=True):
            contents.counts[name].rows_pulled += count
        if message.compression is not None:
            numbers = join(values, request.shares, message.compression)
    steps = [holder.step if isinstance(holder, Table) else 0 for holder in parts.holders]
    return PullReply(contents.generation, steps, changed, pushed), numbers


def admit(request: RowRequest) -> None:
    """Give rows to ids of dynamic tables, as reading them in training does."""
    for group, at, admits in request.parts.groups:
        if admits:
            group.admit(*request.ids_of(at))


def _choose(contents: ShardContents, request: RowRequest, changed: list[int]) -> list[Tensor]:
    """Return the tensors of an answer of which rows come with their state, or only if they have ``changed``."""
    message, parts = request.message, request.parts
    states, rows, positions = dict[int, Tensor](), dict[int, Tensor](), dict[int, Tensor]()
    since = _since(contents, request)
    for group, at, _ in parts.groups:
        ids, counts = request.ids_of(at)
        with_state, known = [message.parts[k].with_state for k in at], [message.parts[k].known for k in at]
        *came, new = group.answer(ids, counts, with_state, known, _together(since, at), training=message.training)
        others = (np.array(counts) - with_state - known + new).tolist()
        for into, whole, sizes in zip((states, rows, positions), came, (with_state, others, new), strict=True):
            into |= zip(at, torch.split(whole, sizes), strict=True)
    numbers, shares = list[Tensor](), list[Share]()
    for k in sorted(states):
        if message.parts[k].with_state:
            numbers.append(states[k])
            shares.append(Share(states[k].dtype, tuple(states[k].shape), "states"))
    for k, (name, holder) in enumerate(zip(parts.names, parts.holders, strict=True)):
        if isinstance(holder, Table):
            changed[k] = len(positions[k])
            contents.counts[name].rows_pulled += message.parts[k].with_state + len(rows[k])
        numbers.append(rows[k] if isinstance(holder, Table) else holder.value)
        shares.append(Share(numbers[-1].dtype, tuple(numbers[-1].shape), request.shares[k].kind))
    packed = join(numbers, shares, message.compression)
    if request.marked:
        packed.insert(0, _together(positions, sorted(positions)).to(torch.int32))
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
    shares = weighted_shares(pushes, scale, total)
    parts = pushes[0].parts if len(pushes) == 1 else contents.parts(tuple(shares))
    rules: dict[str, RowOptimizer] = {}
    marked = 0
    for push in reversed(pushes):  # the rule of the lowest rank counts
        marked += push.marked
        rules |= zip(push.parts.names, push.rules, strict=False)  # a message may bring none
    ids, grads, squares = dict[int, Tensor](), dict[int, Tensor](), dict[int, Tensor]()
    dense: list[tuple[DenseParameter, Tensor]] = []
    for k, (name, holder) in enumerate(zip(parts.names, parts.holders, strict=True)):
        own = shares[name]
        if name in rules:
            holder.rule = rules[name]
        if isinstance(holder, DenseParameter):
            grad = own[0][1]
            for _, more, _ in own[1:]:
                grad = torch.nan_to_num(grad + more)  # a sum may pass what float16 holds
            dense.append((holder, grad))
        elif len(own) == 1:
            ids[k], grads[k] = own[0][:2]
        else:
            ids[k] = side_by_side([some for some, _, _ in own])
            grads[k] = side_by_side([grad for _, grad, _ in own])
        if marked and holder.rule.family is not Family.SGD and any(square is not None for _, _, square in own):
            squares[k] = torch.cat([_ones(some) if square is None else square for some, _, square in own])
    if len(parts.groups) > 1 or dense:  # else the one group admits its ids before it moves
        for group, at, admits in parts.groups:
            if admits:
                group.admit(_together(ids, at), [len(ids[k]) for k in at])
    if begin is not None:
        begin()
    with spans.span("optimizer", "compute", pushes=len(pushes)):
        for parameter, grad in dense:
            parameter.push(grad)
        for group, at, _ in parts.groups:
            sums = None
            if not squares.keys().isdisjoint(at):
                sums = torch.cat([squares[k].float() if k in squares else _ones(ids[k]) for k in at])
            group.push(_together(ids, at), _together(grads, at), list(map(len, map(ids.__getitem__, at))), sums)
    for k, (name, own) in enumerate(shares.items()):
        contents.counts[name].pushes += len(own)
        contents.counts[name].rows_pushed += len(ids[k]) if k in ids else 0


def _together(tensors: Mapping[int, Tensor] | Sequence[Tensor], at: Sequence[int]) -> Tensor:
    """Return those tensors side by side."""
    return tensors[at[0]] if len(at) == 1 else side_by_side(list(map(tensors.__getitem__, at)))


def _ones(ids: Tensor) -> Tensor:
    return torch.ones(len(ids), device="cpu")


def weighted_shares(
    pushes: Sequence[RowRequest], scale: float = 1.0, total: float | None = None
) -> dict[str, list[_Gradient]]:
    """Return all workers' ids and gradients by table and parameter, times share in the mean and ``scale``."""
    if total is None:
        total = sum(map(_WEIGHT, pushes))
    shares: dict[str, list[_Gradient]] = {}
    for push in pushes:
        message = push.message
        merging = message.merging
        share = scale * ((merging.weight / total if total else 0.0) if merging.mean else 1.0)
        grads = views(push.numbers, push.shares, message.compression)
        squares = _squares_of(push) if push.marked else [None] * len(grads)
        ids = torch.split(push.tensors[0], push.counts)
        for name, some, grad, square in zip(push.parts.names, ids, grads, squares, strict=True):
            shares.setdefault(name, []).append((some, grad if share == 1.0 else grad * share, square))
    return shares


def _squares_of(push: RowRequest) -> Sequence[Tensor]:
    """Of each part the squares of its gradients, 1 for those of one step."""
    sums, counts = np.array([part.sums for part in push.message.parts]), np.array(push.counts)
    squares = torch.ones(int(counts.sum()), device="cpu")
    kinds = np.repeat(np.tile([False, True], len(counts)), np.stack([counts - sums, sums], 1).reshape(-1))
    squares[torch.from_numpy(kinds)] = push.tensors[1].float()
    return torch.split(squares, push.counts)


def squared_sum(pushes: Sequence[RowRequest]) -> float:
    """Return the sum of squares, in float64, of the merged gradients of these pushes, added up by id first."""
    total = 0.0
    for gradients in weighted_shares(pushes).values():
        ids = torch.cat([some for some, _, _ in gradients])
        if not len(ids):  # of a dense parameter, or nothing
            total += float(torch.stack([grad.double() for _, grad, _ in gradients]).sum(0).square().sum())
            continue
        grads = torch.cat([grad for _, grad, _ in gradients]).double()
        distinct, inverse = torch.unique(ids, return_inverse=True)
        total += float(grads.new_zeros(len(distinct), grads.shape[1]).index_add_(0, inverse, grads).square().sum())
    return total
