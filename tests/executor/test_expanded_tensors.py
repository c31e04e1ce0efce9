"""Expanded tensors, one element of memory shown many times, that a step changes: it changes them once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from plain_loop import TrainingCase, check, mean_square, sgd


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.table = nn.Embedding(3, 3)
        self.register_buffer("count", torch.ones(1).expand(3))
        self.beside = torch.ones(2, 1).expand(2, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.count[0].add_(1)
        self.beside[1, 0].mul_(1.5)
        return self.layer(batch["x"]) * self.count + self.beside.sum(0) + self.table(batch["ids"])


def counting(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = Counting()

    def batch(i: int) -> dict[str, Tensor]:
        wrong = 7 if i == 5 else 2  # raises after the count has changed
        return {"x": torch.ones(3, 4) * i, "ids": torch.tensor([0, 1, wrong])}

    return TrainingCase(model, mean_square, sgd(model, lr=1e-3), batch=batch, seen=lambda: model.beside)


def test_expanded_tensors_change_once_a_step() -> None:
    assert "graph" in check(counting, "graph").engines
