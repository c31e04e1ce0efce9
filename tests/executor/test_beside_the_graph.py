"""Beside a graph: optimizers with state of their own, as other libraries have, and changes that no guard sees."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anabranch as ab
from anabranch.executor.engines.engine import Engine
from plain_loop import ERROR, Build, TrainingCase, check, linear, mean_square, nothing


class Own(torch.optim.Optimizer):
    """Steps each parameter by ``update``."""

    def __init__(self, parameters: Any, **defaults: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.begin(group)
            for parameter in group["params"]:
                self.update(parameter, group, self.state[parameter])

    def begin(self, group: dict[str, Any]) -> None:
        pass

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad, alpha=group["lr"])


class CountsInItself(Own):
    counts: list[int]

    def begin(self, group: dict[str, Any]) -> None:
        vars(self).setdefault("counts", []).append(1)

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad, alpha=group["lr"] / len(self.counts))


class Wrapping(Own):
    """Shares groups and state with an optimizer inside, which does the work."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters)
        self.inner = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.state = self.inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def case_of(kind: type[Own]) -> TrainingCase:
    model = linear()
    optimizer = kind(model.parameters())
    inner = getattr(optimizer, "inner", optimizer)
    seen = lambda: [inner.state_dict(), vars(optimizer).get("counts")]  # noqa: E731
    return TrainingCase(model, mean_square, optimizer, nothing, seen=seen)


@pytest.mark.parametrize("kind", [CountsInItself, Wrapping])
def test_an_optimizer_that_is_not_torchs_steps_behind_the_graph(kind: type[Own]) -> None:
    got = check(lambda patch: case_of(kind), "graph")
    assert got.engines == ["graph"] * 9
    assert got.by_itself == f"{kind.__name__} is not an optimizer of torch.optim"


class Accumulating(torch.optim.SGD):
    """Clears gradients every second time."""

    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        if self.calls % 2:
            super().zero_grad(set_to_none)


class Counting(torch.optim.SGD):
    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        super().zero_grad(set_to_none)


@pytest.mark.parametrize(("kind", "engine"), [(Counting, "tape"), (Counting, "graph")])
def test_a_zero_grad_of_ones_own_is_called(kind: Any, engine: str) -> None:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = linear()
        optimizer = kind(model.parameters(), lr=0.1)
        return TrainingCase(model, mean_square, optimizer, nothing, seen=lambda: optimizer.calls)

    assert check(build, engine).refused_at is None


def test_a_parameter_added_to_a_second_group_is_refused() -> None:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainingCase(
            model, mean_square, optimizer, lambda k: optimizer.param_groups.append(optimizer.param_groups[0])
        )

    assert "is in two parameter groups" in check(build, "graph").refusal


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_zero_grad_that_leaves_gradients_is_refused(accumulate: int) -> None:
    model = linear()
    step = ab.TrainStep(model, mean_square, Accumulating(model.parameters(), lr=0.1), accumulate=accumulate)
    with ab.Executor(step) as executor:
        for _ in range(accumulate):
            executor.run(batch=torch.ones(2, 4))
        model.weight.grad = torch.ones_like(model.weight)
        with pytest.raises(ValueError, match="zero_grad of an optimizer leaves gradients"):
            executor.run(batch=torch.ones(2, 4))


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


# A graph runs only once the tape has taken a batch of it: an error of the tape is raised again at every such step.


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
