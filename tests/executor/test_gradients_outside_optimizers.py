"""Gradients of parameters that no optimizer of the step holds accumulate as in a plain loop, whoever reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import anabranch as ab

Change = Callable[[int, Any, Optimizer], None]


def model_of() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean()


def batch_of(index: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(index))


def same(one: Tensor | None, two: Tensor | None) -> bool:
    return one is two if one is None or two is None else torch.equal(one, two)


def replaces_a_layer(index: int, model: Any, optimizer: Optimizer) -> None:
    if index == 5:
        model[2] = copy.deepcopy(model[2])


def assigns_a_state(index: int, model: Any, optimizer: Optimizer) -> None:
    if index == 5:
        bias = model[2].bias.detach().clone()
        model[2].load_state_dict({"weight": model[2].weight.detach().clone(), "bias": bias}, assign=True)


def adds_a_group(index: int, model: Any, optimizer: Optimizer) -> None:
    if index == 3:
        optimizer.add_param_group({"params": [model[2].weight]})


def applies_by_hand(index: int, model: Any, optimizer: Optimizer) -> None:
    if index % 3 == 2:
        with torch.no_grad():
            for parameter in model[2].parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad.zero_()


def clips_all_before_the_step(index: int, model: Any, optimizer: Optimizer) -> None:
    if index == 0:

        def clip(*_: object) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        optimizer.register_step_pre_hook(clip)


def steps_in_backward(index: int, model: Any, optimizer: Optimizer) -> None:
    if index == 0:
        other = SGD(model[2].parameters(), lr=0.05)
        count = [0]

        def step(parameter: Tensor) -> None:
            count[0] += 1
            if count[0] % 2 == 0:
                other.step()
                other.zero_grad()

        model[2].weight.register_post_accumulate_grad_hook(step)


CHANGES = [
    replaces_a_layer,
    assigns_a_state,
    adds_a_group,
    applies_by_hand,
]
WITH_HOOKS = [clips_all_before_the_step, steps_in_backward]


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("change", "engine"),
    [
        *((change, engine) for change in CHANGES for engine in ("tape", "graph")),
        *((change, "tape") for change in WITH_HOOKS),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_they_add_up(engine: Any, change: Change) -> None:
    model, plain = model_of(), model_of()
    optimizer, reference = SGD(model[0].parameters(), lr=0.1), SGD(plain[0].parameters(), lr=0.1)
    with ab.Executor(ab.TrainStep(model, loss_of, optimizer), engine=engine) as executor:
        for index in range(9):
            change(index, model, optimizer)
            change(index, plain, reference)
            found = executor.run(batch=batch_of(index), fetch=["2.bias.grad"])
            reference.zero_grad()
            loss = loss_of(plain, batch_of(index))
            loss.backward()  # type: ignore[no-untyped-call]
            reference.step()
            assert torch.equal(found["loss"], loss.detach())
            for (name, one), two in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(one, two), (index, name)
                assert same(one.grad, two.grad), (index, name)
            assert same(found["2.bias.grad"], plain[2].bias.grad)


@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_clipping_uses_the_accumulated_gradient(engine: Any) -> None:
    model, plain = model_of(), model_of()
    optimizer, reference = SGD(model[0].parameters(), lr=0.1), SGD(plain[0].parameters(), lr=0.1)
    step = ab.TrainStep(model, loss_of, optimizer, clip_grad_norm=0.2)
    with ab.Executor(step, engine=engine) as executor:
        for index in range(7):
            executor.run(batch=batch_of(index))
            reference.zero_grad()
            loss_of(plain, batch_of(index)).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
            reference.step()
            for one, two in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(one, two)
                assert same(one.grad, two.grad)
        assert executor.engine() == ("tape" if engine == "tape" else "graph")


def test_a_kept_gradient_stays_the_tensor_that_it_was() -> None:
    model = model_of()
    step = ab.TrainStep(model, loss_of, SGD(model[0].parameters(), lr=0.1))
    with ab.Executor(step, engine="graph") as executor:
        executor.run(batch=batch_of(0))
        kept = model[2].weight.grad
        for index in range(1, 6):
            executor.run(batch=batch_of(index))
            assert model[2].weight.grad is kept
        assert executor.engine() == "graph"


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.calls = nn.Linear(4, 2), 0
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.inner(x)
        self.last = y.detach().sum()
        return y


class Picky(SGD):
    """Refuses large gradients."""

    def step(self, closure: Any = None) -> Any:
        if any(float(p.grad.abs().max()) > 100 for group in self.param_groups for p in group["params"]):
            raise FloatingPointError("too large")
        return super().step(closure)


@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_an_optimizer_that_raises_leaves_gradients_and_the_python_effects_of_forward(engine: Any) -> None:
    model, plain = Counting(), Counting()
    optimizer, reference = Picky(model.parameters(), lr=0.1), Picky(plain.parameters(), lr=0.1)
    with ab.Executor(ab.TrainStep(model, loss_of, optimizer), engine=engine) as executor:
        for index in range(9):
            batch = batch_of(index) * (1e3 if index in (1, 6, 7) else 1)
            raised = []
            try:
                executor.run(batch=batch)
            except FloatingPointError as error:
                raised.append(str(error))
            reference.zero_grad()
            loss_of(plain, batch).backward()  # type: ignore[no-untyped-call]
            try:
                reference.step()
            except FloatingPointError as error:
                raised.append(str(error))
            assert raised == ["too large"] * (2 if index in (1, 6, 7) else 0)
            assert model.calls == plain.calls
            assert same(model.last, plain.last)
            for one, two in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(one, two)
                assert one.grad is not None
                assert same(one.grad, two.grad)
