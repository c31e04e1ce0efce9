"""PyTorch's default device is per thread: stages and calls on other threads have the caller's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from backward_threads import NotesThreads


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.found.append(torch.empty(0).device.type)
        return x * 1.0


def test_stages_run_under_the_callers_default_device() -> None:
    stages = [Places(), Places()]
    with ab.Pipe(nn.Sequential(*stages), balance=[1, 1], chunks=2) as pipe:
        with torch.device("meta"):
            pipe(torch.ones(4, 2, device="cpu"))
        pipe(torch.ones(4, 2))
    assert [stage.found for stage in stages] == [["meta", "meta", "cpu", "cpu"]] * 2


class Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * (1.0 if torch.empty(0).device.type == "meta" else 0.0)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def test_calls_at_once_run_under_the_callers_default_device() -> None:
    inputs = [(torch.ones(2),) for _ in range(4)]
    with torch.device("meta"):
        found = ab.map_with_parallel_backward(Place, *inputs)
    assert all(torch.equal(value, torch.ones(2)) for (value,) in found)


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return NotesThreads.apply(self.layer(x))  # type: ignore[no-any-return,no-untyped-call]


@pytest.mark.parametrize("schedule", ["GPipe", "ZB1P"])
def test_stages_differentiate_on_their_own_threads_alone(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward of a pipe's output waits on torch's thread of a device: the stages must not need it."""
    monkeypatch.setattr(NotesThreads, "seen", [])
    with ab.Pipe(nn.Sequential(Noting(), Noting()), [1, 1], chunks=2, schedule=schedule, checkpoint="never") as pipe:
        pipe(torch.ones(4, 2)).sum().backward()
    assert NotesThreads.seen == [False] * 4
