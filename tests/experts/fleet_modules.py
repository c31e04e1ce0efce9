"""Functions that a command line names."""

from __future__ import annotations

import torch
from torch import nn

from anabranch.experts import ExpertBackend
from anabranch.tensors import TensorSpec


def make_backends(index: int, count: int) -> list[ExpertBackend]:
    return [ExpertBackend(f"one.{index}.{count}", nn.Identity(), args_schema=[TensorSpec(4)])]


def complete() -> dict[str, object]:
    module = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    schema = [TensorSpec(4)]
    return {
        "module": module, "optimizer": optimizer, "scheduler": scheduler, "args_schema": schema, "max_batch_size": 11
    }  # fmt: skip


def misspelt() -> dict[str, object]:
    return {"module": nn.Linear(4, 4), "arg_schema": [TensorSpec(4)]}


def number(*_: int) -> int:
    return 3
