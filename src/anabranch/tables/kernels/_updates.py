"""The update rules as PyTorch runs them, on whole tensors: torch's fused kernels, or the operations of its plain forms.

Each function turns a step's constants, in the order of ``RowOptimizer.constants``, into an update of weights and states
in place; the gradient is scratch. Rules without a fused kernel take the operations of ``torch.optim``'s single-tensor
form in their order, so that they give its bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.tables.optimizers.ftrl import follow

__all__ = ["Update", "run_adagrad", "run_adam", "run_sgd", "update_of"]

Array = NDArray[Any]
Update = Callable[[Tensor, Tensor, list[Tensor]], None]
"""``update(weights, grad, states)``."""


def update_of(family: str, constants: Array) -> Update:
    """Return the update of ``family``, as ``Family`` names it, in a step with these constants."""
    return _RULES.get(family, run_adam)(constants)


def run_sgd(constants: Array) -> Update:
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


def run_adagrad(constants: Array) -> Update:
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


def run_adam(constants: Array) -> Update:
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
    "SGD": run_sgd,
    "Adagrad": run_adagrad,
    "RMSprop": _run_rmsprop,
    "Adamax": _run_adamax,
    "FTRL": _run_ftrl,
}
