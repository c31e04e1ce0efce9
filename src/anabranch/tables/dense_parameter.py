"""``DenseParameter``: a whole tensor on one shard, which moves as a row of a table does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch.errors import SchemaError
from anabranch.tables.kernels.rows import as_array, move_all
from anabranch.tables.optimizers.row_optimizers import Family, RowOptimizer
from anabranch.tables.table_spec import ALLOWED_DTYPES


class DenseParameter:
    """A tensor and the state of its optimizer.

    >>> parameter = DenseParameter("bias", torch.zeros(2), RowOptimizer(Family.SGD, lr=0.5))
    >>> parameter.push(torch.ones(2))
    >>> parameter.value
    tensor([-0.5000, -0.5000])

    Attributes:
        step: optimizer steps so far.
        rule: the optimizer, with the hyperparameters of the next step.
        value: the present tensor; a step replaces it and leaves the old one unchanged for readers that hold it.
    """

    def __init__(self, name: str, value: Tensor, rule: RowOptimizer) -> None:
        if value.dtype not in ALLOWED_DTYPES:
            raise SchemaError(f"parameter {name}: {value.dtype} is not one of {', '.join(map(str, ALLOWED_DTYPES))}")
        self.name = name
        self.value = value.detach().cpu().clone().contiguous()
        self.step = 0
        self.rule = rule
        # Row-wise Adagrad has a sum of each row; to other rules the whole is one row.
        self._of_state = value.shape[:1] if rule.family is Family.ROW_WISE_ADAGRAD else value.shape
        count, kind = len(rule.state_names) * math.prod(self._of_state), rule.state_form(1, value.dtype)[1]
        self._states = torch.full((count,), rule.initial_accumulator_value, dtype=kind, device="cpu")
        self._shared = False

    @property
    def states(self) -> list[Tensor]:
        """The optimizer's state, a tensor for each of its names."""
        return list(self._states.view(len(self.rule.state_names), *self._of_state))

    def push(self, grad: Tensor) -> None:
        """One optimizer step with ``grad``, of the parameter's shape."""
        assert grad.shape == self.value.shape
        self.step += 1
        if not grad.numel():
            return
        # float16 moves in float32, beside states that are float32 anyway; bfloat16 rounds inside a rule.
        kind = torch.float32 if self.value.dtype == torch.float16 else self.value.dtype
        value, states = self.value.to(kind, copy=True), self._states.clone() if self._shared else self._states
        rows = len(states) if self.rule.family is Family.ROW_WISE_ADAGRAD else 1
        flat = as_array(grad.contiguous().to(kind))
        move_all(self.rule.number, as_array(value), as_array(states), rows, self.rule.constants(self.step), flat)
        self.value, self._states, self._shared = value.to(self.value.dtype), states, False

    def share(self) -> list[Tensor]:
        """Return the value and its states, which the next step replaces and leaves unchanged."""
        self._shared = True
        return [self.value, *self.states]

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
        self.value, *states = (tensor.clone() for tensor in tensors)
        self._states = torch.cat([self._states[:0], *map(torch.flatten, states)])
        self._shared = False
        self.step = step
