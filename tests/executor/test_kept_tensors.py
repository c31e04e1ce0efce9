"""Tensors and gradients that outlive a step as in the plain loop: on the model, in ``.grad``; and torch's settings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.penalty, self.view = torch.zeros(()), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.layer.weight.square().sum()
        self.view = self.layer.weight.detach()[0, :2]
        return self.layer(x).square().mean() + 0.1 * self.penalty


def test_a_tensor_that_the_model_keeps_is_never_silently_without_its_history() -> None:
    torch.manual_seed(0)
    model = Keeps()
    step = ab.TrainStep(model, lambda m, x: m(x), torch.optim.SGD(model.parameters(), lr=0.1))
    with ab.Executor(step, engine="graph") as executor:
        for _ in range(4):
            executor.run(batch=torch.ones(4, 3))
            assert model.penalty.requires_grad
            assert not model.view.requires_grad
            model.view.clamp_(-1, 1)  # in place, as after a plain step
        assert executor.engine() == "graph"
        with pytest.raises(ab.CaptureError, match=r"recorded no history; detach\(\) it where it is kept"):
            model.penalty.backward()
