"""Several training steps over one model, with parameters on servers: each moves what its own optimizer has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_parts import in_job
from torch import Tensor, nn

import anabranch as ab
from plain_loop import mean_square

IDS = torch.tensor([[1, 3], [3, 0]])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.body, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.table(ids).sum(1)).tanh())


def second(model: nn.Module, ids: Tensor) -> Tensor:
    return (model(ids) - 1).square().mean()


def trained(mode: str | None, engine: str = "tape", **options: Any) -> list[Tensor]:
    model = Net()
    one = torch.optim.SGD([*model.body.parameters(), model.table.weight], lr=0.1, momentum=0.9)
    two = torch.optim.Adam(model.head.parameters(), lr=0.1)
    steps = {"one": ab.TrainStep(model, mean_square, one), "two": ab.TrainStep(model, second, two, **options)}
    with ab.Executor(steps, mode, engine=engine) as executor:
        for _ in range(4):
            executor.run("one", IDS)
            executor.run("two", IDS)
    return list(model.parameters())


@pytest.mark.parametrize("engine", ["tape", pytest.param("graph", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["PS", "Hybrid"])
def test_a_step_moves_on_servers_what_its_own_optimizer_has(mode: str, engine: str) -> None:
    for value, plain in zip(trained(mode, engine), trained(None), strict=True):
        torch.testing.assert_close(value, plain, rtol=0, atol=1e-12)


def test_a_step_that_clips_gradients_of_anothers_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"table\.weight.*routes="):
        trained("Hybrid", clip_grad_norm=1.0)


@pytest.mark.parametrize("mode", ["PS", "Hybrid"])
def test_models_of_two_steps_may_share_a_module(mode: str) -> None:
    def run(mode: str | None) -> tuple[Tensor, list[Tensor]]:
        model = Net()
        train = ab.TrainStep(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1))
        look = ab.EvalStep(model.table, lambda table, ids: {"rows": table(ids)})
        with ab.Executor({"train": train, "look": look}, mode) as executor:
            executor.run("train", IDS)
            rows = executor.run("look", IDS)["rows"]
        return rows, list(model.parameters())

    (rows, ours), (plain_rows, plain) = run(mode), run(None)
    assert torch.equal(rows, plain_rows)
    assert all(map(torch.equal, ours, plain))


@pytest.mark.parametrize(("mode", "accumulate"), [("Hybrid", 1), ("PS", 1), (None, 2)])
def test_a_loss_that_calls_backward_itself_is_refused(mode: str | None, accumulate: int) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        mean_square(model, ids).backward()
        return second(model, ids)

    model = Net()
    step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=accumulate)
    with ab.Executor(step, mode) as executor, pytest.raises(ValueError, match="called backward"):
        executor.run(batch=IDS)


def refused_by_two() -> list[str]:
    """Two workers run different steps, and then want gradients scaled by a shard's frequencies."""
    model, bag = nn.Linear(2, 1), nn.EmbeddingBag(5, 2, scale_grad_by_freq=True)

    def step(model: nn.Module) -> ab.TrainStep:
        return ab.TrainStep(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(ValueError, match="scale_grad_by_freq") as scaled:
        ab.Executor(step(bag), "AllReduce")
    steps = {"a": step(model), "b": step(model)}
    with ab.Executor(steps, "AllReduce") as executor, pytest.raises(ab.BoundaryError) as different:
        executor.run("a" if ab.job().rank == 0 else "b", torch.ones(2, 2))
    return [str(different.value), str(scaled.value)]


def test_different_steps_on_two_workers_and_gradients_scaled_by_a_shards_frequencies_are_refused() -> None:
    for different, scaled in in_job(refused_by_two, 2):
        assert "the same steps in the same order" in different
        assert "scale_grad_by_freq" in scaled
