"""``executor.state_dict()`` is the plain model's own, whatever lives on servers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.testing import LocalJob

IDS = torch.tensor([0, 3, 3, 7])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.item = nn.Embedding(9, 4)
        self.norm = nn.BatchNorm1d(4)
        self.twin = nn.Embedding(9, 4)
        self.twin.weight = self.item.weight
        self.top = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.norm(self.item(ids) + self.twin(ids + 1)))  # type: ignore[no-any-return]

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 2}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 2}


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).square().mean()  # type: ignore[no-any-return]


def executor_of(model: nn.Module, mode: str | None, **options: Any) -> ab.Executor:
    step = ab.TrainStep(model, loss, torch.optim.Adam(model.parameters(), lr=0.1))
    steps = {"train": step, "look": ab.EvalStep(model, lambda m, ids: {"out": m(ids)})}
    return ab.Executor(steps, mode, engine="tape", **options)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"cache": ab.Cache(capacity=5, pull_bound=2, push_bound=2)},
    {"use_sparse_pull": False},
    {"row_compression": "int8"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mode", [None, "AllReduce", "Hybrid", "PS"])
def test_it_is_the_model_s_own_after_close_and_a_copy(mode: str | None, options: dict[str, Any]) -> None:
    if mode is None or mode == "AllReduce":
        options = {}
    model, again = Model(), Model()
    with executor_of(model, mode, **options) as executor:
        for _ in range(2):
            executor.run("train", IDS)
        found = executor.state_dict()
        kept = copy.deepcopy(found)
        assert executor.state_dict("look").keys() == found.keys()
        if "cache" not in options:
            executor.run("train", IDS)
            assert not torch.equal(executor.state_dict()["item.weight"], found["item.weight"])
            assert torch.equal(found["item.weight"], kept["item.weight"])
    assert list(found) == list(model.state_dict())
    assert found["item.weight"].data_ptr() == found["twin.weight"].data_ptr()
    again.load_state_dict(found)
    with executor_of(Model(), mode, **options) as executor:
        for _ in range(2):
            executor.run("train", IDS)
        plain = executor._spec.models[""]
    for name, value in plain.state_dict().items():
        assert not isinstance(value, Tensor) or torch.equal(value, again.state_dict()[name]), name


def test_several_models_want_a_name() -> None:
    models = {"a": Model(), "b": nn.Sequential(nn.Embedding(9, 1))}
    steps = {n: ab.TrainStep(m, loss, torch.optim.SGD(m.parameters(), lr=0.1)) for n, m in models.items()}
    with ab.Executor(steps, "Hybrid") as executor:
        with pytest.raises(ValueError, match=r"2 models; name one of the steps \['a', 'b'\]"):
            executor.state_dict()
        with pytest.raises(ValueError, match="no step is called 'c'"):
            executor.state_dict("c")
        assert list(executor.state_dict("b")) == ["0.weight"]
        assert torch.equal(executor.state_dict("b")["0.weight"], executor.state_dict("b")["0.weight"])
        expected = executor.state_dict("b")
    assert torch.equal(models["b"][0].weight, expected["0.weight"])  # type: ignore[index]


def test_the_loss_s_own_parameters_are_not_in_it() -> None:
    class Criterion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centres = nn.Parameter(torch.zeros(1))

        def forward(self, model: nn.Module, ids: Tensor) -> Tensor:
            return (model(ids) - self.centres).square().mean()

    model, criterion = Model(), Criterion()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    with ab.Executor(ab.TrainStep(model, criterion, optimizer), "PS") as executor:
        executor.run(batch=IDS)
        assert list(executor.state_dict()) == list(Model().state_dict())


def test_rows_of_a_remote_embedding_are_in_it(tmp_path: Path) -> None:
    class Users(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users = ab.RemoteEmbedding("users", None, 2, dtype=torch.float64)
            self.places = ab.RemoteEmbedding("places", 6, 2, dtype=torch.float64)
            self.top = nn.Linear(2, 1).double()

        def forward(self, ids: Tensor) -> Tensor:
            return self.top(self.users(ids - 5) + self.places(ids))  # type: ignore[no-any-return]

    model = Users()
    with executor_of(model, "Hybrid", cache=ab.Cache(capacity=3)) as executor:
        for ids in ([1, 2], [0, 5], [2, 3]):
            executor.run("train", torch.tensor(ids))
        state = executor.state_dict()
        assert list(state) == ["top.weight", "top.bias", "users.ids", "users.weight", "places.weight"]
        assert state["users.ids"].tolist() == [-5, -4, -3, -2, 0]
        assert state["places.weight"].shape == (6, 2)
        out = executor.run("look", torch.tensor([0, 1, 2, 3, 5]))["out"]
    rows = state["users.weight"] + state["places.weight"][[0, 1, 2, 3, 5]]
    assert torch.equal(out, rows @ state["top.weight"].T + state["top.bias"])


JOB = """
import json
import torch
from torch import nn
import anabranch as ab

torch.manual_seed(ab.job().rank)
model = nn.Sequential(nn.Embedding(8, 2), nn.Linear(2, 1)).double()
step = ab.TrainStep(model, lambda m, ids: m(ids).square().mean(), torch.optim.Adam(model.parameters(), lr=0.1))
with ab.Executor(step, MODE, timeout=60) as executor:
    for number in range(3):
        executor.run(batch=torch.tensor([number, 3 + ab.job().rank]))
    state = {name: value.tolist() for name, value in executor.state_dict().items()}
own = {name: value.tolist() for name, value in model.state_dict().items()}
with ab.Executor(step, MODE, timeout=60) as executor:
    executor.run(batch=torch.tensor([1, 2]))
after = {name: value.tolist() for name, value in model.state_dict().items()}
print(json.dumps({"state": state, "own": own, "after": after}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["Hybrid", "PS", "AllReduce"])
def test_in_a_job_rank_0_gets_it_every_worker_reads_its_model_back_and_a_second_executor_goes_on(mode: str) -> None:
    found = LocalJob(3, servers=2).run_source(JOB.replace("MODE", repr(mode))).check().results[:3]
    first = found[0]
    assert first is not None
    assert [bool(one and one["state"]) for one in found] == [True, False, False]
    for one in found:
        assert one is not None
        assert one["own"] == first["state"]
        assert one["after"] == first["after"]
    assert first["after"] != first["own"]
