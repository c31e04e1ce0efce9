"""``DenseParameter``: a whole tensor on one shard, updated by torch's own fused optimizers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch.errors import SchemaError
from anabranch.tables.kernels._updates import update_of
from anabranch.tables.optimizers.row_optimizers import Family, RowOptimizer
from anabranch.tables.optimizers.row_wise_adagrad import RowWiseAdagrad, sums_dtype
from anabranch.tables.table_spec import ALLOWED_DTYPES, state_dtype

__all__ = ["DenseParameter"]


class DenseParameter:
    """A tensor and the state of its optimizer.

    >>> parameter = DenseParameter("bias", torch.zeros(2), RowOptimizer(Family.SGD, lr=0.5))
    >>> parameter.push(torch.ones(2))
    >>> parameter.value
    tensor([-0.5000, -0.5000])

    Attributes:
        step: optimizer steps so far.
        value: the present tensor; a step replaces it and leaves the old one unchanged for readers that hold it.
    """

    def __init__(self, name: str, value: Tensor, rule: RowOptimizer) -> None:
        if value.dtype not in ALLOWED_DTYPES:
            raise SchemaError(f"parameter {name}: {value.dtype} is not one of {', '.join(map(str, ALLOWED_DTYPES))}")
        self.name = name
        self.value = value.detach().cpu().clone().contiguous()
        self.step = 0
        self._rule = rule
        kept_as = state_dtype(value.dtype)
        self.states = [torch.full_like(self.value, rule.initial_state, dtype=kept_as) for _ in range(rule.states)]
        if rule.family is Family.ROW_WISE_ADAGRAD:
            self.states = [
                torch.full(self.value.shape[:1], rule.initial_state, dtype=sums_dtype(value.dtype), device="cpu")
            ]
        self.width = max(1, self.value[:1].numel()) if self.value.ndim else 1

    @property
    def rule(self) -> RowOptimizer:
        """The optimizer with the hyperparameters of the next step."""
        return self._rule

    @rule.setter
    def rule(self, rule: RowOptimizer) -> None:
        if not self._rule.same_layout(rule):
            raise ValueError(
                f"parameter {self.name} keeps the state of {self._rule.family}; {rule.family} needs another"
            )
        self._rule = rule

    def push(self, grad: Tensor) -> None:
        """One optimizer step with ``grad``, of the parameter's shape.

        Raises:
            SchemaError: another shape, or a dtype that is not a float. Nothing is changed.
        """
        if grad.shape != self.value.shape or not grad.is_floating_point():
            raise SchemaError(
                f"parameter {self.name}: a gradient of {tuple(self.value.shape)} expected, got {tuple(grad.shape)} "
                f"{grad.dtype}"
            )
        self.step += 1
        value = self.value.clone()
        grad = grad.to(value.dtype)
        if self._rule.family is Family.ROW_WISE_ADAGRAD:
            self._push_row_wise(value, grad)
        elif value.dtype in (torch.bfloat16, torch.float16):
            wide = [state.float() for state in self.states]
            weights = value.float()
            self._update(weights, grad.float(), wide)
            value.copy_(weights)
            for state, moved in zip(self.states, wide, strict=True):
                state.copy_(moved)
        else:
            self._update(value, grad.clone(), self.states)
        self.value = value

    def check_restored(self, tensors: Sequence[Tensor]) -> None:
        """Raise the errors of ``restore``; changes nothing."""
        mine = [self.value, *self.states]
        if [(t.shape, t.dtype) for t in tensors] != [(t.shape, t.dtype) for t in mine]:
            raise SchemaError(f"parameter {self.name}: value and {len(self.states)} states of its shape expected")

    def restore(self, tensors: Sequence[Tensor], step: int) -> None:
        """Take value and states from a checkpoint.

        Raises:
            SchemaError: their number, shapes or dtypes differ from those that the optimizer keeps.
        """
        self.check_restored(tensors)
        self.value, *self.states = (tensor.clone() for tensor in tensors)
        self.step = step

    def _update(self, weights: Tensor, grad: Tensor, states: list[Tensor]) -> None:
        update_of(self._rule.family, self._rule.constants(self.step))(weights, grad, states)

    def _push_row_wise(self, value: Tensor, grad: Tensor) -> None:
        rule = self._rule
        group = {"weight_decay": rule.weight_decay, "eps": rule.eps, "maximize": rule.maximize}
        rate = float(rule.constants(self.step)[0])
        RowWiseAdagrad._update_rows(value, self.states[0], grad, rate, group)
