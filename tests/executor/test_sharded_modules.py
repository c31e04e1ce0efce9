"""Modules whose parameters lie in parts on several ranks are refused when a step is made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import anabranch as ab


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    # A gloo group of its own process leaves sockets that this process's end closes.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_fully_sharded_modules_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(
        ValueError, match=r"'0.weight' of .* is a DTensor.* give the Executor the model before it is sharded"
    ):
        ab.TrainStep(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1))


def test_tensor_parallel_modules_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"'0.weight' of Sequential is a DTensor"):
        ab.EvalStep(model, lambda m, x: {"y": m(x)})
