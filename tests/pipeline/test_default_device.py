"""PyTorch's default device is per thread: stages and calls on other threads have the caller's."""

from __future__ import annotations

import pytest
import torch
from pipeline_models import Computes
from torch import nn

import anabranch as ab
from backward_threads import NotesThreads


def test_stages_run_under_the_callers_default_device() -> None:
    found: list[list[str]] = [[], []]
    stages = [Computes(lambda x, places=places: places.append(torch.empty(0).device.type) or x) for places in found]
    with ab.Pipe(nn.Sequential(*stages), balance=[1, 1], chunks=2) as pipe:
        with torch.device("meta"):
            pipe(torch.ones(4, 2, device="cpu"))
        pipe(torch.ones(4, 2))
    assert found == [["meta", "meta", "cpu", "cpu"]] * 2


@pytest.mark.parametrize("schedule", ["GPipe", "ZB1P"])
def test_stages_differentiate_on_their_own_threads_alone(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward of a pipe's output waits on torch's thread of a device: the stages must not need it."""
    monkeypatch.setattr(NotesThreads, "seen", [])
    layers = [layer for _ in range(2) for layer in (nn.Linear(2, 2), Computes(NotesThreads.apply))]
    with ab.Pipe(nn.Sequential(*layers), [2, 2], chunks=2, schedule=schedule, checkpoint="never") as pipe:
        pipe(torch.ones(4, 2)).sum().backward()
    assert NotesThreads.seen == [False] * 4
