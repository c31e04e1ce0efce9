"""An optimizer's state in torch's form and in the servers', so that parameters move between the two during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from anabranch.tables.optimizers.row_optimizers import Family, RowOptimizer


@dataclass(frozen=True, slots=True)
class ParameterState:
    """A parameter's values with its optimizer's state.

    Attributes:
        values: of the whole parameter.
        states: one tensor of its shape for each number a weight; of row-wise Adagrad one number per row.
        step: optimizer steps so far.
    """

    values: Tensor
    states: Sequence[Tensor] = ()
    step: int = 0


def to_torch(rule: RowOptimizer, kept: ParameterState) -> dict[str, object]:
    """Convert to the form of ``optimizer.state[parameter]``.

    >>> rule = RowOptimizer.from_factory(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    >>> to_torch(rule, ParameterState(torch.zeros(2), [torch.ones(2)], 3))
    {'momentum_buffer': tensor([1., 1.])}
    """
    if not kept.step and rule.family is not Family.ADAGRAD:  # torch makes Adagrad's before the first step
        return {}
    state: dict[str, object] = dict(zip(rule.state_names, kept.states, strict=False))
    if rule.family is Family.SPARSE_ADAM:
        state["step"] = kept.step
    elif rule.family is not Family.SGD:
        state["step"] = torch.tensor(float(kept.step), device="cpu")
    return state


def from_torch(rule: RowOptimizer, values: Tensor, state: Mapping[str, object]) -> ParameterState:
    """Return the inverse of ``to_torch``; an empty ``state`` belongs to a parameter without steps so far.

    Raises:
        ValueError: a state of another optimizer, or of another shape.
    """
    names = rule.state_names
    found = [tensor.to_dense() for name in names if isinstance(tensor := state.get(name), Tensor)]
    if not found and not state.get("step"):
        return ParameterState(values)
    shape = values.shape[:1] if rule.family is Family.ROW_WISE_ADAGRAD else values.shape
    if len(found) != len(names) or any(tensor.shape != shape for tensor in found):
        raise ValueError(f"{rule.family} keeps {', '.join(names)} of shape {tuple(shape)}, the state has {list(state)}")
    return ParameterState(values, found, int(cast(float, state.get("step", 1))))
