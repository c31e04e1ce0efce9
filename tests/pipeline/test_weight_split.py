"""The quick way for a linear layer's weight gradient beside the simple one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from pipeline_models import close
from torch import Tensor, nn

from anabranch import Pipe
from anabranch.pipeline.stage import weight_split


class Tall(nn.Module):
    """Weights that the quick way must leave alone: turned, of a convolution, without bias, and for three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.bare = nn.Linear(6, 6, bias=False)
        self.deep = nn.Linear(3, 3)
        self.turned = nn.Parameter(torch.randn(6, 6))
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bare(x) @ self.turned + torch.addmm(x, x, self.turned, alpha=0.5)
        return self.convolution(self.deep(x.unflatten(1, (2, 3))).flatten(1).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("schedule", ["ZB1P", "ZBV"])
def test_gradients_added_inside_the_multiplication_are_those_of_autograd(
    schedule: str, monkeypatch: pytest.MonkeyPatch
):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), Tall()).double()
    x, target = torch.randn(2, 7, 6, dtype=torch.float64)
    plain = copy.deepcopy(model)
    F.mse_loss(plain(x), target).backward()
    inside = []
    quick = weight_split._without_matrix

    def counting(split_point: weight_split._SplitPoint) -> list[Tensor]:
        left = quick(split_point)
        inside.append(len(split_point.leaves) - len(left))
        return left

    monkeypatch.setattr(weight_split, "_without_matrix", counting)
    with Pipe(model, [1, 1, 1, 1] if schedule == "ZBV" else [2, 2], chunks=3, schedule=schedule) as pipe:
        pipe.step(x, target, loss=F.mse_loss)
    assert sum(inside) >= 2, "of three microbatches two have something to add to"
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert close(ours.grad, theirs.grad), name
