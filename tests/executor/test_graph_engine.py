"""``engine="graph"``: the bits of the tape, whatever changes between two steps, or a ``CaptureError``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce

import anabranch as ab
from anabranch.executor.engines.graph_engine import bits_differ
from plain_loop import Build, TrainingCase, check, linear, mean_square, nothing, sgd
from toys import assert_same, in_job, look_of, messages_of, plain_step, step_of

# What runs as a graph.


@pytest.mark.slow
@pytest.mark.skipif(" " in torch.__file__, reason="Inductor gives the C++ compiler paths with a space unquoted")
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_trains_as_the_tape_does_but_for_rounding(caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for options in ({}, {"compile": True, "engine": "graph"}):
        torch.manual_seed(0)
        norm, last = nn.BatchNorm1d(16), nn.Linear(16, 1)
        model = nn.Sequential(nn.Linear(8, 16, bias=False), norm, nn.GELU(), nn.Dropout(0.2), last)
        with caplog.at_level("INFO", "anabranch"), ab.Executor(adam_of(model), **options) as executor:
            for _ in range(3):
                executor.run(batch=torch.arange(48.0).reshape(6, 8).sin())
            assert executor.engine() == ("graph+inductor" if options else "tape")
        found.append(model.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5)
    assert caplog.text.count("not compared with the tape: compile=True rounds differently") == 1


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.never = nn.Embedding(9, 4, sparse=True), nn.Linear(2, 2)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.free = nn.Parameter(torch.ones(4))  # of no optimizer

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers(self.table(ids)) * self.free


@pytest.mark.parametrize("clip", [None, 0.01])
def test_fetched_values_equal_those_of_the_tape(clip: float | None) -> None:
    names = ["loss", "twice", "layers", "layers.0.weight.grad", "never.weight.grad", "table.weight.grad", "free.grad"]

    def loss(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out = model(ids)
        return out.square().mean(), {"twice": out.detach() * 2}

    def run(engine: Any) -> list[Any]:
        torch.manual_seed(0)
        model = Tables()
        held = [value for name, value in model.named_parameters() if name != "free"]
        step = ab.TrainStep(model, loss, torch.optim.SGD(held, lr=0.1), clip_grad_norm=clip)
        with ab.Executor(step, engine=engine) as executor:
            runs = [executor.run(batch=torch.tensor([1, 1, 2]), fetch=names) for _ in range(3)]
        values = [run[name] for run in runs for name in names]
        values = [v.coalesce().values() if v is not None and v.is_sparse else v for v in values]
        return [*values, *model.state_dict().values()]

    for mine, other in zip(run("graph"), run("tape"), strict=True):
        assert (mine is None and other is None) or torch.equal(mine, other)


class LosesGradients(nn.Module):
    """Takes another path while it is captured, on which one layer has no gradient; the values are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if torch.compiler.is_compiling():
            hidden = hidden.detach()
        return self.last(hidden)


@pytest.mark.parametrize(
    ("make", "factor", "says"),
    [
        (lambda: nn.Linear(3, 2), 2.0, "the result 'loss'"),
        (LosesGradients, 1.0, r"the gradient of 'first\.\w+', which the graph does not compute"),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_graph_of_another_function_is_refused_and_the_step_is_the_tapes(
    make: Callable[[], nn.Module], factor: float, says: str, accumulate: int
) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * (factor if torch.compiler.is_compiling() else 1.0)

    torch.manual_seed(0)
    model = make()
    plain = make()
    plain.load_state_dict(model.state_dict())
    x = torch.ones(4, 3)
    with ab.Executor(step_of(model, loss=loss, accumulate=accumulate), engine="graph") as executor:
        executor.run(batch=x)
        if accumulate == 1:
            plain_step(plain, loss, torch.optim.SGD(plain.parameters(), lr=0.1), x)
            assert_same(model, plain)
            assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]
        with pytest.raises(ab.CaptureError, match=f"not bitwise equal to the tape, whose step was kept: {says}"):
            executor.run(batch=x)


# Several workers.


def uncompared() -> list[str]:
    """Return what is said of a loss that sums over the workers itself."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return mean_square(model, x) / functional_all_reduce(torch.ones(()), "sum", dist.group.WORLD)  # type: ignore[no-any-return]

    step = step_of(nn.Linear(4, 3), loss=loss)
    said = messages_of()
    with ab.Executor(step, comm_mode="AllReduce", engine="graph") as executor:
        for _ in range(2):
            executor.run(batch=torch.ones(2, 4))
        assert executor.engine() == "graph"
    return [line for line in said if "not compared" in line]


def test_a_loss_that_communicates_itself_is_said_not_to_be_compared() -> None:
    said = ["a graph of step 'default' is not compared with the tape: it communicates between workers"]
    assert in_job(uncompared, 2) == [said, said]


# What equal means: the sign of a zero counts, which NaN it is does not.

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_the_sign_of_a_zero_counts_and_nan_is_nan_and_nothing_else(dtype: torch.dtype) -> None:
    zero, one = torch.zeros(3, dtype=dtype), torch.tensor([1.0, NAN], dtype=dtype)
    assert not bits_differ(zero, zero.clone())
    assert bits_differ(zero, -zero)
    assert not bits_differ(one, torch.tensor([1.0, -NAN], dtype=dtype))
    assert bits_differ(one, torch.tensor([NAN, 1.0], dtype=dtype))
    assert bits_differ(torch.ones(2), torch.ones(2, dtype=torch.float64))


# ``TrainStep(activation_budget=...)``: the plain loop's bits in less memory, or a clear refusal.


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))))


def adam_of(model: nn.Module, **options: Any) -> ab.TrainStep:
    return step_of(model, torch.optim.Adam, lr=0.01, **options)


@pytest.mark.slow
def test_the_plain_loops_bits_in_less_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "anabranch")
    batch = torch.randn(256, 16)
    peaks, states = [], []
    for budget in (None, "300KiB"):
        model = model_of()
        torch.manual_seed(1)
        # Accumulated, so that the graph is that of forward and backward alone.
        with ab.Executor(adam_of(model, activation_budget=budget, accumulate=2), engine="graph") as run:
            for _ in range(4):
                run.run(batch=batch)
            assert run.engine() == "graph"
            peaks.append(run.graph().memory_plan().peak_bytes)
        states.append(copy.deepcopy(model.state_dict()))
    assert caplog.text.count("not compared with the tape: the tape would not fit activation_budget") == 1
    assert peaks[0] > 400_000
    assert peaks[1] <= 300 * 1024
    for one, two in zip(states[0].values(), states[1].values(), strict=True):
        assert torch.equal(one, two)


def test_a_budget_that_nothing_fits_is_refused_with_the_least_that_does() -> None:
    model = model_of()
    before = copy.deepcopy(model.state_dict())
    with (
        ab.Executor(adam_of(model, activation_budget=1000), engine="graph") as executor,
        pytest.raises(ab.CaptureError, match=r"does not fit its activation_budget: .* with recomputation \d+"),
    ):
        executor.run(batch=torch.randn(64, 16))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("given", "expected"),
    [(5000, 5000), ("2GiB", 2**31), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("7B", 7), ("9", 9)],
)
def test_sizes(given: Any, expected: int) -> None:
    assert adam_of(model_of(), activation_budget=given).activation_budget == expected


# Beside a graph: optimizers with state of their own, changes that no guard sees.


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
        optimizer = sgd(model)
        groups = optimizer.param_groups
        return TrainingCase(model, mean_square, optimizer, lambda k: groups.append(groups[0]))

    assert "is in two parameter groups" in check(build, "graph").refusal


class Accumulating(torch.optim.SGD):
    """Clears gradients every second time."""

    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        if self.calls % 2:
            super().zero_grad(set_to_none)


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


def test_a_step_is_fixed_once_it_is_made() -> None:
    """The tape read some attributes anew in each step, which graphs had taken up: they could not both be right."""
    model = linear()
    optimizer = sgd(model)
    train = ab.TrainStep(model, mean_square, optimizer, clip_grad_norm=1.0)
    for step in (train, look_of(model)):
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

        with ab.Executor(step_of(model, loss=loss), engine=engine) as executor:
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
    with ab.Executor(look_of(model), engine="graph") as executor:
        for _ in range(2):
            assert torch.equal(executor.run(batch=x)["out"], model(x))  # type: ignore[arg-type]
        assert executor.engine() == "graph"
        model.asks = True
        assert torch.equal(executor.run(batch=x)["out"], model(x))  # type: ignore[arg-type]
        with pytest.raises(ab.CaptureError, match="the graph was not bitwise equal to the tape, .* the result 'out'"):
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
    with ab.Executor(step_of(model), engine="graph") as executor:
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

    train = step_of(model, loss=lambda m, x: (mean_square(m, x), both(m, x)))
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
    with ab.Executor(step_of(model, loss=lambda m, x: m(x)), engine="graph") as executor:
        for _ in range(4):
            executor.run(batch=torch.ones(4, 3))
            assert model.penalty.requires_grad
            assert not model.view.requires_grad
            model.view.clamp_(-1, 1)  # in place, as after a plain step
        assert executor.engine() == "graph"
        with pytest.raises(ab.CaptureError, match=r"recorded no history; detach\(\) it where it is kept"):
            model.penalty.backward()
