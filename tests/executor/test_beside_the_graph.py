"""Beside a graph: optimizers with state of their own, changes that no guard sees, and memory that is shared or kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from plain_loop import Build, TrainingCase, check, linear, mean_square, nothing, sgd


class Counting(torch.optim.SGD):
    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_a_zero_grad_of_ones_own_is_called(engine: str) -> None:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = linear()
        optimizer = Counting(model.parameters(), lr=0.1)
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


def test_an_exception_of_the_loss_refuses_its_steps_alone() -> None:
    def run(engine: Any) -> tuple[dict[int, Exception], list[Tensor]]:
        torch.manual_seed(0)
        model, raises, raised = nn.Linear(4, 3), [""], dict[int, Exception]()

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            if raises[0] == "value":
                raise ValueError("mine")
            if raises[0] == "stop":
                raise StopIteration
            return mean_square(model, x)

        with ab.Executor(
            ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1)), engine=engine
        ) as executor:
            for i in range(7):
                raises[0] = {2: "value", 3: "stop"}.get(i, "")
                try:
                    executor.run(batch=torch.full((5, 4), i / 9))
                except Exception as error:  # noqa: BLE001 - compared below
                    raised[i] = error
            assert executor.engine() == engine
        return raised, list(model.parameters())

    (plain, theirs), (refused, ours) = run("tape"), run("graph")
    assert [*plain] == [*refused] == [2, 3]
    assert all(isinstance(error, ab.CaptureError) for error in refused.values())
    assert "mine" in str(refused[2])
    assert all(map(torch.equal, theirs, ours))


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


# Memory: what a step leaves or keeps, what is shared or shown many times.


def rows(i: int, n: int = 3) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(i))


# What comes to share memory after the capture, and a step that writes to it.


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("counts", torch.ones(4))
        self.register_buffer("scale", torch.full((4,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        before = self.scale.sin()
        self.counts.add_(0.1)
        return self.layer(x * before) + self.scale.sin()  # type: ignore[no-any-return]


def views_of_one_batch(patch: pytest.MonkeyPatch) -> TrainingCase:
    def batch(i: int) -> tuple[Tensor, Tensor]:
        whole = rows(i, 8)
        return whole[:4], whole[2:6] if i in (5, 7) else whole[2:6].clone()

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        written, read = batch
        before = read.sin()
        written.add_(1.0)
        return (model(before) - model(read.sin())[:, :1] * 0.5).square().mean()  # type: ignore[no-any-return]

    model = linear(4, 4)
    return TrainingCase(model, loss, sgd(model), batch=batch)


def buffers_are_tied(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = Buffers()

    def change(k: int) -> None:
        model.scale.data = model.counts.data if k == 1 else model.counts.data.clone()

    return TrainingCase(model, mean_square, sgd(model), change)


@pytest.mark.parametrize("build", [views_of_one_batch, buffers_are_tied])
def test_memory_that_is_shared_from_some_step_on(build: Build) -> None:
    got = check(build, "graph")
    assert got.engines[4] == "graph"
    assert "shares memory" in got.refusal


def test_parts_of_one_memory_that_do_not_overlap_are_a_graph() -> None:
    """Flat parameters and buffers, and the batches of one tensor."""
    model = Buffers()
    flat = torch.ones(8)
    model.counts.data, model.scale.data = flat[:4], flat[4:]
    whole = rows(0, 30)
    with ab.Executor(ab.TrainStep(model, mean_square, sgd(model)), engine="graph") as executor:
        for i in range(10):
            executor.run(batch=whole[3 * i : 3 * i + 3])
        assert executor.engine() == "graph"


# Results and gradients of equal values.


class TwoHeads(nn.Module):
    """Both heads' parameters have equal gradients, and so do the two offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)
        self.one, self.two = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.base(x))
        return self.first(hidden) + self.second(hidden) + (self.one + self.two)


class Decaying(torch.optim.Optimizer):
    """Adds its decay to the gradients in place, and steps by a rate that falls with a count of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.counts: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.counts.append(1)
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.add_(parameter, alpha=0.1)
            parameter.sub_(parameter.grad, alpha=0.1 / len(self.counts))


def test_an_optimizer_that_is_not_torchs_steps_behind_the_graph_and_may_write_to_gradients_that_are_equal() -> None:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = TwoHeads()
        optimizer = Decaying(model.parameters())
        return TrainingCase(model, mean_square, optimizer, seen=lambda: optimizer.counts)

    got = check(build, "graph")
    assert got.engines == ["graph"] * 9
    assert got.by_itself == "Decaying is not an optimizer of torch.optim"


@pytest.mark.parametrize("evaluated", [False, True])
def test_results_of_equal_expressions_stay_apart(evaluated: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)

    def both(model: Any, x: Tensor) -> dict[str, Tensor]:
        y = model(x).detach()
        return {"total": y.sum(0), "last": y.sum(0)}

    optimizer = sgd(model)
    train = ab.TrainStep(model, lambda m, x: (mean_square(m, x), both(m, x)), optimizer)
    step: Any = ab.EvalStep(model, both) if evaluated else train
    with ab.Executor({"step": step}, engine="graph") as executor:
        for index in range(3):
            results = executor.run("step", batch=rows(index))
            last = results["last"].clone()
            results["total"].add_(1)
            assert torch.equal(results["last"], last)


# Tensors that outlive a step.


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
