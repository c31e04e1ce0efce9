"""Gradients of parameters that no optimizer of the step holds accumulate as in a plain loop, whoever reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_parts import plain_step
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


def adds_a_group(index: int, model: Any, optimizer: Optimizer) -> None:
    if index == 3:
        optimizer.add_param_group({"params": [model[2].weight]})


def applies_by_hand(index: int, model: Any, optimizer: Optimizer) -> None:
    if index % 3 == 2:
        with torch.no_grad():
            for parameter in model[2].parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad.zero_()


CHANGES = [replaces_a_layer, adds_a_group, applies_by_hand]


@pytest.mark.parametrize("engine", ["tape", "graph"])
@pytest.mark.parametrize("change", CHANGES)
def test_they_add_up(engine: Any, change: Change) -> None:
    model, plain = model_of(), model_of()
    optimizer, reference = SGD(model[0].parameters(), lr=0.1), SGD(plain[0].parameters(), lr=0.1)
    with ab.Executor(ab.TrainStep(model, loss_of, optimizer), engine=engine) as executor:
        for index in range(9):
            change(index, model, optimizer)
            change(index, plain, reference)
            found = executor.run(batch=batch_of(index), fetch=["2.bias.grad"])
            assert torch.equal(found["loss"], plain_step(plain, loss_of, reference, batch_of(index)))
            for (name, one), two in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(one, two), (index, name)
                assert same(one.grad, two.grad), (index, name)
            assert same(found["2.bias.grad"], plain[2].bias.grad)
