"""Loaders bound to steps: epochs, workers whose loaders end apart, forked loader workers, and exact resumption."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import anabranch as ab
from toys import assert_same, in_job, plain_step


class Squares(Dataset[dict[str, Tensor]]):
    """Each sample is computed with torch, as it would be in a forked worker."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.full((3,), float(index))
        return {"x": x, "y": (x @ x)[None] / 100}


def squared(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return (model(batch["x"]) - batch["y"]).square().mean(), {"first": batch["x"][:, 0]}


def program(seed: int = 0, **loaders: Any) -> tuple[nn.Module, ab.Executor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    steps = {
        "train": ab.TrainStep(model, squared, torch.optim.SGD(model.parameters(), lr=0.01)),
        "validate": ab.EvalStep(model, lambda model, batch: {"first": batch["x"][:, 0]}),
    }
    return model, ab.Executor(steps, dataloaders=loaders)


def seen(executor: ab.Executor, runs: int, name: str = "train") -> list[list[float]]:
    return [executor.run(name)["first"].tolist() for _ in range(runs)]


@pytest.mark.parametrize("step", ["train", "validate"])
def test_a_loader_without_batches_is_refused(step: str) -> None:
    _, executor = program(**{step: []})
    with executor, pytest.raises(ValueError, match=f"the loader of '{step}' yields no batches"):
        executor.run(step)


def test_a_loader_without_a_length_has_no_batch_num() -> None:
    def batches() -> Iterator[dict[str, Tensor]]:
        while True:
            yield {"x": torch.ones(2, 3), "y": torch.ones(2, 1)}

    _, executor = program(train=batches())
    with executor:
        executor.run("train")
        with pytest.raises(ValueError, match="'train' has no length"):
            executor.batch_num("train")


def test_bound_batches_are_the_plain_loops_random_numbers_included() -> None:
    """Shuffling, dropout and loading share a generator: it is drawn from in the plain loop's order."""
    model, executor = program(train=DataLoader(Squares(), 4, shuffle=True))
    with executor:
        torch.manual_seed(1)
        ours = seen(executor, 6)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    torch.manual_seed(1)
    theirs = []
    for _ in range(2):
        for batch in DataLoader(Squares(), 4, shuffle=True):
            plain_step(plain, lambda model, batch: squared(model, batch)[0], optimizer, batch)
            theirs.append(batch["x"][:, 0].tolist())
    assert ours == theirs
    assert_same(model, plain)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_forked_loader_workers_survive_our_threads() -> None:
    _, executor = program(
        train=DataLoader(Squares(), 4, num_workers=2), validate=DataLoader(Squares(), 5, num_workers=1)
    )
    with executor:
        for _ in range(2):
            assert seen(executor, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
            assert seen(executor, 2, "validate") == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def unequal() -> list[Any]:
    rank = ab.job().rank
    batches = [{"x": torch.full((2, 1), float(10 * rank + index)).double()} for index in range([5, 2, 3][rank])]
    torch.manual_seed(0)
    model = nn.Linear(1, 1).double()
    steps = {
        "train": ab.TrainStep(model, of_x, torch.optim.SGD(model.parameters(), lr=1e-4)),
        "validate": ab.EvalStep(model, lambda m, b: {"rows": b["x"]}),
    }
    with ab.Executor(steps, comm_mode="AllReduce", dataloaders={"train": batches, "validate": batches}) as executor:
        number = executor.batch_num("train")
        losses = [executor.run("train")["loss"].item() for _ in range(2 * number)]
        rows = [executor.run("validate")["rows"].flatten().tolist() for _ in range(number + 1)]
    return [number, losses, rows, model.weight.item()]


def of_x(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def test_an_epoch_ends_when_every_workers_loader_has_ended() -> None:
    torch.manual_seed(0)
    model = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    expected = []
    for index in [*range(5), *range(5)]:
        values = [10 * rank + index for rank, count in enumerate([5, 2, 3]) if index < count]
        x = torch.tensor(values).double().repeat_interleave(2)[:, None]
        expected.append(plain_step(model, of_x, optimizer, {"x": x}).item())
    for rank, (number, losses, rows, weight) in enumerate(in_job(unequal, 3)):
        assert number == 5
        assert [*losses, weight] == pytest.approx([*expected, model.weight.item()], rel=1e-12)
        own = [[10 * rank + index] * 2 for index in range([5, 2, 3][rank])]
        assert rows == own + [[]] * (5 - len(own)) + own[:1]


def unequal_on_servers() -> list[list[float]]:
    rank = ab.job().rank
    batches = [torch.tensor([[2 * rank + index, index]]) for index in range([4, 1][rank])]
    weights = []
    for cache in (None, ab.Cache(capacity=2), ab.Cache(capacity=2, pull_bound=1, push_bound=1)):
        model = nn.EmbeddingBag(8, 1, mode="sum", sparse=True, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        train = ab.TrainStep(model, lambda m, ids: m(ids).sum(), sgd, reduction="sum")
        with ab.Executor(train, "Hybrid", cache=cache, dataloaders={"default": batches}, served="replace") as executor:
            for _ in range(2 * executor.batch_num()):
                executor.run()
        weights.append(model.weight.flatten().tolist())
    return weights


def test_a_worker_with_an_ended_loader_keeps_pushing_nothing() -> None:
    """Under its own step's number, which the servers expect of it."""
    expected = torch.zeros(8)
    for ids in [[0, 0], [1, 1], [2, 2], [3, 3], [2, 0]]:
        expected -= 2 * torch.bincount(torch.tensor(ids), minlength=8)
    assert in_job(unequal_on_servers, 2, servers=2) == [[expected.tolist()] * 3] * 2
