"""A second Executor on servers that hold its tables: opening drops nothing, and training refuses unless told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab
from anabranch.parameter_server import ParameterServer

IDS, Y = torch.tensor([[1, 2], [3, 1]]), torch.tensor([1.0, -1.0])
BATCH = {"ids": IDS, "y": Y}


class Model(nn.Module):
    """A table on the servers, one that is created there, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.item = nn.Embedding(6, 2)
        self.user = ab.RemoteEmbedding("user", 6, 2, init=0.5)
        self.head = nn.Linear(2, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.item(ids).sum(1) + self.user(ids).sum(1))[:, 0]  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["ids"]), batch["y"])


def outputs(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"out": model(batch["ids"])}


def executor_of(model: nn.Module, mode: str = "Hybrid", **options: Any) -> ab.Executor:
    steps = {
        "train": ab.TrainStep(model, loss, torch.optim.Adam(model.parameters(), lr=0.1)),
        "look": ab.EvalStep(model, outputs),
    }
    return ab.Executor(steps, mode, **options)


@pytest.fixture(params=[1, 2])
def servers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Servers on which a job has trained two steps; it ended without a word."""
    count: int = request.param
    running = [ParameterServer(shard, count) for shard in range(count)]
    for server in running:
        server.__enter__()
    monkeypatch.setenv("ANABRANCH_SERVERS", ",".join(server.endpoint for server in running))
    first = executor_of(Model())
    for _ in range(2):
        first.run("train", BATCH)
    first._end(clean=False)
    yield "two steps"
    for server in running:
        server.__exit__(None, None, None)


def there() -> dict[str, Tensor]:
    with ab.ParameterClient() as client:
        return {name: client.pull(name) for name in sorted(client.steps())}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_opening_planning_and_closing_drop_nothing(servers: str) -> None:
    before = there()
    for served in ("refuse", "adopt", "replace"):
        model = Model()
        with executor_of(model, served=served) as executor:
            assert isinstance(model.item.weight, nn.Parameter)  # unchanged until it is decided
            if served != "refuse":
                executor.plan("train", BATCH)
        assert_same(there(), before)


def test_training_planning_and_saving_are_refused_with_table_step_and_cures(servers: str, tmp_path: Path) -> None:
    before = there()
    with executor_of(Model()) as executor:
        for use in (
            lambda: executor.run("train", BATCH),
            lambda: executor.plan("train", BATCH),
            lambda: executor.save(tmp_path),
        ):
            with pytest.raises(ValueError, match=r"item.weight \(step 2\).*resume.*served='adopt'.*served='replace'"):
                use()
    assert_same(there(), before)
