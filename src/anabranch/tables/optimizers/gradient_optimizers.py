"""``FTRL`` and ``RowWiseAdagrad``: optimizers of sparse models that PyTorch lacks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from anabranch.tensors.dtypes import working_dtype


class GradientOptimizer(torch.optim.Optimizer):
    """An optimizer that updates each parameter that has a gradient: all of it, or the rows of a sparse gradient."""

    state_names: ClassVar[tuple[str, ...]]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step over every parameter that has a gradient; ``closure`` recomputes the loss and is its result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state |= {"step": torch.tensor(0.0, device="cpu"), **self._first_states(parameter, group)}
        state["step"] += 1
        tensors = [parameter, *(state[name] for name in self.state_names)]
        if not grad.is_sparse:
            self._move(-grad if group["maximize"] else grad, *tensors, group=group, step=state["step"].item())
            return
        grad = grad.coalesce()
        rows, values = grad.indices()[0], grad.values()
        parts = [tensor[rows] for tensor in tensors]
        self._move(-values if group["maximize"] else values, *parts, group=group, step=state["step"].item())
        for tensor, part in zip(tensors, parts, strict=True):
            tensor[rows] = part

    @abstractmethod
    def _first_states(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the states of a parameter before its first step, by name."""

    @abstractmethod
    def _move(self, grad: Tensor, weights: Tensor, *states: Tensor, group: dict[str, Any], step: float) -> None:
        """Move weights and states in place."""


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

    state_names = ("z", "n")

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

    def _first_states(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"z": torch.zeros_like(parameter), "n": torch.zeros_like(parameter)}

    def _move(self, grad: Tensor, weights: Tensor, *states: Tensor, group: dict[str, Any], step: float) -> None:
        """One step; weights whose ``grad`` is 0 are unchanged.

        A weight that is not 0 has ``z = -(w * Q_old + sign(w) * l1)``, so adding ``-(Q_new - Q_old) * w`` to it gives
        ``-(w * Q_new + sign(w) * l1)``, and only the ``z`` of weights that are 0 is read. Half types compute in
        float32.
        """
        lr, beta, l1, l2 = (float(group[name]) for name in ("lr", "beta", "l1", "l2"))
        if not lr:
            return
        working = working_dtype(weights.dtype)
        w, g, z, n = (tensor.to(working) for tensor in (weights, grad, *states))
        sums = n + g * g
        scale = (sums.sqrt() + beta) / lr + l2
        led = torch.where(w != 0, -(w * scale + w.sign() * l1), z.clamp(-l1, l1)) + g
        moved = torch.where(led.abs() <= l1, 0.0, (led.sign() * l1 - led) / scale)
        for tensor, now in zip((weights, *states), (moved, led, sums), strict=True):
            tensor.copy_(torch.where(g != 0, now, tensor))


class RowWiseAdagrad(GradientOptimizer):
    """Adagrad whose sum of squares is one value per row: the mean of the squared gradient over the row.

    >>> table = torch.nn.Embedding(4, 2, sparse=True)
    >>> optimizer = RowWiseAdagrad(table.parameters(), lr=0.1)
    >>> table(torch.tensor([1, 3, 1])).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[table.weight]["sum"]
    tensor([0., 4., 0., 1.])

    A table of ``rows x width`` weights keeps ``rows`` numbers of state instead of ``rows x width``. Dense and sparse
    gradients give the same result; sparse ones cost what the touched rows cost. The squares are summed in float64.

    Args:
        params: parameters of at least one dimension, floating; dim 0 is the rows.
        lr: learning rate, >= 0.
        lr_decay: the rate of step t is ``lr / (1 + (t - 1) * lr_decay)``.
        weight_decay: added to the gradient as ``weight_decay * weight``; refused with sparse gradients, as in
            ``torch.optim.Adagrad``.
        initial_accumulator_value: the first value of the sums, >= 0.
        eps: added to the root, >= 0.
        maximize: ascends instead.

    Raises:
        ValueError: a number below 0, or a parameter without dimensions.
        RuntimeError: weight decay with a sparse gradient.

    Source: the row-wise Adagrad of Mudigere et al., "Software-Hardware Co-design for Fast and Scalable Training of Deep
    Learning Recommendation Models" (2022).
    """

    state_names = ("sum",)

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-2,
        *,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        maximize: bool = False,
    ) -> None:
        numbers = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        for name, value in numbers.items():
            if not value >= 0:
                raise ValueError(f"RowWiseAdagrad takes {name} >= 0, got {value!r}")
        super().__init__(params, {**numbers, "maximize": maximize})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim == 0:
                    raise ValueError("RowWiseAdagrad keeps a number per row; a parameter without dimensions has none")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of ``state_dict``; unlike in torch, sums stay float32 for half-precision weights."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(saved, (p for group in self.param_groups for p in group["params"]), strict=True):
            sums = state_dict["state"].get(number, {}).get("sum")
            if sums is not None:
                self.state[parameter]["sum"] = sums.to(parameter.device, working_dtype(parameter.dtype), copy=True)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if grad.is_sparse and group["weight_decay"]:
            raise RuntimeError("weight_decay changes every row, and a sparse gradient names a few; use sparse=False")
        super()._update(parameter, grad, group)

    def _first_states(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        kind = working_dtype(parameter.dtype)  # a growing sum soon stops changing in half precision
        sums = parameter.new_full(parameter.shape[:1], group["initial_accumulator_value"], dtype=kind)
        return {"sum": sums}

    def _move(self, grad: Tensor, weights: Tensor, *states: Tensor, group: dict[str, Any], step: float) -> None:
        (sums,), rate = states, group["lr"] / (1 + (step - 1) * group["lr_decay"])
        grad, wide = grad.to(sums.dtype), weights.to(sums.dtype)
        if group["weight_decay"]:
            grad = grad + wide * group["weight_decay"]
        squares = grad.double().square().reshape(len(sums), math.prod(grad.shape[1:]))  # -1 is refused of no rows
        sums += squares.mean(1).to(sums.dtype)
        scale = rate / (sums.double().sqrt() + group["eps"])
        scale = scale.to(sums.dtype).reshape(-1, *[1] * (weights.ndim - 1))
        weights.copy_(wide - grad * scale)
