"""Tensors and gradients that outlive a step as in the plain loop: on the model, in ``.grad``; and torch's settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal

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


@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_gradients_that_the_steps_optimizer_does_not_hold_add_up(engine: Any) -> None:
    """Its ``zero_grad`` does not clear them: another optimizer may step on the sum of several batches."""

    def run(engine: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        fast, slow = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (2, 0))

        def loss(model: Any, x: Any) -> Any:
            return model(x).square().mean()

        if engine is None:
            for index in range(8):
                fast.zero_grad()
                loss(model, torch.full((4, 3), 0.1 * index)).backward()
                fast.step()
                if index % 4 == 3:
                    slow.step()
                    slow.zero_grad()
            return list(model.parameters())
        with ab.Executor(ab.TrainStep(model, loss, fast), engine=engine) as executor:
            for index in range(8):
                executor.run(batch=torch.full((4, 3), 0.1 * index))
                if index % 4 == 3:
                    slow.step()
                    slow.zero_grad()
            assert executor.engine() == ("tape" if engine == "tape" else "graph")
        return list(model.parameters())

    assert all(map(torch.equal, run(engine), run(None)))


def test_distributions_still_check_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's tracer switches the checks off for the whole process; in another test it may have done so already."""
    monkeypatch.setattr(Distribution, "_validate_args", True)
    model = nn.Linear(3, 1)

    def loss(model: Any, x: Any) -> Any:
        return -Normal(model(x)[:, 0], 1.0).log_prob(x[:, 0]).mean()

    step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.01))
    with ab.Executor(step, engine="graph") as executor, pytest.raises(ab.CaptureError):
        executor.run(batch=torch.ones(4, 3))
    assert Distribution._validate_args is True
    with ab.Executor(step) as executor, pytest.raises(ValueError, match="Expected parameter loc"):
        executor.run(batch=torch.full((4, 3), float("nan")))
    assert model.weight.isfinite().all()
