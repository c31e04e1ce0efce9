"""A step is the plain PyTorch loop, bit for bit, random numbers included: on the tape, and as a graph."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.errors import CaptureError
from anabranch.graph import StepProgram
from covering import slow_except
from plain_loop import TrainingCase, check

Batch = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _torch_does_not_ask_about_sparse_invariants() -> Iterator[None]:
    with torch.sparse.check_sparse_tensor_invariants(False):
        yield


class WideAndDeep(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 4, sparse=sparse)
        self.wide = nn.Linear(8, 4)
        self.deep = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[:, 0].abs() * 10).long() % 30
        return self.wide(x) + self.deep(torch.cat([self.table(ids), x], 1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.unflatten(1, (2, 4))).flatten(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 4))


OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    lambda p: torch.optim.Adam(p, lr=0.1),
    lambda p: torch.optim.Adam(p, lr=0.1, fused=True, amsgrad=True),
    lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True, maximize=True),
    lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True, weight_decay=0.1, foreach=True),
    lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True),
    lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    lambda p: torch.optim.SGD([{"params": [q], "lr": 0.1 * k} for k, q in enumerate(p, 1)], momentum=0.5),
]
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = {
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.7),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9, cycle_momentum=False),
    "in turn": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.CosineAnnealingLR(o, 3)], [2]
    ),
    "of one's own": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}


def loss_of(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    scores = model(batch["x"])
    return F.cross_entropy(scores, batch["y"]), {"right": (scores.argmax(1) == batch["y"]).sum()}


def batches(*rows: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(n, 8, generator=generator), "y": torch.randint(0, 4, (n,), generator=generator)} for n in rows
    ]


Optimizers = list[torch.optim.Optimizer]


def check_engine(
    make_model: Callable[[], nn.Module],
    make_optimizers: Callable[[Any], Optimizers],
    data: Sequence[Batch],
    schedules: Sequence[str] = ("exponential",),
    change: Callable[[int, Any, Optimizers], object] = lambda k, model, optimizers: None,
    around: Callable[[], Callable[[], contextlib.AbstractContextManager[Any]]] = lambda: contextlib.nullcontext,
    engine: str = "graph",
    clip: float | None = None,
) -> None:
    """The engine gives the plain loop's bits; schedulers are dealt out to the optimizers in turn."""

    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = make_model()
        optimizers = make_optimizers(model)
        schedulers = [SCHEDULERS[name](optimizer) for name, optimizer in zip(itertools.cycle(schedules), optimizers)]
        batches = itertools.cycle(data)
        return TrainingCase(
            model, loss_of, optimizers, lambda k: change(k, model, optimizers), lambda i: next(batches), schedulers,
            around=around(), clip=clip,
        )  # fmt: skip

    got = check(build, engine)
    assert got.refused_at is None, got.refusal
    assert got.engines[-1] == engine


def adam(model: nn.Module) -> Optimizers:
    return [torch.optim.Adam(model.parameters(), lr=0.1, fused=True)]


def sgd(model: nn.Module) -> Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


class Together(nn.ModuleList):
    """The sum of what its modules give: one capture for all of them."""

    def forward(self, x: Tensor) -> Tensor:
        return sum((module(x) for module in self), torch.zeros(()))


@pytest.mark.parametrize("engine", slow_except(("tape", "graph"), "tape"))
def test_optimizers_and_schedulers_of_every_kind_in_one_step_are_the_plain_loop_bit_for_bit(engine: str) -> None:
    def model() -> nn.Module:
        return Together(nn.Linear(8, 4) for _ in OPTIMIZERS)

    def optimizers(module: nn.Module) -> Optimizers:
        parts = module.children()
        return [make(part.parameters()) for part, make in zip(parts, OPTIMIZERS, strict=True)]

    check_engine(model, optimizers, batches(6), list(SCHEDULERS), engine=engine)


class OwnParameter(nn.Parameter):
    """Of a type that torch's optimizers do not know."""


@pytest.mark.parametrize(
    ("devices", "kind", "expected"),
    [(["cpu"], nn.Parameter, True), ([], nn.Parameter, False), (["cpu"], OwnParameter, False)],
)
def test_an_optimizer_uses_the_kernels_that_it_chooses_for_parameters(
    devices: list[str], kind: type[nn.Parameter], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels for lists of tensors are the default, as on CUDA, they round differently."""
    monkeypatch.setattr(
        import_module("torch.optim.optimizer"), "_get_foreach_kernels_supported_devices", lambda: devices
    )
    model = nn.Linear(8, 4)
    model.weight, model.bias = kind(model.weight.detach()), kind(model.bias.detach())
    optimizer = torch.optim.RMSprop(model.parameters(), momentum=0.5, centered=True)
    program = StepProgram(model, loss_of, [optimizer])
    for batch in batches(6, 6, 6):
        program.run(batch)
    assert ("foreach" in program.graph.code) == expected


def test_a_graph_is_specific_to_the_autocast_around_the_step() -> None:
    def around() -> Callable[[], torch.autocast]:
        steps = itertools.count()
        return lambda: torch.autocast("cpu", dtype=torch.bfloat16, enabled=next(steps) % 2 == 0)

    check_engine(mlp, adam, batches(6), around=around)


def test_an_optimizer_that_branches_on_its_steps_steps_behind_the_graph() -> None:
    check_engine(mlp, lambda model: [torch.optim.RAdam(model.parameters(), lr=0.1)], batches(6))
    model = nn.Linear(8, 4)
    program = StepProgram(model, loss_of, [torch.optim.RAdam(model.parameters())])
    for batch in batches(6, 6):
        program.run(batch)
    assert "RAdam.step does something that a graph cannot" in str(program.refused_update)


SPARSE: list[Callable[..., torch.optim.Optimizer]] = [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam]


@pytest.mark.slow
def test_sparse_tables_of_several_optimizers_are_updated_as_eager_does() -> None:
    def optimizers(model: Any) -> Optimizers:
        tables = [make([part.table.weight], lr=0.1) for part, make in zip(model, SPARSE, strict=True)]
        dense = [p for name, p in model.named_parameters() if ".table." not in name]
        return [*tables, torch.optim.Adam(dense, fused=True)]

    check_engine(lambda: Together(WideAndDeep(sparse=True) for _ in SPARSE), optimizers, batches(6, 6, 3))


class Bags(nn.Module):
    def __init__(self, form: str, mode: str) -> None:
        super().__init__()
        self.form = form
        self.table = nn.EmbeddingBag(5, 4, mode=mode, sparse=True, padding_idx=0 if form == "padding" else None)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[:, :3].abs() * 10).long() % 5
        if self.form == "offsets":
            starts = torch.arange(x.shape[0]) * 3
            return self.head(self.table(ids.reshape(-1), starts))  # type: ignore[no-any-return]
        pooled = self.table(ids)
        return self.head(pooled * self.table(ids.flip(0)) if self.form == "twice" else pooled)  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", ["mean", pytest.param("sum", marks=pytest.mark.slow)])
def test_sparse_bags_and_repeated_lookups_are_updated_as_eager_does(mode: str) -> None:
    forms = ("rows", "offsets", "twice", "padding")
    check_engine(lambda: Together(Bags(form, mode) for form in forms), sgd, batches(6, 6, 3))


def test_a_loaded_optimizer_state_is_used() -> None:
    saved: dict[int, Any] = {}

    def change(k: int, model: Any, optimizers: Optimizers) -> None:
        if k == 1:
            saved[id(model)] = copy.deepcopy(optimizers[0].state_dict())
        else:
            optimizers[0].load_state_dict(saved[id(model)])

    check_engine(mlp, adam, batches(6), change=change)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.drop, self.temperature = nn.Linear(8, 4), nn.Dropout(0.0), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.head(x)) / self.temperature


def test_a_python_number_that_changes_every_step_becomes_an_input_of_one_graph() -> None:
    model, (batch,) = Weighted(), batches(6)
    program = StepProgram(model, loss_of, sgd(model))
    for _ in range(5):
        model.temperature *= 0.9
        program.run(batch)
    assert program.captures == 2, "once as a constant, then as a number"


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Scaled.apply(x, self.weight))  # type: ignore[no-untyped-call, no-any-return]


class Summed(nn.Module):
    """The gradient of ``offset`` arrives as one number, expanded with strides of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.head = nn.Parameter(torch.randn(3, 4)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * self.offset.sum()


class Autocast(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()  # type: ignore[no-any-return]


class Twice(nn.Sequential):
    """Autocast casts a parameter once; a sum of two gradients is rounded before the cast back, not after."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self[1](self[0](x) + self[0](x * 2)).float()  # type: ignore[no-any-return]


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))
    model[2].weight = model[0].weight
    return model


MODULES: dict[str, Callable[[], nn.Module]] = {
    "norm and dropout": normed,
    "transformer": Block,
    "wide and deep": WideAndDeep,
    "a layer used twice under autocast": lambda: Twice(nn.Linear(8, 8), nn.Linear(8, 4)),
    "tied": tied,
    "custom function": Custom,
    "gradient of other strides": Summed,
    "autocast": lambda: Autocast(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)),
}


@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_modules_of_every_kind_under_clipping_are_the_plain_loop_bit_for_bit(engine: str) -> None:
    def optimizers(module: nn.Module) -> Optimizers:
        return [torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)]

    modules = lambda: Together(make() for make in MODULES.values())  # noqa: E731
    check_engine(modules, optimizers, batches(6), engine=engine, clip=0.1)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_matrices_in_a_batch_are_refused() -> None:
    matrix = (torch.eye(5).roll(1, 0) + torch.eye(5)).to_sparse_csr()
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    program = StepProgram(
        model,
        lambda m, batch: torch.sparse.mm(batch["neighbours"], m(batch["x"])).square().mean(),
        [torch.optim.SGD(model.parameters(), lr=0.1)],
    )
    with pytest.raises(CaptureError, match="sparse"):
        program.run({"neighbours": matrix, "x": torch.randn(5, 3)})
    assert torch.equal(model.weight, before)


# Gradients asked for inside the loss, as critics are penalized, run as graphs with the plain loop's bits.


def of_mixtures(critic: Any, real: Tensor) -> Tensor:
    """As WGAN-GP: the norm of the gradient at points between real and made ones."""
    made, share = torch.randn_like(real), torch.rand(len(real), 1)
    between = (share * real + (1 - share) * made).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return critic(made).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()  # type: ignore[no-any-return]


def of_real_points(critic: Any, real: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """As R1: the squared gradient at real points."""
    real = real.detach().clone().requires_grad_()
    judged = critic(real)
    slope = torch.autograd.grad(judged, real, torch.ones_like(judged), create_graph=True, retain_graph=True)[0]
    penalty = slope.square().sum(1).mean()
    return F.softplus(-judged).mean() + 5 * penalty, {"penalty": penalty}


def case_of(loss: Any) -> TrainingCase:
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return TrainingCase(critic, loss, torch.optim.Adam(critic.parameters(), lr=0.01))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("loss", [of_mixtures, of_real_points])
def test_a_gradient_penalty_runs_as_a_graph(loss: Any) -> None:
    got = check(lambda patch: case_of(loss), "graph")
    assert got.refused_at is None
    assert got.engines[-1] == "graph"
