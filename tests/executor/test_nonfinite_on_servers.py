"""Steps whose gradients are not finite, with parameters on servers, and on several workers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from plain_loop import mean_square
from toys import in_job, plain_step


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 3, sparse=True)
        self.head = nn.Linear(3, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head(self.table(batch["ids"]) * batch["x"])  # type: ignore[no-any-return]


def batch_of(index: int, *, bad: bool = False) -> dict[str, Tensor]:
    x = torch.ones(4, 3) * (index + 1)
    if bad:
        x[2, 1] = float("inf")
    return {"ids": torch.tensor([0, 5, 5, index % 8]), "x": x}


def test_dense_gradients_that_are_not_finite_keep_rows_from_being_pushed() -> None:
    model = Model()
    step = ab.TrainStep(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.01))

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
        plain_step(other, mean_square, plain, batch_of(index))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)


def passing_over(ways: list[list[str]]) -> dict[str, Any]:
    """Rank 1 spoils steps 1 and 4 of each mode and engine."""
    rank = ab.job().rank

    def run(executor: ab.Executor, index: int, bad: bool) -> float:
        x = torch.ones(2, 3) * (index + 1 + rank)
        if bad and rank == 1:
            x[0, 0] = float("nan")
        return executor.run(batch={"ids": torch.tensor([rank, 5]), "x": x})["loss"].item()  # type: ignore[union-attr]

    def step(**options: Any) -> ab.TrainStep:
        model = Model()
        return ab.TrainStep(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.01), **options)

    modes = {}
    for mode, engine in ways:
        with ab.Executor(step(skip_nonfinite=True), mode, engine=engine, served="replace") as executor:  # type: ignore[arg-type]
            for index in range(6):
                run(executor, index, index in (1, 4))
            loss = run(executor, 0, False)
            modes[f"{mode} {engine}"] = [executor.statistics().skipped_steps, executor.step, round(loss, 5)]
    with ab.Executor(step(), "AllReduce") as executor:
        run(executor, 0, False)
        with pytest.raises(ab.NonFinite, match="the gradients of table.weight, head.weight, head.bias hold"):
            run(executor, 1, True)
        run(executor, 2, False)
        assert executor.step == 2
    return modes


WAYS = list(product(("AllReduce", "Hybrid", "PS"), ("tape", "graph")))


@pytest.mark.parametrize("ways", [WAYS[:4:3] + WAYS[4:5], pytest.param(WAYS, marks=pytest.mark.slow)])
def test_all_workers_pass_over_the_same_steps(ways: list[tuple[str, str]]) -> None:
    one, two = in_job(passing_over, 2, ways, servers=1)
    assert one == two
    first, *others = one.values()
    assert first[:2] == [2, 5]
    assert others == [first] * (len(ways) - 1)
