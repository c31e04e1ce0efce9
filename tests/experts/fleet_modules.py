"""Functions that a command line or a fleet's file names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anabranch.tensors import TensorSpec


class Wide(nn.Module):
    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Two(nn.Module):
    """Two inputs, the second by name, and two outputs."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, *, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), ids + 1


def wide(width: int, scale: float = 1.0) -> nn.Module:
    return Wide(width, scale)


def of_features(features: int, scale: float = 1.0) -> nn.Module:
    return Wide(features, scale)


def two(width: int = 4) -> nn.Module:
    return Two(width)


def complete(width: int = 4) -> dict[str, object]:
    module = Two(width)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    return {
        "module": module,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 7),
        "args_schema": [TensorSpec(width)],
        "kwargs_schema": {"ids": TensorSpec(dtype=torch.int64)},
        "max_batch_size": 11,
    }


def with_schema(width: int = 4) -> dict[str, object]:
    return {"module": nn.Linear(width, width), "args_schema": [TensorSpec(width)]}


def misspelt() -> dict[str, object]:
    return {"module": nn.Linear(4, 4), "arg_schema": [TensorSpec(4)]}


def number() -> int:
    return 3


def halving(optimizer: torch.optim.Optimizer, factor: float = 0.5) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, factor)
