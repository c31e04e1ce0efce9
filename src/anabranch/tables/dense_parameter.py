"""``DenseParameter``: a whole tensor on one shard, updated by torch's own fused optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import SchemaError
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
            self.states = [
                torch.full(self.value.shape[:1], rule.initial_state, dtype=sums_dtype(value.dtype), device="cpu")
            ]
        self._shared = False

    def push(self, grad: Tensor) -> None:
        """One optimizer step with ``grad``, of the parameter's shape."""
        assert grad.shape == self.value.shape
        self.step += 1
        if self._shared:
            self.states, self._shared = [state.clone() for state in self.states], False
        value = self.value.clone()
        grad = grad.to(value.dtype)
        if self.rule.family is Family.ROW_WISE_ADAGRAD:
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
        _update_of(self.rule.family, self.rule.constants(self.step))(weights, grad, states)

    def _push_row_wise(self, value: Tensor, grad: Tensor) -> None:
        rule = self.rule
        group = {"weight_decay": rule.weight_decay, "eps": rule.eps, "maximize": rule.maximize}
        rate = float(rule.constants(self.step)[0])
        RowWiseAdagrad._update_rows(value, self.states[0], grad, rate, group)


# --- the update rules as torch runs them on whole tensors -------------------------------------------------------------
# Each turns a step's constants, in the order of ``RowOptimizer.constants``, into an update in place; the gradient is
# scratch. Rules without a fused kernel take the operations of ``torch.optim``'s single-tensor form in their order.

Array = NDArray[Any]
Update = Callable[[Tensor, Tensor, list[Tensor]], None]
"""``update(weights, grad, states)``."""


def _update_of(family: str, constants: Array) -> Update:
    """Return the update of ``family``, as ``Family`` names it, in a step with these constants."""
    return _RULES.get(family, _run_adam)(constants)


def _run_sgd(constants: Array) -> Update:
    c = constants.tolist()

    def update(weights: Tensor, grad: Tensor, states: list[Tensor]) -> None:
        torch._fused_sgd_(
            [weights],
            [grad],
            states,
            weight_decay=c[4],
            momentum=c[1] if states else 0.0,
            lr=c[0],
            dampening=1 - c[2],
            nesterov=bool(c[3]) and bool(states),
            maximize=c[5] < 0,
            is_first_step=bool(c[6]),
        )

    return update


def _run_adagrad(constants: Array) -> Update:
    c = constants.tolist()

    def update(weights: Tensor, grad: Tensor, states: list[Tensor]) -> None:
        torch._fused_adagrad_(
            [weights],
            [grad],
            states,
            [torch.tensor(1.0, device="cpu")],
            lr=c[0],
            lr_decay=0.0,
            weight_decay=c[4],
            eps=c[1],
            maximize=c[5] < 0,
        )

    return update


def _run_adam(constants: Array) -> Update:
    c = constants.tolist()

    def fused(weights: Tensor, grad: Tensor, states: list[Tensor]) -> None:
        decoupled = c[7] != 1.0
        run = torch._fused_adamw_ if decoupled else torch._fused_adam_
        run(
            [weights],
            [grad],
            states[:1],
            states[1:2],
            states[2:],
            [torch.tensor(c[10], dtype=torch.float32, device="cpu")],
            lr=c[11],
            beta1=c[9],
            beta2=c[3],
            weight_decay=(1 - c[7]) / c[11] if decoupled else c[4],
            eps=c[6],
            amsgrad=len(states) > 2,
            maximize=c[5] < 0,
        )

    def sparse(weights: Tensor, grad: Tensor, states: list[Tensor]) -> None:
        grad = grad * c[5]
        states[0] += c[2] * (grad - states[0])
        states[1] += c[8] * (grad * grad - states[1])
        weights += c[0] * states[0] / (states[1].sqrt() + c[6])

    return fused if c[10] else sparse


def _run_rmsprop(constants: Array) -> Update:
    lr, momentum, alpha, centered, decay, sign, eps, *_ = constants.tolist()

    def update(weights: Tensor, grad: Tensor, states: list[Tensor]) -> None:
        grad = _with_decay(weights, grad, decay, sign)
        average = states[0].mul_(alpha).addcmul_(grad, grad, value=1 - alpha)
        if centered:
            mean = states[-1].lerp_(grad, 1 - alpha)
            root = average.addcmul(mean, mean, value=-1).sqrt_().add_(eps)
        else:
            root = average.sqrt().add_(eps)
        if momentum > 0:
            buffer = states[1].mul_(momentum).addcdiv_(grad, root)
            weights.add_(buffer, alpha=-lr)
        else:
            weights.addcdiv_(grad, root, value=-lr)

    return update


def _run_adamax(constants: Array) -> Update:
    rate, _, beta1, beta2, decay, sign, eps, *_ = constants.tolist()

    def update(weights: Tensor, grad: Tensor, states: list[Tensor]) -> None:
        grad = _with_decay(weights, grad, decay, sign)
        mean, norm = states
        mean.lerp_(grad, 1 - beta1)
        torch.maximum(norm.mul_(beta2), grad.abs().add_(eps), out=norm)
        weights.addcdiv_(mean, norm, value=-rate)

    return update


def _run_ftrl(constants: Array) -> Update:
    lr, _, beta, l1, _, sign, l2, *_ = constants.tolist()

    def update(weights: Tensor, grad: Tensor, states: list[Tensor]) -> None:
        z, n = states
        follow(weights, grad * sign, z, n, lr, beta, l1, l2)

    return update


def _with_decay(weights: Tensor, grad: Tensor, decay: float, sign: float) -> Tensor:
    grad = grad if sign > 0 else -grad
    return grad.add(weights, alpha=decay) if decay else grad


_RULES: dict[str, Callable[[Array], Update]] = {
    "SGD": _run_sgd,
    "Adagrad": _run_adagrad,
    "RMSprop": _run_rmsprop,
    "Adamax": _run_adamax,
    "FTRL": _run_ftrl,
}
