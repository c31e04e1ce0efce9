"""Tensors that a step leaves behind have memory of their own, as in the plain loop, however equal their values are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from small_parts import assert_same, plain_step
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import anabranch as ab


class TwoHeads(nn.Module):
    """Both heads' parameters have equal gradients, and so do the two offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)
        self.one, self.two = nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.ones(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.base(x))
        return self.first(hidden) + self.second(hidden) + (self.one + self.two)


class Decaying(Optimizer):
    """Adds its decay to the gradients in place."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter, alpha=0.1)
                    parameter.add_(parameter.grad, alpha=-group["lr"])


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean()


def batch_of(index: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(index))


def test_an_optimizer_may_write_to_gradients_that_are_equal() -> None:
    torch.manual_seed(0)
    model, plain = TwoHeads(), TwoHeads()
    plain.load_state_dict(model.state_dict())
    reference = Decaying(plain.parameters())
    with ab.Executor(ab.TrainStep(model, loss_of, Decaying(model.parameters())), engine="graph") as executor:
        for index in range(5):
            executor.run(batch=batch_of(index))
            plain_step(plain, loss_of, reference, batch_of(index))
            assert_same(model, plain)


@pytest.mark.parametrize("evaluated", [False, True])
def test_results_of_equal_expressions_stay_apart(evaluated: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)

    def both(model: Any, x: Tensor) -> dict[str, Tensor]:
        y = model(x).detach()
        return {"total": y.sum(0), "last": y.sum(0)}

    optimizer = SGD(model.parameters(), lr=0.1)
    train = ab.TrainStep(model, lambda m, x: (loss_of(m, x), both(m, x)), optimizer)
    step: Any = ab.EvalStep(model, both) if evaluated else train
    with ab.Executor({"step": step}, engine="graph") as executor:
        for index in range(3):
            results = executor.run("step", batch=batch_of(index))
            last = results["last"].clone()
            results["total"].add_(1)
            assert torch.equal(results["last"], last)
