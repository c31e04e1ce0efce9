"""``DenseParameter``: a whole tensor on one shard, updated by torch's own fused optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch.errors import SchemaError
from anabranch.tables.kernels.memory import working_dtype
from anabranch.tables.optimizers.gradient_optimizers import RowWiseAdagrad, follow, sums_dtype
from anabranch.tables.optimizers.row_optimizers import Family, RowOptimizer
from anabranch.tables.table_spec import ALLOWED_DTYPES, state_dtype


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
        kept_as = state_dtype(value.dtype)
        self.states = [torch.full_like(self.value, rule.initial_state, dtype=kept_as) for _ in range(rule.states)]
        if rule.family is Family.ROW_WISE_ADAGRAD:
            rows, kept_as = self.value.shape[:1], sums_dtype(value.dtype)
            self.states = [torch.full(rows, rule.initial_state, dtype=kept_as, device="cpu")]
        self._shared = False

    def push(self, grad: Tensor) -> None:
        """One optimizer step with ``grad``, of the parameter's shape."""
        assert grad.shape == self.value.shape
        self.step += 1
        kind = working_dtype(self.value.dtype)
        value = self.value.to(kind, copy=True)
        states = [state.to(working_dtype(state.dtype), copy=self._shared) for state in self.states]
        self._update(value, grad.to(kind, copy=True), states)
        self.value, self._shared = value.to(self.value.dtype), False
        self.states = [moved.to(state.dtype) for moved, state in zip(states, self.states, strict=True)]

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
        self.value, *self.states = (tensor.clone() for tensor in tensors)
        self.step = step

    def _update(self, weights: Tensor, grad: Tensor, states: list[Tensor]) -> None:
        """Update ``weights`` and ``states`` in place, as torch does; the gradient is scratch.

        Rules without a fused kernel take the operations of ``torch.optim``'s single-tensor form in their order.
        """
        rule, c = self.rule, self.rule.constants(self.step).tolist()
        options: dict[str, Any] = {"weight_decay": rule.weight_decay, "maximize": rule.maximize}
        step = [torch.tensor(float(self.step), dtype=torch.float32, device="cpu")]
        match rule.family:
            case Family.SGD:
                torch._fused_sgd_(
                    [weights], [grad], states, momentum=rule.momentum, lr=rule.lr, dampening=rule.dampening,
                    nesterov=rule.nesterov, is_first_step=self.step == 1, **options,
                )  # fmt: skip
                return
            case Family.ADAGRAD:
                torch._fused_adagrad_(
                    [weights], [grad], states, step, lr=c[0], lr_decay=0.0, eps=rule.eps, **options
                )  # fmt: skip
                return
            case Family.ROW_WISE_ADAGRAD:
                RowWiseAdagrad._update_rows(weights, states[0], grad, c[0], {**options, "eps": rule.eps})
                return
            case Family.ADAM | Family.ADAMW:
                fused = torch._fused_adam_ if rule.family is Family.ADAM else torch._fused_adamw_
                fused(
                    [weights], [grad], states[:1], states[1:2], states[2:], step, lr=rule.lr, beta1=rule.beta1,
                    beta2=rule.beta2, eps=rule.eps, amsgrad=rule.amsgrad, **options,
                )  # fmt: skip
                return
        grad = -grad if rule.maximize else grad
        if rule.weight_decay:
            grad = grad.add(weights, alpha=rule.weight_decay)
        match rule.family:
            case Family.SPARSE_ADAM:
                states[0] += c[2] * (grad - states[0])
                states[1] += c[8] * (grad * grad - states[1])
                weights += c[0] * states[0] / (states[1].sqrt() + rule.eps)
            case Family.RMSPROP:
                root = average = states[0].mul_(rule.alpha).addcmul_(grad, grad, value=1 - rule.alpha)
                if rule.centered:
                    mean = states[-1].lerp_(grad, 1 - rule.alpha)
                    root = average.addcmul(mean, mean, value=-1)
                root = root.sqrt().add_(rule.eps)
                if rule.momentum > 0:
                    weights.add_(states[1].mul_(rule.momentum).addcdiv_(grad, root), alpha=-rule.lr)
                else:
                    weights.addcdiv_(grad, root, value=-rule.lr)
            case Family.ADAMAX:
                mean, norm = states
                mean.lerp_(grad, 1 - rule.beta1)
                torch.maximum(norm.mul_(rule.beta2), grad.abs().add_(rule.eps), out=norm)
                weights.addcdiv_(mean, norm, value=-c[0])
            case Family.FTRL:
                z, n = states
                follow(weights, grad, z, n, rule.lr, rule.beta, rule.l1, rule.l2)
