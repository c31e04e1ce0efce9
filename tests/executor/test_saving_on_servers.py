"""Saved under one mode, number of workers and of servers, loaded under another: training continues as it would have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab
from anabranch.parameter_server import ParameterServer

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "row_wise_adagrad": lambda p: ab.RowWiseAdagrad(p, lr=0.1, lr_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 4)
        self.twin = nn.EmbeddingBag(30, 4)
        self.twin.weight = self.table.weight
        self.head = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).sum(1) + self.twin(ids))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["y"])


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "ids": torch.randint(0, 30, (6, 3), generator=generator),
        "y": torch.randint(0, 2, (6,), generator=generator),
    }


def new_model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().double()


def step_of(model: nn.Module, optimizer: str, accumulate: int = 1) -> ab.TrainStep:
    made = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
    return ab.TrainStep(model, loss, made, scheduler=scheduler, accumulate=accumulate)


@contextmanager
def servers(count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So many shards, which the job then has; 0: none, so that what is on servers is in this process."""
    with ExitStack() as stack:
        endpoints = [stack.enter_context(ParameterServer(shard, count)).endpoint for shard in range(count)]
        monkeypatch.setenv("ANABRANCH_SERVERS", ",".join(endpoints))
        yield


def numbers(executor: ab.Executor, model: Model) -> dict[str, Tensor]:
    """All parameters as they are now."""
    everything = torch.arange(30)
    rows = executor.run("look", everything)["rows"] if "look" in executor._steps else model.table(everything)
    return {"table": rows, **{name: value.detach().clone() for name, value in model.head.named_parameters()}}


def executor_of(model: Model, optimizer: str, mode: str | None, accumulate: int = 1, **options: object) -> ab.Executor:
    look = ab.EvalStep(model, lambda model, ids: {"rows": model.table(ids)})
    steps = {"train": step_of(model, optimizer, accumulate), "look": look}
    return ab.Executor(steps, mode, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("Hybrid", 2), ("Hybrid", 3)),
        (("Hybrid", 0), (None, 0)),
        ((None, 0), ("Hybrid", 1)),
        (("PS", 1), ("Hybrid", 2)),
        ((None, 0), ("PS", 2)),
        (("PS", 0), (None, 0)),
    ],
    ids=str,
)
def test_training_goes_on_as_it_would_have(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
    first: tuple[str | None, int],
    second: tuple[str | None, int],
) -> None:
    plain = new_model()
    with executor_of(plain, optimizer, None) as executor:
        for step in range(6):
            executor.run("train", batch_of(step))
        wanted = numbers(executor, plain)
    before = new_model()
    with servers(first[1], monkeypatch), executor_of(before, optimizer, first[0]) as executor:
        for step in range(3):
            executor.run("train", batch_of(step))
        executor.save(tmp_path)
        saved = numbers(executor, before)
        executor.run("train", batch_of(3))  # saving leaves it able to go on
    after = new_model(seed=1)
    with servers(second[1], monkeypatch), executor_of(after, optimizer, second[0]) as executor:
        executor.run("train", batch_of(9))
        assert executor.resume(tmp_path)
        for name, value in numbers(executor, after).items():
            assert torch.equal(value, saved[name]), name
        for step in range(3, 6):
            executor.run("train", batch_of(step))
        assert executor.statistics().steps == 6
        for name, value in numbers(executor, after).items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-12)
