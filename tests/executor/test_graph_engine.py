"""``engine="graph"``: the bits of the tape, whatever changes between two steps, or a ``CaptureError``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab
from anabranch.collectives import GradientBuckets
from anabranch.executor.engines.graph_engine import Differs, Snapshot, bits_differ
from anabranch.record.spans import heard
from plain_loop import mean_square
from toys import in_job

SHARE = 1.0
ADAM, SGD = torch.optim.Adam, torch.optim.SGD
"""The second is captured in half the time."""


def batch_of(rows: int = 6, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 4, generator=generator), "y": torch.randint(0, 3, (rows,), generator=generator)}


def classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


class Net(nn.Module):
    """Reads Python values of every kind."""

    power = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)
        self.norm, self.act = nn.BatchNorm1d(8), nn.ReLU()
        self.beta, self.config, self.weights = 1.0, SimpleNamespace(gamma=1.0), [1.0, 1.0]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.act(self.norm(self.first(x)))) * self.beta * self.config.gamma
        return self.last(hidden * self.weights[0] * self.power) * SHARE


def train(
    engine: Any,
    make: Callable[[], nn.Module] = Net,
    steps: int = 6,
    change: Callable[[int, Any], object] = lambda step, model: None,
    rows: Callable[[int], int] = lambda step: 6,
    loss: Callable[..., Tensor] = classify,
    optimize: Callable[..., torch.optim.Optimizer] = ADAM,
    **options: Any,
) -> tuple[list[Tensor], str]:
    """Everything that training leaves behind, random numbers included, and the engine of the last run."""
    torch.manual_seed(0)
    model = make()
    optimizer = optimize(model.parameters(), lr=0.01)
    left: list[Tensor] = []
    step = ab.TrainStep(model, loss, optimizer, **options)
    with ab.Executor({"train": step}, engine=engine) as executor:
        for index in range(steps):
            change(index, model)
            left.append(executor.run("train", batch_of(rows(index), index))["loss"])
        used = executor.engine("train")
    left += [value.clone() for value in model.state_dict().values()]
    left += [value for state in optimizer.state.values() for value in state.values()]
    return [*left, torch.get_rng_state()], used


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# What runs as a graph.


@pytest.mark.slow
@pytest.mark.skipif(" " in torch.__file__, reason="Inductor gives the C++ compiler paths with a space unquoted")
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_compile_says_graph_and_inductor() -> None:
    step = ab.TrainStep(model := Net(), classify, torch.optim.Adam(model.parameters(), fused=True))
    with ab.Executor(step, compile=True, engine="graph") as executor:
        for _ in range(3):
            executor.run(batch=batch_of())
        assert executor.engine() == "graph+inductor"


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


def test_the_comparison_with_the_tape_leaves_no_trace() -> None:
    """Not in random numbers, buffers, optimizer state or Python: the counter counts steps."""

    class Counting(Net):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    models: list[Counting] = []

    def make() -> Counting:
        models.append(Counting())
        return models[-1]

    expected, _ = train("tape", make, steps=8)
    found, used = train("graph", make, steps=8)
    assert_same(found, expected)
    assert [model.calls for model in models] == [8, 8]
    assert used == "graph"


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


# What Python changes between steps.


# Several workers.


def collectives() -> dict[str, object]:
    """Losses that talk to the other worker by themselves: captured or refused, nobody is left waiting."""

    def plainly(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        return loss * total

    def differentiably(model: nn.Module, x: Tensor) -> Tensor:
        return ab.all_reduce(model(x).square().mean())

    def run(loss: object, engine: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
        with ab.Executor(step, engine=engine) as executor:
            # Rank 1 meets a new kind of batch in each run, rank 0 only one.
            rows = [2 + index * ab.job().rank for index in range(4)]
            losses = [executor.run(batch=torch.ones(count, 3))["loss"] for count in rows]
            return [*losses, *model.state_dict().values()]

    found: dict[str, object] = {}
    for loss in (plainly, differentiably):
        tape = run(loss, "tape")
        try:
            found[loss.__name__] = all(map(torch.equal, run(loss, "graph"), tape))
        except ab.CaptureError:
            found[loss.__name__] = "refused"
    return found


def order() -> list[str]:
    """Final gradients and launches of buckets, in the order in which one step on the graph has them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))  # of 4 MB each, two a bucket
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


def order_and_collectives() -> list[Any]:
    torch.distributed.init_process_group("gloo")
    return [order(), collectives()]


def test_workers_send_during_backward_and_may_talk_by_themselves() -> None:
    for log, said in in_job(order_and_collectives, 2):
        first, last = log.index("bucket.launched"), len(log) - 1 - log[::-1].index("gradient")
        assert first < last, log
        assert log.count("bucket.launched") == 3
        assert said == {"plainly": True, "differentiably": "refused"}


# What equal means: the sign of a zero counts, which NaN it is does not; random numbers do.

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_the_sign_of_a_zero_counts(dtype: torch.dtype) -> None:
    zero = torch.zeros(3, dtype=dtype)
    assert not bits_differ(zero, zero.clone())
    assert bits_differ(zero, -zero)


def test_nan_is_nan_and_nothing_else_and_an_imaginary_zero_has_a_sign_too() -> None:
    one = torch.tensor([1.0, NAN])
    assert not bits_differ(one, torch.tensor([1.0, -NAN]))
    assert bits_differ(one, torch.tensor([NAN, 1.0]))
    assert bits_differ(torch.ones(2), torch.ones(2, dtype=torch.float64))
    one, other = (torch.complex(torch.ones(2), zero) for zero in (torch.zeros(2), -torch.zeros(2)))
    assert bits_differ(one, other)
    assert not bits_differ(one, other.conj()), "conjugated when it is looked at"


def test_random_numbers_drawn_on_a_device_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [state.clone()])
    before = Snapshot(nn.Linear(2, 2), [])
    before.compare()
    state += 1
    with pytest.raises(Differs, match="other random numbers"):
        before.compare()


# ``TrainStep(activation_budget=...)``: the plain loop's bits in less memory, or a clear refusal.


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))))


def step_of(model: nn.Module, **options: Any) -> ab.TrainStep:
    return ab.TrainStep(model, mean_square, torch.optim.Adam(model.parameters(), lr=0.01), **options)


def test_the_plain_loops_bits_in_less_memory() -> None:
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


@pytest.mark.parametrize("given", [0, -1, True, "much", "0GiB", "2 GiBs", 1.5])
def test_a_value_that_is_not_a_size_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="activation_budget is a number of bytes above 0"):
        step_of(model_of(), activation_budget=given)


def test_the_tape_has_no_budget() -> None:
    with pytest.raises(ValueError, match="activation_budget, which needs a graph"):
        ab.Executor(step_of(model_of(), activation_budget=5000))
    with pytest.raises(ValueError, match="precision='float16' runs without one"):
        step_of(model_of(), activation_budget=5000, precision="float16")
