"""``FTRL``: follow the proximally regularised leader, the optimizer of sparse linear click-through models."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from anabranch.tables.optimizers.gradient_optimizer import GradientOptimizer


class FTRL(GradientOptimizer):
    """FTRL-Proximal: a step size per weight, and an ``l1`` that leaves most weights exactly 0.

    >>> weight = torch.nn.Parameter(torch.zeros(3))
    >>> optimizer = FTRL([weight], lr=0.5, l1=1.0)
    >>> weight.grad = torch.tensor([4.0, 0.5, 0.0])
    >>> optimizer.step()
    >>> weight.data
    tensor([-0.3000,  0.0000,  0.0000])

    With ``Q = (beta + sqrt(n)) / lr + l2``, where ``n`` is the sum of a weight's squared gradients so far, a step sets
    ``z <- z + g - (Q_new - Q_old) * w`` and ``w <- -sign(z) * max(|z| - l1, 0) / Q_new``.

    Only weights whose gradient is not 0 move, as in the source, so dense and sparse gradients give the same result;
    sparse ones cost what the touched rows cost. As long as a weight is not 0, its ``z`` follows from it; so first
    values other than 0, a learning rate that changes, and weights that were set by hand are met as if they had been
    reached by steps of the present rate. A step with ``lr=0`` changes nothing.

    Args:
        params: floating parameters.
        lr: the scale of the learning rates, alpha in the source, >= 0.
        beta: > 0; the larger, the smaller the first steps.
        l1: >= 0; weights whose gradients' sum does not exceed it are 0.
        l2: >= 0.
        maximize: ascends instead.

    Raises:
        ValueError: a number out of its range.

    Source: Algorithm 1 of McMahan et al., "Ad Click Prediction: a View from the Trenches" (2013).
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.1,
        *,
        beta: float = 1.0,
        l1: float = 0.0,
        l2: float = 0.0,
        maximize: bool = False,
    ) -> None:
        for name, value in {"lr": lr, "l1": l1, "l2": l2}.items():
            if not value >= 0:
                raise ValueError(f"FTRL takes {name} >= 0, got {value!r}")
        if not beta > 0:
            raise ValueError(f"FTRL takes beta > 0, got {beta!r}")
        super().__init__(params, {"lr": lr, "beta": beta, "l1": l1, "l2": l2, "maximize": maximize})

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, float]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, device="cpu")
            state["z"], state["n"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        numbers = [float(group[name]) for name in ("lr", "beta", "l1", "l2")]
        if not grad.is_sparse:
            follow(parameter, -grad if group["maximize"] else grad, state["z"], state["n"], *numbers)
            return
        grad = grad.coalesce()
        rows, values = grad.indices()[0], grad.values()
        weights, z, n = parameter[rows], state["z"][rows], state["n"][rows]
        follow(weights, -values if group["maximize"] else values, z, n, *numbers)
        parameter[rows], state["z"][rows], state["n"][rows] = weights, z, n


def follow(weights: Tensor, grad: Tensor, z: Tensor, n: Tensor, lr: float, beta: float, l1: float, l2: float) -> None:
    """One step in place; weights whose ``grad`` is 0 are unchanged.

    A weight that is not 0 has ``z = -(w * Q_old + sign(w) * l1)``, so adding ``-(Q_new - Q_old) * w`` to it gives
    ``-(w * Q_new + sign(w) * l1)``, and only the ``z`` of weights that are 0 is read. Half types compute in float32.
    """
    if not lr:
        return
    working = torch.float64 if weights.dtype == torch.float64 else torch.float32
    w, g = weights.to(working), grad.to(working)
    sums = n.to(working) + g * g
    scale = (sums.sqrt() + beta) / lr + l2
    led = torch.where(w != 0, -(w * scale + w.sign() * l1), z.to(working).clamp(-l1, l1)) + g
    moved = torch.where(led.abs() <= l1, 0.0, (led.sign() * l1 - led) / scale)
    touched = g != 0
    weights.copy_(torch.where(touched, moved, w))
    z.copy_(torch.where(touched, led, z.to(working)))
    n.copy_(sums)
