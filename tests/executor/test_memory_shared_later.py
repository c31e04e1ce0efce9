"""Tensors that come to share memory after the capture, and a step that writes to one of them: the plain loop's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from plain_loop import Build, TrainingCase, check, linear, mean_square, sgd


def rows(i: int, n: int = 3) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(i))


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("counts", torch.ones(4))
        self.register_buffer("scale", torch.full((4,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        before = self.scale.sin()
        self.counts.add_(0.1)
        return self.layer(x * before) + self.scale.sin()  # type: ignore[no-any-return]


def views_of_one_batch(patch: pytest.MonkeyPatch) -> TrainingCase:
    def batch(i: int) -> tuple[Tensor, Tensor]:
        whole = rows(i, 8)
        return whole[:4], whole[2:6] if i in (5, 7) else whole[2:6].clone()

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        written, read = batch
        before = read.sin()
        written.add_(1.0)
        return (model(before) - model(read.sin())[:, :1] * 0.5).square().mean()  # type: ignore[no-any-return]

    model = linear(4, 4)
    return TrainingCase(model, loss, sgd(model), batch=batch)


def buffers_are_tied(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = Buffers()

    def change(k: int) -> None:
        model.scale.data = model.counts.data if k == 1 else model.counts.data.clone()

    return TrainingCase(model, mean_square, sgd(model), change)


@pytest.mark.parametrize(
    "build",
    [
        views_of_one_batch,
        buffers_are_tied,
    ],
)
def test_memory_that_is_shared_from_some_step_on(build: Build) -> None:
    got = check(build, "graph")
    assert got.engines[4] == "graph"
    assert "shares memory" in got.refusal


def test_an_evaluation_that_writes_to_a_tensor_it_also_reads() -> None:
    def outputs(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        batch[0].add_(1.0)
        return {"y": model(batch[1])}

    model = linear(4, 4)
    with ab.Executor(ab.EvalStep(model, outputs), engine="graph") as executor:
        for i in range(6):
            x = rows(i)
            batch = (x, x.view(3, 4) if i == 4 else x.clone())
            expected = model(batch[1] + (i == 4)).detach()
            try:
                found = executor.run(batch=batch)["y"]
            except ab.CaptureError:
                assert i == 4
                continue
            assert torch.equal(found, expected)
            assert i != 4
            assert executor.engine() == "graph"


def test_parts_of_one_memory_that_do_not_overlap_are_a_graph() -> None:
    """Flat parameters and buffers, and the batches of one tensor."""
    model = Buffers()
    flat = torch.ones(8)
    model.counts.data, model.scale.data = flat[:4], flat[4:]
    whole = rows(0, 30)
    with ab.Executor(ab.TrainStep(model, mean_square, sgd(model)), engine="graph") as executor:
        for i in range(10):
            executor.run(batch=whole[3 * i : 3 * i + 3])
        assert executor.engine() == "graph"
