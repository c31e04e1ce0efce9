"""A graph runs only once the tape has taken a batch of it: an error of the tape is raised again at every such step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anabranch as ab
from anabranch.executor.engines.engine import Engine
from plain_loop import ERROR, Build, TrainingCase, check, mean_square

SGD = torch.optim.SGD


def batches_of_inference_mode(patch: pytest.MonkeyPatch) -> TrainingCase:
    def batch(i: int) -> Tensor:
        with torch.inference_mode(3 <= i < 6):
            return torch.full((5, 4), i / 9)

    model = nn.Linear(4, 3)
    return TrainingCase(model, mean_square, SGD(model.parameters(), lr=0.1), batch=batch)


def an_exception_of_the_loss(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = nn.Linear(4, 3)
    errors: list[Exception | None] = [None]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if errors[0] is not None:
            raise errors[0]
        return mean_square(model, x)

    def batch(i: int) -> Tensor:
        errors[0] = {3: ValueError("mine"), 4: StopIteration(), 5: ValueError("mine")}.get(i)
        return torch.full((5, 4), i / 9)

    return TrainingCase(model, loss, SGD(model.parameters(), lr=0.1), batch=batch)


@pytest.mark.parametrize("build", [batches_of_inference_mode, an_exception_of_the_loss])
def test_what_pytorch_refuses_is_refused_at_every_step(build: Build) -> None:
    outcome = check(build, "graph")
    assert [loss == ERROR for loss in outcome.losses] == [False] * 3 + [True] * 3 + [False] * 3
    assert outcome.engines == ["graph"] * 6


def test_an_interrupt_beside_a_new_graph_costs_one_step_and_no_second_capture(
    captures: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 3)
    step = ab.TrainStep(model, mean_square, SGD(model.parameters(), lr=0.1))
    real = Engine.step
    with ab.Executor(step, engine="graph") as executor:

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(Engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.run(batch=torch.ones(5, 4))
        monkeypatch.setattr(Engine, "step", real)
        losses = [float(executor.run(batch=torch.ones(5, 4))["loss"]) for _ in range(3)]  # type: ignore[arg-type]
        assert losses == sorted(losses, reverse=True)
        assert executor.engine() == "graph"
    assert len(captures) == 1


class AsksWhetherItIsCompiled(nn.Linear):
    asks = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (1.0 if self.asks and torch.compiler.is_compiling() else 0.0)


def test_an_evaluation_as_another_graph_is_compared_as_the_first_was() -> None:
    model, x = AsksWhetherItIsCompiled(4, 3), torch.ones(2, 4)
    step = ab.EvalStep(model, lambda model, x: {"y": model(x)})
    with ab.Executor(step, engine="graph") as executor:
        for _ in range(2):
            assert torch.equal(executor.run(batch=x)["y"], model(x))  # type: ignore[arg-type]
        assert executor.engine() == "graph"
        model.asks = True
        assert torch.equal(executor.run(batch=x)["y"], model(x))  # type: ignore[arg-type]
        with pytest.raises(ab.CaptureError, match="the graph was not bitwise equal to the tape, .* the result 'y'"):
            executor.run(batch=x)


def test_an_evaluation_that_eager_mode_refuses_is_refused_at_every_run() -> None:
    def outputs(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
        if not torch.compiler.is_compiling():
            raise ValueError("mine")
        return {"y": model(x)}

    step = ab.EvalStep(nn.Linear(4, 3), outputs)
    with ab.Executor(step, engine="graph") as executor:
        for _ in range(3):
            with pytest.raises(ValueError, match="mine"):
                executor.run(batch=torch.ones(2, 4))


class Reentrant(nn.Module):
    """A frozen table and a block behind it that a reentrant checkpoint gives no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=True))  # type: ignore[no-any-return]


def test_a_gradient_that_only_the_graph_has_is_a_difference() -> None:
    torch.manual_seed(0)
    model = Reentrant()
    weight = model.block.weight.detach().clone()
    x = torch.ones(2, 4)
    step = ab.TrainStep(model, mean_square, SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings(), ab.Executor(step, engine="graph") as executor:
        warnings.simplefilter("ignore")  # of PyTorch's checkpoint: no input requires a gradient
        executor.run(batch=x)
        with pytest.raises(ab.CaptureError, match="which parameters have a gradient"):
            executor.run(batch=x)
    assert torch.equal(model.block.weight, weight)
