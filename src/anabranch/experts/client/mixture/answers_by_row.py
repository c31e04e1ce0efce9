"""The answers of a mixture's experts, each for some rows, as tensors of shape (rows, k, ...)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import BoundaryError, SchemaError
from anabranch.experts.client.beam_search import Choices
from anabranch.experts.client.calls import ExpertCall
from anabranch.tensors import TensorSpec

__all__ = [
    "check_same_outputs",
    "count_answers",
    "gather_answers",
    "positions_of_answers",
    "scores_of",
    "select_rows",
    "weighted_sum",
]


def select_rows(tensor: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """Return these rows, without a copy if they are all."""
    if len(rows) == len(tensor):
        return tensor
    return tensor.index_select(0, torch.from_numpy(rows).to(tensor.device))


def count_answers(total: int, rows: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return for each of ``total`` rows the number of answers, given the rows of each answer."""
    counts = np.zeros(total, dtype=np.int64)
    for mine in rows:
        counts[mine] += 1
    return counts


def check_same_outputs(calls: Sequence[ExpertCall]) -> None:
    """Raise ``SchemaError`` unless all experts return the same, of floating dtypes."""
    for call in calls[1:]:
        if call.schema.output_specs != calls[0].schema.output_specs:
            raise SchemaError(
                f"{calls[0].uid} returns {calls[0].schema.outputs}, but {call.uid} returns {call.schema.outputs}: the "
                "experts of a mixture must return the same"
            )
    for spec in calls[0].schema.output_specs if calls else ():
        if spec is not None and not spec.dtype.is_floating_point:
            raise SchemaError(f"{calls[0].uid} returns {spec.dtype}, which has no weighted mean")


def positions_of_answers(
    choices: Choices, calls: Sequence[ExpertCall], rows: Sequence[NDArray[np.int64]]
) -> tuple[NDArray[np.int64], int]:
    """For each row and slot the index of its answer among all answers joined; the last index if there is no answer."""
    count = sum(len(mine) for call, mine in zip(calls, rows, strict=True) if call.answered)
    position = np.full(choices.slots.shape, count, dtype=np.int64)
    slot_of = {uid: slot for slot, uid in enumerate(choices.uids)}
    start = 0
    for call, mine in zip(calls, rows, strict=True):
        if call.answered:
            where = choices.slots[mine] == slot_of[call.uid]
            position[mine[:, None].repeat(where.shape[1], 1)[where], np.nonzero(where)[1]] = start + np.arange(
                len(mine)
            )
            start += len(mine)
    return position, count


def gather_answers(
    outputs: Sequence[list[Tensor | None] | None],
    index: int,
    spec: TensorSpec,
    position: NDArray[np.int64],
    count: int,
    device: torch.device,
) -> Tensor:
    """Return output ``index`` of the experts, (rows, k, ...); zeros where there is no answer."""
    parts = [tensor for answer in outputs if answer is not None and (tensor := answer[index]) is not None]
    sizes = {spec.sizes_of(part.shape) for part in parts} if spec.varying else {()}
    if len(sizes) > 1:
        raise SchemaError(f"experts returned outputs of different sizes, {sorted(sizes)}, which cannot be averaged")
    if not sizes:
        raise BoundaryError(
            f"no expert answered, so the sizes of their outputs, {spec.describe()}, are not known",
            peer="experts",
            operation="mixture",
        )
    joined = torch.cat([*parts, spec.zeros(1, *sizes, device=device)])
    assert len(joined) == count + 1
    flat = joined.index_select(0, torch.from_numpy(position.reshape(-1)).to(device))
    return flat.view(*position.shape, *joined.shape[1:])


def weighted_sum(weights: Tensor, answers: Tensor) -> Tensor:
    """Return the sums over k: of (rows, k) and (rows, k, ...), of shape (rows, ...)."""
    shape = (*weights.shape, *[1] * (answers.ndim - 2))
    return (weights.to(answers.dtype).view(shape) * answers).sum(1)


def scores_of(scores: Sequence[Tensor], choices: Choices) -> Tensor:
    """Of shape (rows, k): the sums of the chosen coordinates' scores, with their gradients."""
    coordinates = torch.from_numpy(choices.coordinates).to(scores[0].device)
    return torch.stack([grid.gather(1, coordinates[:, :, dimension]) for dimension, grid in enumerate(scores)]).sum(0)
