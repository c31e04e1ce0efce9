"""Checks of pulls and pushes against the tables and parameters that they name, before anything changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from anabranch.errors import NonFinite, SchemaError
from anabranch.parameter_server.messages import PullMessage, PullPart, PushMessage, PushPart, check_kinds
from anabranch.parameter_server.server.contents import ShardContents
from anabranch.tables.optimizers.row_optimizers import RowOptimizer
from anabranch.tables.table import Table, side_by_side
from anabranch.tensors.packing import Share, acceptable, all_finite, expected, largest_gradient, split

__all__ = ["check_pull", "check_push", "gradients_of", "numbers_of", "shares_of"]


def _check_parts(
    contents: ShardContents, message: PullMessage | PushMessage, tensors: Sequence[Tensor]
) -> list[Tensor]:
    parts: Sequence[PullPart | PushPart] = message.parts
    names = [part.name for part in parts]
    if len(set(names)) != len(names):
        raise SchemaError("the message names a table twice; merge its ids")
    for name in names:
        contents.check_name(name)
    check_kinds(message)
    counts = [part.count for part in parts]
    if not tensors or tensors[0].dtype != torch.int64 or tensors[0].shape != (sum(counts),):
        raise SchemaError(f"{sum(counts)} int64 ids expected as the first tensor")
    ids = list(torch.split(tensors[0], counts))
    wanted: dict[str, Tensor] = {}
    for part, some in zip(parts, ids, strict=True):
        if part.name in contents.tables:
            # A fixed table checks ids when it reads them, and reading has no side effects.
            if isinstance(message, PushMessage) or contents.admits(part.name):
                wanted[part.name] = some
        elif part.count:
            raise SchemaError(f"{part.name} is a dense parameter and has no ids")
    for group, together in contents.groups(list(wanted)):
        some_of = [wanted[name] for name in together]
        group.check(side_by_side(some_of), [len(some) for some in some_of])
    return ids


def check_pull(
    contents: ShardContents, message: PullMessage, tensors: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor | None]:
    """Return the ids of each part, and the ages of known rows; raise if the pull is invalid."""
    ids = _check_parts(contents, message, tensors)
    known = message.knows()
    if len(tensors) != 1 + (known > 0):
        raise SchemaError(f"{1 + (known > 0)} tensors expected, got {len(tensors)}")
    if not known:
        return ids, None
    if tensors[1].dtype != torch.int16 or tensors[1].shape != (known,):
        raise SchemaError(f"int16 ages of {known} known rows expected, got {_shape_and_dtype(tensors[1])}")
    return ids, tensors[1]


def check_push(contents: ShardContents, message: PushMessage, tensors: Sequence[Tensor]) -> None:
    """Raise if a push is invalid."""
    _check_parts(contents, message, tensors)
    flat = _check_numbers(contents, message, tensors)
    if not (math.isfinite(message.weight) and message.weight >= 0):
        raise NonFinite(f"a weight is a finite number >= 0, got {message.weight}")
    rules = [_rule_of(rule) for rule in message.rules]
    if not acceptable(flat):
        _refuse(message, gradients_of(contents, message, tensors))
    for part in message.parts:
        if rules:
            if not 0 <= part.rule < len(rules):
                raise SchemaError(f"{part.name} has rule {part.rule}; the message holds {len(rules)}")
            if not contents.holder(part.name).rule.same_layout(rules[part.rule]):
                raise SchemaError(f"{part.name} is kept for another optimizer than {rules[part.rule].family}")


def _refuse(message: PushMessage, gradients: Sequence[Tensor]) -> None:
    for part, grad in zip(message.parts, gradients, strict=True):
        largest = grad.abs().amax().item() if grad.numel() else 0.0
        if not math.isfinite(largest):
            raise NonFinite(f"the gradients of {part.name} hold NaN or Inf; nothing was changed")
        if largest > largest_gradient(grad.dtype):
            raise NonFinite(
                f"the gradients of {part.name} hold numbers of {largest:.3g}; servers take {grad.dtype} up to "
                f"{largest_gradient(grad.dtype):g}, so that their squares stay finite; nothing was changed"
            )
    raise NonFinite("the gradients hold NaN, Inf or numbers too large; nothing was changed")


def _check_numbers(contents: ShardContents, message: PushMessage, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors that hold the values, if they and the squares have the sizes that the message gives."""
    sums = message.sums()
    flat = tensors[1 + (sums > 0) :]
    came, wanted = [(one.dtype, one.numel()) for one in flat], numbers_of(contents, message)
    if came != wanted or any(one.ndim != 1 for one in flat):
        raise SchemaError(f"numbers of {wanted} expected, got {came}")
    if sums:
        squares = tensors[1]
        if squares.dtype != torch.bfloat16 or squares.shape != (sums,):
            raise SchemaError(f"bfloat16 squares of {sums} sums expected, got {_shape_and_dtype(squares)}")
        if not bool((squares >= 0).all()) or not all_finite([squares]):
            raise NonFinite("squares are finite numbers >= 0; nothing was changed")
    return flat


def gradients_of(contents: ShardContents, message: PushMessage, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of each part."""
    return split(tensors[1 + (message.sums() > 0) :], shares_of(contents, message), message.compression)


def shares_of(contents: ShardContents, message: PullMessage | PushMessage) -> list[Share]:
    """Dtype and shape of each part's values."""
    shares: list[Share] = []
    for part in message.parts:
        holder = contents.holder(part.name)
        if isinstance(holder, Table):
            shares.append(Share(holder.spec.dtype, (part.count, holder.spec.width), "rows"))
        else:
            shares.append(Share(holder.value.dtype, tuple(holder.value.shape)))
    return shares


def numbers_of(contents: ShardContents, message: PushMessage) -> list[tuple[torch.dtype, int]]:
    """Dtypes and sizes of the tensors that hold the message's values, before any memory is interpreted as tensors."""
    return expected(shares_of(contents, message), message.compression)


def _rule_of(values: Mapping[str, object]) -> RowOptimizer:
    try:
        return RowOptimizer.from_dict(values)
    except (ValueError, TypeError, KeyError) as error:
        raise SchemaError(f"{values!r} is not an optimizer: {error}") from None


def _shape_and_dtype(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
