"""Requests as one batch, and its outputs as theirs again; requests of unequal lengths padded to the longest.

::

    lengths 2 and 4     x x 0 0      mask  1 1 0 0      outputs and gradients are cut back to each request's length
                        x x x x            1 1 1 1

All dimensions that vary in a padded schema are this one length. Gradients of outputs are padded with zeros too, so
padding adds nothing to any gradient, if the module's outputs at values do not depend on masked positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch.errors import SchemaError
from anabranch.experts.server.scheduler import Task
from anabranch.tensors import TensorSpec

__all__ = ["cut", "fill", "join_padded", "make_mask", "split_padded"]


def fill(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``tensor`` padded with zeros at the ends to rows of ``shape``."""
    if tuple(tensor.shape[1:]) == tuple(shape):
        return tensor
    filled = tensor.new_zeros(len(tensor), *shape)
    filled[tuple(slice(size) for size in tensor.shape)] = tensor
    return filled


def cut(tensor: Tensor, spec: TensorSpec, length: int) -> Tensor:
    """Return ``tensor`` with the dimensions that vary cut to ``length``."""
    for dimension in spec.varying:
        tensor = tensor.narrow(1 + dimension, 0, length)
    return tensor


def make_mask(batch: Sequence[Task], device: torch.device) -> Tensor:
    """Return the bool mask of the values of a padded batch."""
    lengths = torch.tensor([task.length for task in batch], device=device)
    each = lengths.repeat_interleave(torch.tensor([task.rows for task in batch], device=device))
    return torch.arange(_longest(batch), device=device) < each[:, None]


def join_padded(batch: Sequence[Task], specs: Sequence[TensorSpec | None]) -> list[list[Tensor | None]]:
    """Return the inputs of each task of a batch, of the longest one's length; the tasks keep their own, to be run one
    by one if the batch fails.
    """
    longest = _longest(batch)
    return [
        [
            tensor
            if tensor is None or spec is None or not spec.varying
            else fill(tensor, spec.with_sizes([longest] * len(spec.varying)))
            for tensor, spec in zip(task.inputs, specs, strict=True)
        ]
        for task in batch
    ]


def split_padded(
    outputs: Sequence[Sequence[Tensor | None]],
    batch: Sequence[Task],
    specs: Sequence[TensorSpec | None],
    names: Sequence[str],
) -> list[list[Tensor | None]]:
    """Return the outputs of each task of a batch, of its own length.

    Raises:
        SchemaError: a size that varies is not the length of the batch.
    """
    longest = _longest(batch)
    for output, spec, name in zip(outputs[0], specs, names, strict=True):
        if output is not None and spec is not None and any(n != longest for n in spec.sizes_of(output.shape)):
            raise SchemaError(
                f"{name}: expected length {longest}, as its inputs were padded to, got {tuple(output.shape)}; sizes of "
                "outputs that vary must be those of the inputs"
            )
    return [
        [
            output if output is None or spec is None else cut(output, spec, task.length)
            for output, spec in zip(mine, specs, strict=True)
        ]
        for task, mine in zip(batch, outputs, strict=True)
    ]


def _longest(batch: Sequence[Task]) -> int:
    return max(task.length for task in batch)
