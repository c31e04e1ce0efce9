"""A batch is any structure of tensors: rows, devices, loaders, engines and pipes open the same containers."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils._pytree
from torch import Tensor, nn

import anabranch as ab
from anabranch.tensors import KeyedJagged, as_tensors, count_rows


@dataclasses.dataclass
class Plain:
    x: Any
    y: Any
    name: str = "kept"


@dataclasses.dataclass
class Derived:
    """Has a field and an attribute that its arguments do not name."""

    x: Any
    y: Any
    rows: int = dataclasses.field(init=False)
    unset: Any = dataclasses.field(init=False)

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


def same_bits(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, some, others))


def trained(kind: Callable[..., Any], engine: Literal["tape", "graph"], *, bound: bool, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    batches = [kind(x=torch.randn(4, 3), y=torch.randn(4)) for _ in range(3)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = (batch.x, batch.y) if hasattr(batch, "x") else (batch["x"], batch["y"])
        return nn.functional.mse_loss(model(x).squeeze(1), y)

    step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    loaders = {"default": batches} if bound else None
    with ab.Executor(step, engine=engine, dataloaders=loaders, **options) as executor:
        return [executor.run(batch=None if bound else batch)["loss"] for batch in batches] + [*model.parameters()]


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_any_kind_trains_as_a_dict_does(kind: Callable[..., Any], bound: bool) -> None:
    assert same_bits(trained(kind, "tape", bound=bound), trained(dict, "tape", bound=False))


@pytest.mark.parametrize("kind", [Plain, pytest.param(Encoding, marks=pytest.mark.slow)])
def test_a_graph_takes_it_from_a_loader_to_a_placed_module(kind: Callable[..., Any]) -> None:
    graph = trained(kind, "graph", bound=True, devices={"1": "cpu"})
    assert same_bits(graph, trained(dict, "tape", bound=False))


def test_a_pipe_takes_a_dataclass_as_it_takes_a_mapping() -> None:
    def run(make: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        with ab.Pipe(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), [1, 1], chunks=2) as pipe:
            step = ab.TrainStep(pipe, nn.functional.mse_loss, torch.optim.SGD(pipe.parameters(), lr=0.1))
            with ab.Executor(step) as executor:
                executor.run(batch=make(input=torch.randn(4, 3), target=torch.randn(4, 1)))
            return [*pipe.parameters()]

    assert same_bits(run(dataclasses.make_dataclass("Labelled", ["input", "target"])), run(dict))
