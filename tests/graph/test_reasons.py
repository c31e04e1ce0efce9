"""Reasons why a step cannot be a graph: the user's line, PyTorch's words, the cure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anabranch as ab
from anabranch.errors import CaptureError


def writes_outside(model: nn.Module, x: Tensor) -> Any:
    sums = []

    def region(x: Tensor) -> Any:
        sums.append(x.sum())
        return model(x)

    return checkpoint(region, x, use_reentrant=False).sum()


def writes_early(model: nn.Module, x: Tensor) -> Any:
    written = model(x).exp()
    written.add_(1)
    return written.sum()


def branches(model: nn.Module, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda y: model(y).sum(), lambda y: model(y).square().sum(), (x,))


LOSSES = [branches, writes_outside]


def refusal(loss: Any) -> str:
    model = nn.Linear(4, 4)
    step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with ab.Executor(step, engine="graph") as executor, pytest.raises(CaptureError) as raised:
        executor.run(batch=torch.ones(3, 4))
    return str(raised.value)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_reasons_name_the_line_and_the_cure(loss: Any) -> None:
    first = loss.__code__.co_firstlineno
    found = refusal(loss)
    assert any(f"{__file__}:{line}: the step cannot be a graph" in found for line in range(first, first + 8)), found
    assert "use engine='tape'" in found


def test_an_error_of_backward_is_not_put_at_the_line_that_runs_the_step() -> None:
    found = refusal(writes_early)
    assert "modified by an inplace operation" in found
    assert __file__ not in found
