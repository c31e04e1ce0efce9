"""Tensors that a step leaves behind have memory of their own, as in the plain loop, however equal their values are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
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


class TwoTables(nn.Module):
    """Autograd lets the two sparse gradients share their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(6, 3, sparse=True), nn.Embedding(6, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        ids = (3 + x).long().clamp(0, 5)
        return self.first(ids) + self.second(ids)


class Decaying(Optimizer):
    """Adds its decay to the gradients in place."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = parameter.grad
                    if gradient.is_sparse:
                        gradient._values().mul_(1.5)
                    else:
                        gradient.add_(parameter, alpha=0.1)
                    parameter.add_(gradient, alpha=-group["lr"])


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean()


def batch_of(index: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(index))


@pytest.mark.parametrize("make", [TwoHeads, TwoTables])
def test_an_optimizer_may_write_to_gradients_that_are_equal(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, plain = make(), make()
    plain.load_state_dict(model.state_dict())
    reference = Decaying(plain.parameters())
    with ab.Executor(ab.TrainStep(model, loss_of, Decaying(model.parameters())), engine="graph") as executor:
        for index in range(5):
            executor.run(batch=batch_of(index))
            reference.zero_grad()
            loss_of(plain, batch_of(index)).backward()  # type: ignore[no-untyped-call]
            reference.step()
            for (name, one), two in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(one, two), (index, name)


def test_equal_gradients_that_no_optimizer_holds_add_up_each() -> None:
    torch.manual_seed(0)
    model, plain = TwoHeads(), TwoHeads()
    plain.load_state_dict(model.state_dict())
    reference = SGD(plain.base.parameters(), lr=0.1)
    step = ab.TrainStep(model, loss_of, SGD(model.base.parameters(), lr=0.1), clip_grad_norm=0.2)
    with ab.Executor(step, engine="graph") as executor:
        for index in range(4):
            executor.run(batch=batch_of(index))
            reference.zero_grad()
            loss_of(plain, batch_of(index)).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
            reference.step()
            for (name, one), two in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(one, two), (index, name)
                assert torch.equal(one.grad, two.grad), (index, name)  # type: ignore[arg-type]


class Averages(nn.Module):
    """Two averages that begin as equal values, and a gradient that equals a value the model keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(5, 3))
        self.quick: Any = None
        self.slow: Any = None
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        mean = y.detach().mean(0)
        if self.quick is None:
            self.quick, self.slow = mean.clone(), mean.clone()
        else:
            self.quick.mul_(0.5).add_(mean, alpha=0.5)
            self.slow.mul_(0.9).add_(mean, alpha=0.1)
        self.kept = (y.detach() - self.slow).tanh()
        return ((y - self.quick).square() + self.scale * self.kept).sum()


def test_tensors_that_a_model_keeps_stay_apart() -> None:
    def run(engine: Any) -> list[list[float]]:
        torch.manual_seed(0)
        model = Averages()
        found = []
        step = ab.TrainStep(model, lambda m, x: m(x), SGD(model.parameters(), lr=0.01))
        with ab.Executor(step, engine=engine) as executor:
            for index in range(6):
                if index % 3 == 0:
                    model.quick = model.slow = None
                loss = executor.run(batch=batch_of(index))["loss"]
                with torch.no_grad():
                    assert model.scale.grad is not None
                    model.scale.grad.zero_()  # in place, as some loops do
                found.append([loss.item(), *model.kept.flatten().tolist(), *model.slow.tolist()])
        return found

    assert run("graph") == run("tape")


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
