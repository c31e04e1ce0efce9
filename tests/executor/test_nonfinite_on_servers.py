"""Steps whose gradients are not finite, with parameters on servers, and on several workers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.testing import LocalJob


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 3, sparse=True)
        self.head = nn.Linear(3, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head(self.table(batch["ids"]) * batch["x"])  # type: ignore[no-any-return]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def batch_of(index: int, *, bad: bool = False) -> dict[str, Tensor]:
    x = torch.ones(4, 3) * (index + 1)
    if bad:
        x[2, 1] = float("inf")
    return {"ids": torch.tensor([0, 5, 5, index % 8]), "x": x}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("comm_mode", ["PS", "Hybrid"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_that_are_not_finite_are_passed_over(comm_mode: str, clip: Any, accumulate: int) -> None:
    def run(mode: str | None, indices: list[tuple[int, bool]]) -> tuple[dict[str, Tensor], int]:
        model = Model()
        options: dict[str, Any] = {"clip_grad_norm": clip, "accumulate": accumulate, "skip_nonfinite": True}
        step = ab.TrainStep(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.01), **options)
        with ab.Executor(step, comm_mode=mode) as executor:
            for index, bad in indices:
                executor.run(batch=batch_of(index, bad=bad))
            skipped = executor.statistics().skipped_steps
        return copy.deepcopy(model.state_dict()), skipped

    good = [(index, False) for index in range(6)]
    bad = [(9, True)] + [(9, False)] * (accumulate - 1)
    expected, _ = run(None, good)
    found, skipped = run(comm_mode, [*good[:2], *bad, *good[2:], *bad])
    assert skipped == 2
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_dense_gradients_that_are_not_finite_keep_rows_from_being_pushed() -> None:
    model = Model()
    step = ab.TrainStep(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.01))

    def spoil(gradient: Tensor) -> Tensor:
        return gradient * float("nan")

    with ab.Executor(step, comm_mode="Hybrid") as executor:
        executor.run(batch=batch_of(0))
        hook = model.head.bias.register_hook(spoil)
        with pytest.raises(ab.NonFinite, match=r"gradients of head\.bias hold"):
            executor.run(batch=batch_of(1))
        hook.remove()
        executor.run(batch=batch_of(2))
    other = Model()
    plain = torch.optim.SGD(other.parameters(), lr=0.01)
    for index in (0, 2):
        plain.zero_grad()
        loss_of(other, batch_of(index)).backward()  # type: ignore[no-untyped-call]
        plain.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)


def test_the_norm_of_gradients_on_servers_is_known_with_clipping_only() -> None:
    model = Model()
    step = ab.TrainStep(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.01))
    with (
        ab.Executor(step, comm_mode="PS") as executor,
        pytest.raises(ValueError, match="give the TrainStep clip_grad_norm"),
    ):
        executor.run(batch=batch_of(0), fetch=["grad_norm"])


JOB = """
import json, sys
import torch
from torch import nn
import anabranch as ab

job = ab.job()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 3, sparse=True)
        self.head = nn.Linear(3, 1)

    def forward(self, batch):
        return self.head(self.table(batch["ids"]) * batch["x"])


def loss(model, batch):
    return model(batch).square().mean()


def batch_of(index, bad):
    x = torch.ones(2, 3) * (index + 1 + job.rank)
    if bad and job.rank == 1:
        x[0, 0] = float("nan")
    return {"ids": torch.tensor([job.rank, 5]), "x": x}


found = {}
for mode in ("AllReduce", "Hybrid", "PS"):
    for engine in ("tape", "graph"):
        model = Model()
        step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.01), skip_nonfinite=True)
        with ab.Executor(step, mode, engine=engine, served="replace") as executor:
            for index in range(6):
                executor.run(batch=batch_of(index, index in (1, 4)))
            skipped = executor.statistics().skipped_steps
            values = executor.run(batch=batch_of(0, False))["loss"].item()
        found[f"{mode} {engine}"] = [skipped, executor.step, values]

model = Model()
with ab.Executor(ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.01)), "AllReduce") as executor:
    executor.run(batch=batch_of(0, False))
    try:
        executor.run(batch=batch_of(1, True))
    except ab.NonFinite as error:
        found["raised"] = str(error).split(" hold")[0]
    executor.run(batch=batch_of(2, False))
    found["steps"] = executor.step

layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
pipe = ab.Pipe(layers, balance=[2, 1], chunks=2, process_group=job.grid(data=1, pipeline=2).pipeline_group)
parameters = list(pipe.parameters())
step = ab.TrainStep(pipe, nn.functional.mse_loss, torch.optim.SGD(parameters, lr=0.1), skip_nonfinite=True)
with ab.Executor(step) as executor, pipe:
    hook = None
    for index in range(4):
        if index == 1 and job.rank == 1:  # the last stage's gradient only
            hook = parameters[0].register_hook(lambda gradient: gradient * float("inf"))
        x = torch.ones(4, 3, dtype=torch.float64) * index
        executor.run(batch=(x, x[:, :1]))
        if hook is not None:
            hook.remove()
            hook = None
    found["pipe"] = [executor.statistics().skipped_steps, executor.step]
print(json.dumps(found))
"""


def test_all_workers_pass_over_the_same_steps() -> None:
    found: Any = LocalJob(2, servers=1).run_source(JOB).check().results
    one, two = found[:2]
    assert one == two
    modes = {name: value for name, value in one.items() if " " in name}
    assert {tuple(value[:2]) for value in modes.values()} == {(2, 5)}
    losses = {round(value[2], 5) for value in modes.values()}
    assert len(losses) == 1
    assert one["raised"] == "the gradients of table.weight, head.weight, head.bias"
    assert one["steps"] == 2
    assert one["pipe"] == [1, 3]
