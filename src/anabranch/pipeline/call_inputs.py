"""The inputs and the loss of one call of a pipe, checked and brought into the form that stages take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor, nn

from anabranch.pipeline.microbatch import count_batch_rows, has_rows, scatter
from anabranch.pipeline.stage.partition import keywords_of
from anabranch.pipeline.stage.stage import OUTSIDE, Head, Stage
from anabranch.tensors import Structure, map_structure

__all__ = [
    "HeadParts",
    "Loss",
    "NOT_GIVEN",
    "Reduction",
    "Weigh",
    "batch_rows",
    "check_rows",
    "make_head",
    "split_target",
    "with_keywords",
]


NOT_GIVEN: Structure = object()


Loss: TypeAlias = Callable[[Structure, Structure], Tensor]
"""A function from output and target to one number."""
Reduction: TypeAlias = Literal["mean", "sum"]
"""Reduction of the loss over the rows of a batch."""
Weigh: TypeAlias = Callable[[Sequence[int]], Sequence[float]]
"""A function from the rows of the microbatches to the weight of each one's loss in the mean."""


class HeadParts(NamedTuple):
    """The loss of a step.

    Attributes:
        loss: from output and target to one number.
        target: the whole batch's.
        reduction: over the rows.
        keeps_output: outputs are kept beside the loss.
        seed: the loss's gradient.
        weigh: under ``"mean"``: weights of the microbatches, in place of their rows.
    """

    loss: Loss
    target: Structure
    reduction: Reduction
    keeps_output: bool = True
    seed: float = 1.0
    weigh: Weigh | None = None


def with_keywords(stage: Stage, inputs: Iterable[str], args: int) -> Stage:
    """Return the stage with the keyword inputs that its layers take."""
    counts = [args if stage.index == 0 else 1, *[1] * len(stage.layers)]
    keywords = {layer.name: keywords_of(layer, inputs, n) for layer, n in zip(stage.layers, counts, strict=False)}
    names = dict.fromkeys(name for taken in keywords.values() for name in taken)
    if not names:
        return stage
    outside = (*stage.sources.get(OUTSIDE, ()), *names)
    return dataclasses.replace(stage, sources={**stage.sources, OUTSIDE: outside}, keywords=keywords)


def batch_rows(args: tuple[Structure, ...], inputs: Mapping[str, Structure]) -> int:
    """Return the rows of the batch; keyword inputs are compared with those of the positional ones later."""
    if has_rows(args) or not any(map(has_rows, inputs.values())):
        return count_batch_rows(args[0] if len(args) == 1 else args or dict(inputs), "the batch")
    return next(count_batch_rows(x, f"the keyword input {name!r}") for name, x in inputs.items() if has_rows(x))


def split_target(args: tuple[Structure, ...], target: Structure) -> tuple[tuple[Structure, ...], Structure]:
    """Return the positional inputs of a step and its target."""
    if target is not NOT_GIVEN:
        return args, target
    if len(args) > 1:
        return args[:-1], args[-1]
    return args, None


def check_rows(value: Structure, rows: int, what: str) -> None:
    """Raise for tensors whose number of rows differs from the batch's."""
    if not has_rows(value):
        return
    found = count_batch_rows(value, what)
    if found != rows:
        raise ValueError(
            f"{what} has {found} rows, but the batch has {rows}; both are split into the same microbatches"
        )


def make_head(
    parts: HeadParts,
    sizes: Sequence[int],
    rows: int,
    stage: Stage,
    finish: Callable[[Structure], Structure] | None,
    model: nn.Module,
) -> Head:
    """Return the loss of each microbatch, as the last stage computes it."""
    loss, target = parts.loss, parts.target
    check_rows(target, rows, "the target")
    on_device = [
        map_structure(lambda leaf: leaf.to(stage.device) if isinstance(leaf, Tensor) else leaf, part)
        for part in scatter(target, sizes)
    ]
    weights = [1.0] * len(sizes)
    if parts.reduction == "mean":
        weights = list(map(float, sizes if parts.weigh is None else parts.weigh(sizes)))
        if any(not 0 <= weight < math.inf for weight in weights):
            raise ValueError(f"rows= gave {weights}: the weight of a microbatch is a finite number of at least 0")
        total = sum(weights)
        weights = [weight / total if total else 1.0 for weight in weights]
    own: list[nn.Module] = []
    if isinstance(loss, nn.Module):
        layers = set(model.modules())
        own = [module for module in loss.modules() if module not in layers]
    return Head(loss, on_device, weights, parts.keeps_output, finish or (lambda output: output), parts.seed, own)
