"""Changes between and within steps that no guard on Python values sees: the engines give the plain loop's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from plain_loop import Build, Play, check, linear, mean_square, nothing

ENGINES = ["auto", "graph"]


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def first(action: Callable[[], object]) -> Callable[[int], None]:
    """A change that ``action`` makes once."""
    return lambda k: None if k != 1 else (action(), None)[1]


# Which parameters an optimizer holds.


def groups_exchange_their_parameters(patch: pytest.MonkeyPatch) -> Play:
    model = two_layers()
    own = list(model.parameters())
    optimizer = torch.optim.Adam([{"params": own[:2]}, {"params": own[2:], "lr": 0.3}], lr=0.01)

    def change(k: int) -> None:
        one, other = optimizer.param_groups
        one["params"], other["params"] = other["params"], one["params"]

    return Play(model, mean_square, optimizer, change)


def a_place_in_a_group_gets_another_parameter(patch: pytest.MonkeyPatch) -> Play:
    model = two_layers()
    own = list(model.parameters())
    optimizer = torch.optim.Adam(own[:2], lr=0.05)

    def change(k: int) -> None:
        optimizer.param_groups[0]["params"][0] = own[2 * (k % 2)]

    return Play(model, mean_square, optimizer, change)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("build", [groups_exchange_their_parameters, a_place_in_a_group_gets_another_parameter])
def test_an_optimizer_that_holds_other_parameters_steps_on_those(build: Build, engine: str) -> None:
    assert check(build, engine).engines[4] == "graph"


# What a step is.


def test_a_step_is_fixed_once_it_is_made() -> None:
    """The tape read some attributes anew in each step, which graphs had taken up: they could not both be right."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = ab.TrainStep(model, mean_square, optimizer, clip_grad_norm=1.0)
    evaluate = ab.EvalStep(model, lambda model, x: {"y": model(x)})
    for step in (train, evaluate):
        for name in vars(step):
            with pytest.raises(AttributeError, match=f"{name!r} of a {type(step).__name__} .* make a new"):
                setattr(step, name, getattr(step, name))
            with pytest.raises(AttributeError, match="make a new"):
                delattr(step, name)
    assert train.optimizers == (optimizer,)
    assert train.schedulers == ()
