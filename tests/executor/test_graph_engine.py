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
from anabranch.collectives import GradientBuckets
from anabranch.executor.engines.graph_engine import bits_differ
from anabranch.record.spans import heard
from plain_loop import mean_square
from toys import in_job, messages_of

ADAM, SGD = torch.optim.Adam, torch.optim.SGD


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
        with caplog.at_level("INFO", "anabranch"), ab.Executor(step_of(model), **options) as executor:
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
            found = [executor.run(batch=torch.tensor([1, 1, 2]), fetch=names) for _ in range(3)]
        values = [run[name] for run in found for name in names]
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
    step = ab.TrainStep(model, loss, SGD(model.parameters(), lr=0.1), accumulate=accumulate)
    with ab.Executor(step, engine="graph") as executor:
        executor.run(batch=x)
        if accumulate == 1:
            loss(plain, x).backward()  # type: ignore[no-untyped-call]
            SGD(plain.parameters(), lr=0.1).step()
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(one, other)
                assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
        with pytest.raises(ab.CaptureError, match=f"not bitwise equal to the tape, whose step was kept: {says}"):
            executor.run(batch=x)


# Several workers.


def order() -> list[str]:
    """Final gradients and launches of buckets, in the order in which one step on the graph has them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))  # 4 MiB each, two a bucket
    step = ab.TrainStep(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    log: list[str] = []
    x = torch.randn(2, 1024)
    ready = GradientBuckets.ready

    def seen(buckets: GradientBuckets, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        log.append("gradient")
        return ready(buckets, parameter, gradient)

    GradientBuckets.ready = seen  # type: ignore[method-assign]
    with ab.Executor(step, comm_mode="AllReduce", engine="graph") as executor:
        for _ in range(2):  # lays the buckets out, and captures
            executor.run(batch=x)
        log.clear()
        with heard(lambda span: log.append(span[0])):
            executor.run(batch=x)
        assert executor.engine() == "graph"
    GradientBuckets.ready = ready  # type: ignore[method-assign]
    return log


@pytest.mark.slow
def test_workers_send_during_backward() -> None:
    for log in in_job(order, 2):
        first, last = log.index("bucket.launched"), len(log) - 1 - log[::-1].index("gradient")
        assert first < last, log
        assert log.count("bucket.launched") == 3


def uncompared() -> list[str]:
    """Return what is said of a loss that sums over the workers itself."""
    step = ab.TrainStep(
        model := nn.Linear(4, 3),
        lambda m, x: m(x).square().mean() / functional_all_reduce(torch.ones(()), "sum", dist.group.WORLD),
        SGD(model.parameters(), lr=0.1),
    )
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


def step_of(model: nn.Module, **options: Any) -> ab.TrainStep:
    return ab.TrainStep(model, mean_square, torch.optim.Adam(model.parameters(), lr=0.01), **options)


@pytest.mark.slow
def test_the_plain_loops_bits_in_less_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "anabranch")
    batch = torch.randn(256, 16)
    peaks, states = [], []
    for budget in (None, "300KiB"):
        model = model_of()
        torch.manual_seed(1)
        # Accumulated, so that the graph is that of forward and backward alone.
        with ab.Executor(step_of(model, activation_budget=budget, accumulate=2), engine="graph") as run:
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
        ab.Executor(step_of(model, activation_budget=1000), engine="graph") as executor,
        pytest.raises(ab.CaptureError, match=r"does not fit its activation_budget: .* with recomputation \d+"),
    ):
        executor.run(batch=torch.randn(64, 16))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("given", "expected"),
    [(5000, 5000), ("2GiB", 2**31), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("7B", 7), ("9", 9)],
)
def test_sizes(given: Any, expected: int) -> None:
    assert step_of(model_of(), activation_budget=given).activation_budget == expected
