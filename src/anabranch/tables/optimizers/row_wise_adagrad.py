"""``RowWiseAdagrad``: Adagrad with one accumulator per row, the usual optimizer of embedding tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from anabranch.tables.optimizers.gradient_optimizer import GradientOptimizer


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the sums beside weights of ``dtype``: a growing sum soon stops changing in half precision.

    >>> sums_dtype(torch.bfloat16), sums_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


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
                    raise ValueError(
                        "RowWiseAdagrad keeps one number per row; a parameter without dimensions has no rows"
                    )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of ``state_dict``; unlike in torch, sums stay float32 for half-precision weights."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(saved, (p for group in self.param_groups for p in group["params"]), strict=True):
            sums = state_dict["state"].get(number, {}).get("sum")
            if sums is not None:
                self.state[parameter]["sum"] = sums.to(parameter.device, sums_dtype(parameter.dtype), copy=True)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, float]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, device="cpu")
            state["sum"] = torch.full(
                parameter.shape[:1],
                group["initial_accumulator_value"],
                dtype=sums_dtype(parameter.dtype),
                device=parameter.device,
            )
        state["step"] += 1
        rate = group["lr"] / (1 + (state["step"].item() - 1) * group["lr_decay"])
        if not grad.is_sparse:
            self._update_rows(parameter, state["sum"], grad, rate, group)
            return
        if group["weight_decay"]:
            raise RuntimeError(
                "weight_decay changes every row, but a sparse gradient names only a few; use sparse=False"
            )
        grad = grad.coalesce()
        rows = grad.indices()[0]
        weights, sums = parameter[rows], state["sum"][rows]
        self._update_rows(weights, sums, grad.values(), rate, group)
        parameter[rows], state["sum"][rows] = weights, sums

    @staticmethod
    def _update_rows(weights: Tensor, sums: Tensor, grad: Tensor, rate: float, group: dict[str, float]) -> None:
        grad = (-grad if group["maximize"] else grad).to(sums.dtype)
        wide = weights.to(sums.dtype)
        if group["weight_decay"]:
            grad = grad + wide * group["weight_decay"]
        squares = grad.double().square().reshape(len(sums), -1)
        sums += squares.mean(1).to(sums.dtype)
        scale = rate / (sums.double().sqrt() + group["eps"])
        scale = scale.to(sums.dtype).reshape(-1, *[1] * (weights.ndim - 1))
        weights.copy_(wide - grad * scale)
