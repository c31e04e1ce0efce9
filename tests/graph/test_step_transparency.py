"""A step run as a graph is the plain PyTorch loop, bit for bit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.errors import CaptureError
from anabranch.graph import StepProgram

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


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
    "norm and dropout": lambda: nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 4)
    ),
    "transformer": Block,
    "wide and deep": WideAndDeep,
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "fused momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "fused adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True, amsgrad=True),
    "foreach adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "fused adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "decayed fused adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True, maximize=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True, weight_decay=0.1, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True),
    "adam whose rate is a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = {
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.7),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9, cycle_momentum=False),
    "in turn": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.CosineAnnealingLR(o, 3)], [2]
    ),
    "of one's own": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}
ALL = [("mlp", name) for name in OPTIMIZERS]
ALL += [(model, name) for model in MODELS if model != "mlp" for name in ("adam", "fused adam")]
QUICK = [("mlp", "adam"), ("norm and dropout", "fused adam"), ("wide and deep", "adam")]
"""All optimizers, with all schedulers, are together in one step."""


def loss_of(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    scores = model(batch["x"])
    return F.cross_entropy(scores, batch["y"]), {"right": (scores.argmax(1) == batch["y"]).sum()}


def batches(*rows: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(n, 8, generator=generator), "y": torch.randint(0, 4, (n,), generator=generator)} for n in rows
    ]


class Trained:
    """What a run leaves behind: losses, extra results, parameters, buffers, optimizer state."""

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self.model, self.optimizers = model, optimizers
        self.seen: list[Tensor] = []

    def tensors(self) -> list[Tensor]:
        state = [
            value
            for optimizer in self.optimizers
            for kept in optimizer.state.values()
            for value in kept.values()
            if isinstance(value, Tensor)
        ]
        return [*self.seen, *self.model.state_dict().values(), *state]

    def equals(self, other: Trained) -> bool:
        mine, others = self.tensors(), other.tensors()
        return len(mine) == len(others) and all(map(torch.equal, mine, others))


def train(
    graph: bool,
    make_model: Callable[[], nn.Module],
    make_optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]],
    data: list[Batch],
    schedules: Sequence[str] = ("exponential",),
) -> Trained:
    """Trains with schedulers that are dealt out to the optimizers in turn."""
    torch.manual_seed(3)
    model = make_model()
    optimizers = make_optimizers(model)
    schedulers = [SCHEDULERS[name](optimizer) for name, optimizer in zip(itertools.cycle(schedules), optimizers)]
    run = Trained(model, optimizers)
    program = StepProgram(model, loss_of, optimizers)
    for batch in data:
        if graph:
            results = program.run(batch)
            run.seen += [results["loss"], results["right"]]  # type: ignore[list-item]
        else:
            loss, extras = loss_of(model, batch)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            run.seen += [loss.detach(), extras["right"]]
        for scheduler in schedulers:
            scheduler.step()
    return run


class Together(nn.ModuleList):
    """The sum of what its modules give: one capture for all of them."""

    def forward(self, x: Tensor) -> Tensor:
        return sum((module(x) for module in self), torch.zeros(()))


@pytest.mark.slow
def test_optimizers_and_schedulers_of_every_kind_in_one_step_are_the_plain_loop_bit_for_bit() -> None:
    def model() -> nn.Module:
        return Together(nn.Linear(8, 4) for _ in OPTIMIZERS)

    def optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
        parts = module.children()
        return [make(part.parameters()) for part, make in zip(parts, OPTIMIZERS.values(), strict=True)]

    data = batches(6, 6, 6, 6)
    found, expected = (train(graph, model, optimizers, data, list(SCHEDULERS)) for graph in (True, False))
    assert found.equals(expected)


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


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("model", "optimizer"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in ALL]
)
def test_three_steps_under_a_scheduler_are_the_plain_loop_bit_for_bit(model: str, optimizer: str) -> None:
    def optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
        return [OPTIMIZERS[optimizer](module.parameters())]

    data = batches(6, 6, 6, 3, 6) if model == "mlp" else batches(6, 6, 6)
    assert train(True, MODELS[model], optimizers, data).equals(train(False, MODELS[model], optimizers, data))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("optimizer", ["nesterov", "fused adam"])
def test_schedulers_of_every_kind_reach_the_graph(schedule: str, optimizer: str) -> None:
    def optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
        return [OPTIMIZERS[optimizer](module.parameters())]

    data = batches(6, 6, 6, 6, 6)
    found, expected = (train(graph, MODELS["mlp"], optimizers, data, [schedule]) for graph in (True, False))
    assert found.equals(expected)


def test_a_graph_is_specific_to_the_autocast_around_the_step() -> None:
    def run(graph: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = MODELS["transformer"]()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
        program, seen = StepProgram(model, loss_of, [optimizer]), []
        for step, batch in enumerate(batches(6, 6, 6, 6)):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step % 2 == 0):
                if graph:
                    seen.append(program.run(batch)["loss"])
                else:
                    loss = loss_of(model, batch)[0]
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    seen.append(loss.detach())
        return [*seen, *model.state_dict().values()]  # type: ignore[list-item]

    assert all(map(torch.equal, run(True), run(False)))


def test_a_layer_used_twice_under_autocast_sums_its_gradients_as_eager_does() -> None:
    """Autocast casts a parameter once; a sum of two gradients is rounded before the cast back, not after."""

    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self[1](self[0](x) + self[0](x * 2)).float()  # type: ignore[no-any-return]

    def model() -> nn.Module:
        return Twice(nn.Linear(8, 8), nn.Linear(8, 4))

    def optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(module.parameters(), lr=0.1)]

    data = batches(6, 6, 6)
    assert train(True, model, optimizers, data).equals(train(False, model, optimizers, data))


def test_a_kernel_within_which_autocast_casts_is_refused() -> None:
    model = nn.Bilinear(8, 8, 4)
    program = StepProgram(model, lambda m, b: m(b["x"], b["x"]).sum(), [torch.optim.SGD(model.parameters(), lr=0.1)])
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(CaptureError, match="casts inside it"):
        program.run(batches(6)[0])
    program.run(batches(6)[0])


def test_gradients_that_somebody_keeps_are_neither_read_nor_written() -> None:
    model = MODELS["mlp"]()
    program = StepProgram(model, loss_of, [torch.optim.Adam(model.parameters(), lr=0.1)])
    kept = [torch.ones_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient
    for batch in batches(6, 6, 6):
        program.run(batch)
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, torch.ones_like(gradient))


def test_several_optimizers_and_groups_keep_their_own_rates() -> None:
    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        first, last = model[0], model[2]  # type: ignore[index]
        groups = [{"params": [first.weight], "lr": 0.3}, {"params": [first.bias], "weight_decay": 0.1}]
        return [torch.optim.Adam(groups, lr=0.01), torch.optim.SGD(last.parameters(), lr=0.2, momentum=0.5)]

    data = batches(6, 6, 6)
    assert train(True, MODELS["mlp"], optimizers, data).equals(train(False, MODELS["mlp"], optimizers, data))


SPARSE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "sparse adam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
}


@pytest.mark.slow
def test_sparse_tables_of_several_optimizers_are_updated_as_eager_does() -> None:
    def model() -> nn.Module:
        return Together(WideAndDeep(sparse=True) for _ in SPARSE)

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        tables = [make([part.table.weight]) for part, make in zip(model, SPARSE.values(), strict=True)]  # type: ignore[arg-type]
        dense = [p for name, p in model.named_parameters() if ".table." not in name]
        return [*tables, torch.optim.Adam(dense, fused=True)]

    data = batches(6, 6, 3)
    assert train(True, model, optimizers, data).equals(train(False, model, optimizers, data))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", SPARSE)
def test_sparse_tables_stay_sparse_and_are_updated_as_eager_does(optimizer: str) -> None:
    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        dense = [p for name, p in model.named_parameters() if not name.startswith("table")]
        return [SPARSE[optimizer]([model.table.weight]), torch.optim.Adam(dense)]  # type: ignore[union-attr, list-item]

    def model() -> nn.Module:
        return WideAndDeep(sparse=True)

    data = batches(6, 6, 6, 3)
    assert train(True, model, optimizers, data).equals(train(False, model, optimizers, data))


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


FORMS = ("rows", "offsets", "twice", "padding")


@pytest.mark.parametrize(
    ("forms", "mode"),
    [
        (FORMS, "mean"),
        *(pytest.param((form,), mode, marks=pytest.mark.slow) for form in FORMS for mode in ("sum", "mean")),
    ],
    ids=str,
)
def test_sparse_bags_and_repeated_lookups_are_updated_as_eager_does(mode: str, forms: Sequence[str]) -> None:
    def model() -> nn.Module:
        return Together(Bags(form, mode) for form in forms)

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model.parameters(), lr=0.1)]

    data = batches(6, 6, 3)
    assert train(True, model, optimizers, data).equals(train(False, model, optimizers, data))


def test_another_batch_size_is_a_new_graph() -> None:
    model = MODELS["mlp"]()
    program = StepProgram(model, loss_of, [torch.optim.SGD(model.parameters(), lr=0.1)])
    graphs = []
    for batch in batches(6, 3, 6):
        program.run(batch)
        graphs.append(program.graph)
    assert graphs[0] is graphs[2]
    assert graphs[0] is not graphs[1]


class Remembers(nn.Module):
    """Keeps earlier rows in an attribute, whose size Dynamo takes for any after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.memory = torch.full((2, 4), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        keys = torch.cat([self.memory, hidden])
        self.memory = keys.detach()
        return torch.softmax(hidden @ keys.t(), 1) @ keys


def test_a_tensor_of_another_size_than_the_graph_was_made_for_is_a_new_graph() -> None:
    def loss_of_rows(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) - 1).square().mean()

    torch.manual_seed(0)
    model, plain = Remembers(), Remembers()
    plain.load_state_dict(model.state_dict())
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    program = StepProgram(model, loss_of_rows, [torch.optim.SGD(model.parameters(), lr=0.5)])
    for batch in torch.randn(5, 3, 4):
        found = program.run(batch)["loss"]
        reference.zero_grad()
        loss = loss_of_rows(plain, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        reference.step()
        assert torch.equal(found, loss.detach())  # type: ignore[arg-type]
        assert torch.equal(model.layer.weight, plain.layer.weight)


def test_modes_frozen_parameters_and_group_numbers_make_new_graphs() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = MODELS["norm and dropout"]()
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def change(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step == 1:
            model.eval()
        if step == 2:
            optimizer.param_groups[0]["betas"] = (0.5, 0.9)
        if step == 3:
            next(model.parameters()).requires_grad_(False)

    data = batches(6, 6, 6, 6)
    model, optimizer = build()
    program = StepProgram(model, loss_of, [optimizer])
    torch.manual_seed(5)
    for step, batch in enumerate(data):
        change(step, model, optimizer)
        program.run(batch)
    plain, plain_optimizer = build()
    torch.manual_seed(5)
    for step, batch in enumerate(data):
        change(step, plain, plain_optimizer)
        plain_optimizer.zero_grad()
        loss_of(plain, batch)[0].backward()
        plain_optimizer.step()
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


def test_a_loaded_optimizer_state_is_used() -> None:
    data = batches(6, 6)

    def run(graph: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = MODELS["mlp"]()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        program = StepProgram(model, loss_of, [optimizer])
        saved = None
        for batch in data * 2:
            if graph:
                program.run(batch)
            else:
                optimizer.zero_grad()
                loss_of(model, batch)[0].backward()
                optimizer.step()
            if saved is None:
                saved = dict(optimizer.state_dict())
                saved["state"] = {k: {n: t.clone() for n, t in v.items()} for k, v in saved["state"].items()}
            else:
                optimizer.load_state_dict(saved)
        return list(model.state_dict().values())

    assert all(map(torch.equal, run(True), run(False)))


def test_a_replaced_parameter_is_noticed() -> None:
    model = nn.Linear(8, 4)
    program = StepProgram(model, loss_of, [torch.optim.SGD([model.weight], lr=0.1)])
    (batch,) = batches(6)
    program.run(batch)
    model.bias = nn.Parameter(torch.ones(4) * 5)
    expected = loss_of(model, batch)[0].detach()
    assert torch.equal(program.run(batch)["loss"], expected)


def test_the_step_after_a_layer_was_added_uses_the_learning_rate() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    model, same = nn.Sequential(first), nn.Sequential(copy.deepcopy(first))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, same)]
    program = StepProgram(model, lambda m, x: m(x).square().mean(), optimizers[:1])
    for step in range(6):
        if step == 3:
            model.append(second)
            same.append(second)
        program.run(torch.ones(2, 4))
        optimizers[1].zero_grad()
        same(torch.ones(2, 4)).square().mean().backward()
        optimizers[1].step()
        assert torch.equal(model[0].weight, same[0].weight), step


def test_replaced_data_of_a_parameter_is_noticed() -> None:
    def run(graph: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = MODELS["mlp"]()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
        program = StepProgram(model, loss_of, [optimizer])
        for step, batch in enumerate(batches(6, 6, 6, 6)):
            if step == 2:
                for parameter in model.parameters():
                    parameter.data = parameter.data * 0.5
                for state in optimizer.state.values():
                    state["step"].data = state["step"] + 7
            if graph:
                program.run(batch)
            else:
                optimizer.zero_grad()
                loss_of(model, batch)[0].backward()
                optimizer.step()
        return [*model.state_dict().values(), *(s["step"] for s in optimizer.state.values())]

    assert all(map(torch.equal, run(True), run(False)))


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.drop, self.temperature = nn.Linear(8, 4), nn.Dropout(0.0), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.head(x)) / self.temperature


def test_python_numbers_that_change_between_steps_are_noticed() -> None:
    share = 1.0

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return loss_of(model, batch)[0] * share

    model = Weighted()
    program = StepProgram(model, loss, [torch.optim.SGD(model.parameters(), lr=0.1)])
    (batch,) = batches(6)
    for change in ("none", "temperature", "share", "none"):
        model.temperature = 2.0 if change == "temperature" else model.temperature
        share = 3.0 if change == "share" else share
        expected = loss(model, batch).detach()
        assert torch.equal(program.run(batch)["loss"], expected)  # type: ignore[arg-type]


def test_a_python_number_that_changes_every_step_becomes_an_input_of_one_graph() -> None:
    (batch,) = batches(6)
    found = []
    for graph in (True, False):
        torch.manual_seed(0)
        model = Weighted()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        program = StepProgram(model, loss_of, [optimizer])
        for _ in range(20):
            model.temperature *= 0.9
            if graph:
                program.run(batch)
            else:
                optimizer.zero_grad()
                loss_of(model, batch)[0].backward()
                optimizer.step()
        assert not graph or program.captures == 2, "once as a constant, then as a number"
        found.append(model.state_dict().values())
    assert all(map(torch.equal, *found))  # type: ignore[arg-type]


def test_gradients_can_be_taken_apart_from_the_update() -> None:
    data = batches(6, 6, 6)
    make = OPTIMIZERS["adam"]
    whole = train(True, MODELS["mlp"], lambda m: [make(m.parameters())], data)
    torch.manual_seed(3)
    model = MODELS["mlp"]()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    program = StepProgram(model, loss_of, [optimizer])
    for batch in data:
        found = program.backward(batch)
        assert "0.weight.grad" in program.graph.outputs
        program.update(found.dense, found.sparse)
        scheduler.step()
    assert all(map(torch.equal, model.state_dict().values(), whole.model.state_dict().values()))


def test_between_changes_gradients() -> None:
    def between(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        norm = torch.nn.utils.get_total_norm(list(gradients.values()))
        scale = (0.1 / (norm + 1e-6)).clamp(max=1.0)
        return {name: g * scale for name, g in gradients.items()}

    data = batches(6, 6, 6)

    def run(graph: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = MODELS["mlp"]()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        program = StepProgram(model, loss_of, [optimizer], between=between)
        seen = []
        for batch in data:
            if graph:
                out = program.run(batch, fetch=["0.weight.grad", "2"])
                seen += [out["0.weight.grad"], out["2"]]
            else:
                optimizer.zero_grad()
                scores = model(batch["x"])
                F.cross_entropy(scores, batch["y"]).backward()
                parameters = dict(model.named_parameters())
                for name, gradient in between({name: p.grad for name, p in parameters.items()}).items():  # type: ignore[misc]
                    parameters[name].grad = gradient
                seen += [parameters["0.weight"].grad.clone(), scores.detach()]  # type: ignore[union-attr]
                optimizer.step()
        return [*seen, *model.state_dict().values()]  # type: ignore[list-item]

    assert all(map(torch.equal, run(True), run(False)))


def test_fetched_outputs_keep_their_structure_and_gradients_may_be_fetched_unoptimized() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"up": x + 1, "down": x - 1}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.twice, self.last = nn.Linear(8, 4), Twice(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            both = self.twice(self.first(x))
            return self.last(both["up"] * both["down"])

    model = Model()
    (batch,) = batches(6)
    program = StepProgram(model, loss_of, [torch.optim.SGD(model.last.parameters(), lr=0.0)])
    loss_of(model, batch)[0].backward()
    for _ in range(2):
        found = program.run(batch, fetch=["twice", "first.weight.grad"])
        assert torch.equal(found["twice"]["up"], model.first(batch["x"]) + 1)  # type: ignore[index, arg-type]
        assert torch.equal(found["first.weight.grad"], model.first.weight.grad)  # type: ignore[arg-type]
        assert {*found} == {"loss", "right", "twice", "first.weight.grad"}
    with pytest.raises(ValueError, match="'nothing' cannot be fetched"):
        program.run(batch, fetch=["nothing"])


def test_floats_in_a_batch_may_change_and_ints_make_new_graphs() -> None:
    def loss(model: nn.Module, batch: dict[str, object]) -> Tensor:
        return model(batch["x"]).pow(batch["power"]).mean() * batch["scale"]

    model = nn.Linear(8, 4)
    program = StepProgram(model, loss, [torch.optim.SGD(model.parameters(), lr=0.1)])
    for power, scale in ((2, 1.0), (2, 3.0), (4, 2.0), (2, 0.5)):
        batch = {"x": torch.ones(2, 8), "power": power, "scale": scale}
        expected = loss(model, batch).detach()
        assert torch.equal(program.run(batch)["loss"], expected)  # type: ignore[arg-type]


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module] = nn.GRU, **options: int) -> None:
        super().__init__()
        self.cell, self.head = kind(4, 5, **options), nn.Linear(5 * (1 + options.get("bidirectional", 0)), 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.unflatten(1, (2, 4)).transpose(0, 1))[0][-1])


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


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "recurrent": Recurrent,
    "lstm": lambda: Recurrent(nn.LSTM),
    "lstm of two layers and directions": lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "custom function": Custom,
    "gradient of other strides": Summed,
    "autocast": lambda: Autocast(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)),
    "spectral norm": lambda: nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4))),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(6, 4)),
}


@pytest.mark.parametrize(
    "models",
    [
        ["lstm", "custom function", "gradient of other strides"],
        *(pytest.param([name], marks=pytest.mark.slow) for name in OTHERS),
    ],
    ids=str,
)
def test_other_kinds_of_modules_are_the_plain_loop_too(models: Sequence[str]) -> None:
    def model() -> nn.Module:
        return Together(OTHERS[name]() for name in models)

    def optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)]

    data = batches(6, 6, 6)
    assert train(True, model, optimizers, data).equals(train(False, model, optimizers, data))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_sparse_matrices_in_a_batch_are_left_to_the_tape(layout: str) -> None:
    dense = torch.eye(5).roll(1, 0) + torch.eye(5)
    matrix = dense.to_sparse_csr() if layout == "csr" else dense.to_sparse()
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


def test_tied_parameters_have_one_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x)))

    data = batches(6, 6, 6)

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(model.parameters(), lr=0.1)]

    assert train(True, Tied, optimizers, data).equals(train(False, Tied, optimizers, data))


def test_a_scheduler_that_follows_a_captured_step_does_not_warn() -> None:
    model = MODELS["mlp"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    program = StepProgram(model, loss_of, [optimizer])
    program.run(batches(6)[0])
    scheduler.step()
