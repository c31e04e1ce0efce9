"""What is made in an evaluation under ``torch.inference_mode()`` serves the training after it, at every boundary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab

Mode = Callable[[], AbstractContextManager[object]]


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 20, (6, 3), generator=generator), torch.randn(6, 2, generator=generator)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 4)
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.norm(self.table(ids).sum(1)))


def losses_of(folder: Path, mode: Mode, comm_mode: str | None, **options: object) -> list[float]:
    """Losses of a training in whose pauses is evaluated, saved and loaded, in ``mode``."""
    model = Model()
    adagrad = torch.optim.Adagrad(model.parameters(), lr=0.1)
    train = ab.TrainStep(model, lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), adagrad)
    evaluate = ab.EvalStep(model, lambda model, batch: {"y": model(batch[0])})
    losses = []
    with mode():
        executor = ab.Executor({"train": train, "eval": evaluate}, comm_mode, engine="tape", **options)
    with executor:
        for number in range(6):
            with mode():
                executor.run("eval", batch_of(number + 3))
                executor.statistics()
                if number == 3:
                    executor.save(folder)
                    executor.load(folder)
            losses.append(executor.run("train", batch_of(number))["loss"].item())
    return losses


@pytest.mark.parametrize(
    ("comm_mode", "options"),
    [
        (None, {}),
        ("PS", {}),
        ("Hybrid", {"cache": ab.Cache(capacity=8, push_bound=2, pull_bound=2)}),
    ],
    ids=str,
)
def test_an_executor_trains_after_evaluations_in_inference_mode(
    tmp_path: Path, comm_mode: str | None, options: dict[str, object]
):
    expected = losses_of(tmp_path / "plain", nullcontext, comm_mode, **options)
    assert losses_of(tmp_path / "inference", torch.inference_mode, comm_mode, **options) == expected
