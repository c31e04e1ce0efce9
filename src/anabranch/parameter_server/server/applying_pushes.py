"""One optimizer step for everything named by the pushes of a step, or none for any of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from anabranch.parameter_server.messages import PushMessage
from anabranch.parameter_server.server.contents import ShardContents
from anabranch.parameter_server.server.message_checks import gradients_of
from anabranch.parameter_server.server.worker_order import CheckedPush
from anabranch.record import spans
from anabranch.tables.optimizers.row_optimizers import Family, RowOptimizer
from anabranch.tables.table import Table, side_by_side

__all__ = ["apply", "squared_sum", "weighted_shares"]

_Given = tuple[Tensor, Tensor, Tensor | None]  # ids, gradients and, of sums over several steps, their squares


def apply(
    contents: ShardContents,
    pushes: Sequence[CheckedPush],
    scale: float = 1.0,
    total: float | None = None,
    begin: Callable[[], None] = lambda: None,
) -> None:
    """One optimizer step for each table and parameter that any of the pushes names.

    ``total`` is the sum of weights to divide by, by default that of these pushes. ``begin`` is called when all new ids
    have found room, and before any number is changed.
    """
    rules: dict[str, RowOptimizer] = {}
    for push in pushes:
        kinds = [RowOptimizer.from_dict(rule) for rule in push.message.rules]
        for part in push.message.parts:
            if kinds:
                rules.setdefault(part.name, kinds[part.rule])
    shares = weighted_shares(contents, pushes, scale, total)
    ids: dict[str, Tensor] = {}
    grads: dict[str, Tensor] = {}
    squares: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, given in shares.items():
        holder = contents.holder(name)
        if name in rules:
            holder.rule = rules[name]
        if isinstance(holder, Table):
            ids[name] = side_by_side([some for some, _, _ in given])
            grads[name] = side_by_side([grad for _, grad, _ in given])
            if any(own is not None for _, _, own in given) and holder.rule.family is not Family.SGD:
                squares[name] = torch.cat(
                    [torch.ones(len(some), device="cpu") if own is None else own for some, _, own in given]
                )
        else:
            dense[name] = given[0][1]
            for _, grad, _ in given[1:]:
                dense[name] = torch.nan_to_num(dense[name] + grad)  # a sum may pass what float16 holds
    groups = contents.groups(list(ids))
    if len(groups) > 1 or dense:  # else the one group admits its ids before it moves
        for group, names in groups:
            if any(contents.admits(name) for name in names):
                group.admit(side_by_side([ids[name] for name in names]), [len(ids[name]) for name in names])
    begin()
    with spans.span("optimizer", "compute", pushes=len(pushes)):
        for name, grad in dense.items():
            contents.dense[name].push(grad)
        _push_rows(contents, ids, grads, squares)
    for name, given in shares.items():
        counts = contents.counts[name]
        counts.pushes += len(given)
        if name in ids:
            counts.rows_pushed += ids[name].shape[0]


def weighted_shares(
    contents: ShardContents, pushes: Sequence[CheckedPush], scale: float = 1.0, total: float | None = None
) -> dict[str, list[_Given]]:
    """Return all workers' ids and gradients by table and parameter, times share in the mean and ``scale``."""
    total = sum(push.message.weight for push in pushes) if total is None else total
    shares: dict[str, list[_Given]] = {}
    for message, tensors in pushes:
        share = scale * ((message.weight / total if total else 0.0) if message.mean else 1.0)
        counts = [part.count for part in message.parts]
        ids = torch.split(tensors[0], counts)
        squares = _squares_of(message, tensors)
        for part, some, grad, own in zip(
            message.parts, ids, gradients_of(contents, message, tensors), squares, strict=True
        ):
            shares.setdefault(part.name, []).append((some, grad if share == 1.0 else grad * share, own))
    return shares


def _push_rows(
    contents: ShardContents, ids: Mapping[str, Tensor], grads: Mapping[str, Tensor], squares: Mapping[str, Tensor]
) -> None:
    for group, names in contents.groups(list(ids)):
        own = None
        if any(name in squares for name in names):
            own = torch.cat([squares.get(name, torch.ones(len(ids[name]), device="cpu")).float() for name in names])
        group.push(
            side_by_side([ids[name] for name in names]),
            side_by_side([grads[name] for name in names]),
            [len(ids[name]) for name in names],
            own,
        )


def squared_sum(given: Sequence[_Given]) -> float:
    """Return the sum of squares of gradients that are added up by id first; those of a dense parameter have no ids."""
    ids = torch.cat([some for some, _, _ in given])
    if not len(ids):
        return float(torch.stack([grad.double() for _, grad, _ in given]).sum(0).square().sum())
    grads = torch.cat([grad for _, grad, _ in given]).double()
    distinct, inverse = torch.unique(ids, return_inverse=True)
    return float(grads.new_zeros(len(distinct), grads.shape[1]).index_add_(0, inverse, grads).square().sum())


def _squares_of(message: PushMessage, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Of each part the squares of its gradients, 1 for those of one step; ``None`` if all gradients are."""
    counts = [part.count for part in message.parts]
    if not message.sums():
        return [None] * len(counts)
    sums = np.array([part.sums for part in message.parts])
    everyone = torch.ones(sum(counts), device="cpu")
    kinds = np.repeat(np.tile([False, True], len(counts)), np.stack([np.array(counts) - sums, sums], 1).reshape(-1))
    everyone[torch.from_numpy(kinds)] = tensors[1].float()
    return torch.split(everyone, counts)
