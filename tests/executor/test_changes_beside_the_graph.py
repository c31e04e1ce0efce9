"""Changes between and within steps that no guard on Python values sees: the engines give the plain loop's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from plain_loop import TrainingCase, check, linear, mean_square


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


# Which parameters an optimizer holds.


def groups_exchange_their_parameters(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = two_layers()
    own = list(model.parameters())
    optimizer = torch.optim.Adam([{"params": own[:2]}, {"params": own[2:], "lr": 0.3}], lr=0.01)

    def change(k: int) -> None:
        one, other = optimizer.param_groups
        one["params"], other["params"] = other["params"], one["params"]

    return TrainingCase(model, mean_square, optimizer, change)


def test_an_optimizer_that_holds_other_parameters_steps_on_those() -> None:
    assert check(groups_exchange_their_parameters, "graph").engines[4] == "graph"


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
    assert train.optimizers == (optimizer,)
    assert train.schedulers == ()


# What forward does in Python comes before the optimizers' step.


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.large = nn.Linear(4, 4), 0, False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.large = x.shape[0] == 5
        return self.layer(x)  # type: ignore[no-any-return]


def batch_of_two_sizes(i: int) -> Tensor:
    return torch.linspace(-1, 1, 20).reshape(5, 4)[: 5 if i in (1, 4, 8) else 3] + 0.1 * i


class OwnStep(torch.optim.SGD):
    """Reads in each step what forward has just written."""

    def __init__(self, model: Counts) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.model = model

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = (0.3 if self.model.large else 0.1) / self.model.calls
        super().step(closure)


def an_optimizer_reads_what_forward_wrote(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = Counts()
    return TrainingCase(model, mean_square, OwnStep(model), batch=batch_of_two_sizes)


def test_optimizers_read_values_that_forward_has_written_in_this_step() -> None:
    assert "graph" in check(an_optimizer_reads_what_forward_wrote, "graph").engines
