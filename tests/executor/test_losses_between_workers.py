"""Losses that sum over the workers, on unequal shards, are the whole batch's; equal shards keep their bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.testing import LocalJob

SCRIPT = Path(__file__).with_name("losses_between_workers_job.py")
LOSSES = ("contrastive", "normalised", "balanced")
MODES = ("AllReduce", "PS", "Hybrid")


def case(**changes: object) -> dict[str, object]:
    usual = {"loss": "contrastive", "mode": "AllReduce", "engine": "tape", "accumulate": 1, "clip": None}
    return {**usual, "precision": None, "optimizer": "adam", **changes}


QUICK = [
    *(case(loss=loss) for loss in LOSSES),
    case(loss="normalised", mode="Hybrid", accumulate=2, clip=0.5, optimizer="sgd"),
    case(loss="balanced", mode="PS"),
    case(loss="normalised", precision="float16", optimizer="sgd"),
]
MORE = [
    *(case(loss=loss, mode=mode) for loss in LOSSES for mode in MODES),
    *(case(mode=mode, accumulate=2, clip=clip, optimizer="sgd") for mode in MODES for clip in (None, 0.5)),
    *(case(loss=loss, engine="graph") for loss in LOSSES),
    case(loss="normalised", mode="Hybrid", engine="graph", accumulate=2),
]


@pytest.mark.parametrize(
    ("workers", "cases"),
    [
        pytest.param(2, QUICK, id="2"),
        pytest.param(2, MORE, id="2 in all ways", marks=pytest.mark.slow),
        pytest.param(3, [*QUICK, *MORE], id="3", marks=pytest.mark.slow),
    ],
)
def test_a_loss_that_sums_over_workers_with_unequal_shards_is_the_whole_batchs(
    workers: int, cases: list[dict[str, object]]
) -> None:
    """The row weight was applied behind backward, so that gradients from another worker had the wrong one."""
    for found in LocalJob(workers, servers=2).run(SCRIPT, json.dumps(cases)).check().results:
        assert found is not None
        for tried, worst in zip(cases, found["worst"], strict=True):
            assert worst <= 1e-12, tried


PIPE = """
import json
import torch
import torch.distributed as dist
from torch import nn
import anabranch as ab

STAGES = {stages}
dist.init_process_group("gloo")
grid = ab.job().grid(data=2, pipeline=STAGES)
row, sizes = dist.get_rank() // STAGES, (7, 4)
start = sum(sizes[:row])


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def balanced(total, rows):
    def loss(output, target):
        shares = total(output.softmax(1).sum(0)) / 11
        return nn.functional.mse_loss(output, target) + 3 * shares.square().sum()

    return loss


def batches():
    torch.manual_seed(1)
    return [(torch.randn(11, 3).double(), torch.randn(11, 2).double()) for _ in range(4)]


plain = layers()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
for x, y in batches():
    optimizer.zero_grad()
    balanced(lambda tensor: tensor, 11)(plain(x), y).backward()
    optimizer.step()

pipe = ab.Pipe(layers(), [2, 1], chunks=1, process_group=grid.pipeline_group if STAGES > 1 else None)
loss = balanced(lambda tensor: ab.all_reduce(tensor, group=grid.data_group), sizes[row])
step = ab.TrainStep(pipe, loss, torch.optim.SGD(pipe.parameters(), lr=0.5))
with ab.Executor(step, "AllReduce", process_group=grid.data_group, timeout=60) as executor:
    for x, y in batches():
        executor.run(batch=(x[start : start + sizes[row]], y[start : start + sizes[row]]))
expected = dict(plain.named_parameters())
worst = [(value - expected[name]).abs().max().item() for name, value in pipe.named_parameters()]
print(json.dumps({{"worst": max(worst)}}))
"""


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_loss_of_a_pipe_may_sum_over_the_workers_too(stages: int) -> None:
    for found in LocalJob(2 * stages).run_source(PIPE.format(stages=stages)).check().results:
        assert found is not None
        assert found["worst"] <= 1e-13
