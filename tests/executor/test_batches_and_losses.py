"""Batches of any structure of tensors, what losses may return, and losses with parameters of their own."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils._pytree
from torch import Tensor, nn

import anabranch as ab
from anabranch.tensors import KeyedJagged, as_tensors, count_rows
from covering import slow_except
from plain_loop import TrainingCase, check, mean_square
from toys import in_job, plain_step, step_of

Batch = dict[str, Tensor]


class Uncertain(nn.Module):
    """Two tasks weighed by what is learned of them, with a head and a running mean of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.head = nn.Linear(4, 1).double()
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        hidden = model(batch["x"])
        if self.training:
            self.seen += 1.0
        first, second = (self.drop(self.head(hidden)) - batch["y"]).square().mean(), hidden.square().mean()
        return (self.logs.exp() * torch.stack([first, second])).sum() - 0.1 * self.logs.sum()


def made() -> tuple[nn.Module, Uncertain, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(), Uncertain()
    return model, loss, torch.optim.Adam([*model.parameters(), *loss.parameters()], lr=0.05)


def batches(steps: int) -> list[Batch]:
    numbers = torch.randn(9, 8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [{"x": part[:, :4], "y": part[:, 4:]} for part in numbers[:steps]]


def state_of(model: nn.Module, loss: nn.Module) -> dict[str, list[float]]:
    own = {f"loss.{name}": tensor for name, tensor in loss.state_dict().items()}
    return {name: tensor.flatten().tolist() for name, tensor in (model.state_dict() | own).items()}


def near(state: dict[str, list[float]]) -> dict[str, object]:
    return {name: pytest.approx(numbers, rel=0, abs=1e-12) for name, numbers in state.items()}


@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_parameters_of_the_loss_are_trained_as_by_the_plain_loop(engine: str) -> None:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model, loss, optimizer = made()
        return TrainingCase(model, loss, optimizer, batch=batches(9).__getitem__, seen=loss.state_dict)

    assert check(build, engine).refused_at is None


def test_it_is_saved_beside_the_model_under_its_own_name(tmp_path: Path) -> None:
    model, loss, optimizer = made()
    torch.manual_seed(5)
    losses = [plain_step(model, loss, optimizer, batch).item() for batch in batches(6)]
    expected = near(state_of(model, loss))
    model, loss, optimizer = made()
    with ab.Executor(ab.TrainStep(model, loss, optimizer)) as executor:
        torch.manual_seed(5)
        for batch in batches(6)[:3]:
            executor.run(batch=batch)
        executor.save(tmp_path / "half")
    model, loss, optimizer = made()
    with ab.Executor(ab.TrainStep(model, loss.forward, optimizer)) as executor:
        executor.load(tmp_path / "half")
        rest = [executor.run(batch=batch)["loss"].item() for batch in batches(6)[3:]]
    assert rest == pytest.approx(losses[3:], rel=0, abs=1e-12)
    assert state_of(model, loss) == expected


def test_a_pipe_refuses_it_and_a_model_that_has_a_loss_already() -> None:
    _, loss, _ = made()
    pipe = ab.Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), balance=[1, 1])
    with pytest.raises(ValueError, match="make them a layer at the end of the Pipe"):
        ab.TrainStep(pipe, loss, torch.optim.SGD(pipe.parameters(), lr=0.1))

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss = nn.Linear(4, 4)

    named = Named()
    with pytest.raises(ValueError, match="Named has a 'loss'"):
        ab.TrainStep(named, loss, torch.optim.SGD(named.parameters(), lr=0.1))
    own = named.loss.forward  # a method of a part of the model: nothing to train beside it
    assert ab.TrainStep(named, own, torch.optim.SGD(named.parameters(), lr=0.1)).model is named


def served() -> dict[str, list[float]]:
    """Train on the workers of a job, each on its part of every batch."""
    model, loss, optimizer = made()
    loss.drop.p = 0.0
    job = ab.job()
    with ab.Executor(ab.TrainStep(model, loss, optimizer)) as executor:
        for batch in batches(4):
            executor.run(batch={name: value.chunk(job.world_size)[job.rank] for name, value in batch.items()})
    loss.seen.zero_()  # each worker has its own buffers
    return state_of(model, loss)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("servers", [0, 1])
def test_workers_and_servers_train_it_as_one_process_does(servers: int) -> None:
    assert in_job(served, 2, servers=servers) == [near(served())] * 2


# What a loss may return.


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Named(NamedTuple):
    loss: Tensor
    logits: Tensor
    hidden: Any = None


FORMS = {
    "scalar": lambda loss, logits: loss,
    "one element": lambda loss, logits: loss.reshape(1),
    "pair": lambda loss, logits: (loss, {"logits": logits}),
    "dict": lambda loss, logits: {"loss": loss, "logits": logits, "note": "kept out", "hidden": None},
    "user": lambda loss, logits: UserDict({"loss": loss, "logits": logits}),
    "object": Output,
    "named": Named,
}
WAYS = [*product(["tape", "graph"], FORMS)]


@pytest.mark.parametrize(("engine", "form"), slow_except(WAYS, *WAYS[: len(FORMS) + 1]))
def test_a_loss_may_return(form: str, engine: Any) -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    made = FORMS[form]

    def loss(model: nn.Module, batch: Tensor) -> object:
        logits = model(batch)
        return made(logits.square().mean(), logits)  # type: ignore[no-untyped-call]

    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    with ab.Executor(step_of(model, loss=loss), engine=engine) as executor:
        for index in range(4):
            batch = torch.arange(6.0).reshape(2, 3) + index
            try:
                results = executor.run(batch=batch)
            except ab.CaptureError:
                assert (engine, form) == ("graph", "user")
                return
            assert not any(value.requires_grad for value in results.values())
            if form in ("pair", "dict", "user"):
                assert torch.equal(results.pop("logits"), plain(batch).detach())
            assert results == {"loss": plain_step(plain, mean_square, reference, batch)}
            assert torch.equal(model.weight, plain.weight)


@pytest.mark.parametrize(("engine", "error"), [("tape", TypeError), ("graph", ab.CaptureError)])
@pytest.mark.parametrize("answer", [3.0, {"logits": torch.ones(1)}, None])
def test_an_output_without_a_loss_is_refused(engine: Any, error: type[Exception], answer: object) -> None:
    step = step_of(nn.Linear(3, 2), loss=lambda model, batch: answer)
    with ab.Executor(step, engine=engine) as executor, pytest.raises(error, match=r"or an object with \.loss"):
        executor.run(batch=torch.ones(2, 3))


# What a batch may be.


@dataclass
class Plain:
    x: Any
    y: Any
    name: str = "kept"


@dataclass
class Derived:
    """Has a field and an attribute that its arguments do not name."""

    x: Any
    y: Any
    rows: int = field(init=False)
    unset: Any = field(init=False)

    def __post_init__(self) -> None:
        self.rows = len(self.x)
        self.note = "kept"


class Encoding(UserDict[str, Any]):
    """As tokenizers make them: it holds more than its items."""

    def __init__(self, note: str = "lost", **items: Any) -> None:
        super().__init__(items)
        self.note = note


class Pair(NamedTuple):
    x: Any
    y: Any


class Foreign:
    """Registered with PyTorch's pytree, as libraries do."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


torch.utils._pytree.register_pytree_node(
    Foreign, lambda value: ([value.x, value.y], None), lambda parts, _: Foreign(*parts)
)


class Wrapper(MutableMapping[str, Any]):
    """Its shallow copy shares the items with it."""

    def __init__(self, items: Any = (), **named: Any) -> None:
        self._data = dict(items, **named)

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._data[key] = value

    def __delitem__(self, key: str) -> None:
        del self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


def read_only(**items: Any) -> Mapping[str, Any]:
    return MappingProxyType(items)


KINDS: list[Callable[..., Any]] = [
    Plain, Derived, Encoding, Wrapper, Pair, Foreign, read_only, dict,
]  # fmt: skip


def part(batch: Any, name: str) -> Any:
    return getattr(batch, name) if hasattr(batch, name) else batch[name]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_any_kind_is_converted_moved_and_counted(kind: Callable[..., Any]) -> None:
    batch = kind(x=np.ones((4, 3), np.float32), y=torch.ones(4))
    converted = as_tensors({"inside": [batch]})["inside"][0]
    assert type(converted) is type(batch)
    assert isinstance(part(converted, "x"), Tensor)
    assert isinstance(part(batch, "x"), np.ndarray), "the caller's own batch is as it was"
    assert as_tensors(converted) is converted
    assert count_rows(converted) == 4
    moved = as_tensors(converted, torch.device("meta"))
    assert {part(moved, "x").device.type, part(moved, "y").device.type} == {"meta"}
    assert part(converted, "x").device.type == "cpu"
    with pytest.raises(ValueError, match=r"disagree in rows.*\(4, 3\).*\(5,\)"):
        count_rows(kind(x=torch.ones(4, 3), y=torch.ones(5)))
    with pytest.raises(ValueError, match=r"x \(4,\), y \(5,\)"):
        count_rows({"y": torch.ones(5), "x": torch.ones(4)})


def test_what_a_container_holds_besides_its_tensors_is_kept() -> None:
    device = torch.device("meta")
    assert as_tensors(Encoding("kept", x=torch.ones(1)), device).note == "kept"
    moved = as_tensors(Derived(torch.ones(2), torch.ones(2)), device)
    assert (moved.rows, moved.note) == (2, "kept")
    assert as_tensors(Plain(torch.ones(2), None), device).name == "kept"


def test_ragged_features_have_rows_in_a_dataclass_and_as_torchrecs() -> None:
    features = KeyedJagged.from_lists({"user": [[7], [8]], "seen": [[1, 2, 3], []]})
    assert count_rows(Plain(features, torch.ones(2))) == 2

    class Like:  # TorchRec's has these methods, and is registered with PyTorch's pytree
        weights_or_none, stride = features.weights_or_none, features.stride

    torch.utils._pytree.register_pytree_node(
        Like, lambda _: ([features.values(), features.lengths()], None), lambda parts, _: Like()
    )
    assert count_rows(Plain(Like(), torch.ones(2))) == 2


def trained(kind: Callable[..., Any], engine: Literal["tape", "graph"], *, bound: bool, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    batches = [kind(x=torch.randn(4, 3), y=torch.randn(4)) for _ in range(3)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = (batch.x, batch.y) if hasattr(batch, "x") else (batch["x"], batch["y"])
        return nn.functional.mse_loss(model(x).squeeze(1), y)

    loaders = {"default": batches} if bound else None
    with ab.Executor(step_of(model, loss=loss), engine=engine, dataloaders=loaders, **options) as executor:
        return [executor.run(batch=None if bound else batch)["loss"] for batch in batches] + [*model.parameters()]


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_any_kind_trains_as_a_dict_does(kind: Callable[..., Any], bound: bool) -> None:
    assert all(map(torch.equal, trained(kind, "tape", bound=bound), trained(dict, "tape", bound=False)))


@pytest.mark.parametrize("kind", [Plain, pytest.param(Encoding, marks=pytest.mark.slow)])
def test_a_graph_takes_it_from_a_loader_to_a_placed_module(kind: Callable[..., Any]) -> None:
    graph = trained(kind, "graph", bound=True, devices={"1": "cpu"})
    assert all(map(torch.equal, graph, trained(dict, "tape", bound=False)))
