"""``GradientOptimizer``: the step of PyTorch optimizers that update parameters one by one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor


class GradientOptimizer(torch.optim.Optimizer):
    """An optimizer that updates each parameter that has a gradient, with its group."""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
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

    @abstractmethod
    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update ``parameter`` in place."""
