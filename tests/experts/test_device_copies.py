"""Copies to and from a device: in time, complete, and beside the computing."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from anabranch.deadline import Deadline
from anabranch.experts import (
    ExpertBackend,
    ExpertServer,
    RemoteExpert,
    Task,
    TaskPool,
)
from anabranch.experts.server.scheduler import DeviceCopies
from anabranch.tensors import TensorSpec

on_cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class Journal:
    """Copies that only say in which order they were asked for."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def await_arrival(self, tensors: Sequence[Tensor | None], arrival: object) -> None:
        self.said.append(f"{arrival} arrived")

    def take(self, outputs: Sequence[Sequence[Tensor | None]]) -> Sequence[Sequence[Tensor | None]]:
        self.said.append("taken")
        return outputs


def test_a_batch_waits_for_its_inputs_and_answers_when_its_outputs_are_here() -> None:
    journal = Journal()

    def process(x: Tensor) -> list[Tensor]:
        journal.said.append(f"computed {x.shape[0]} rows")
        return [x]

    pool = TaskPool(process, max_batch_size=3)
    pool.copies = cast(DeviceCopies, journal)
    for name, rows in (("a", 1), ("b", 4)):
        task = Task([torch.ones(rows, 1)], rows, Deadline.after(60.0), lambda _: journal.said.append("answered"))
        task.copied = cast(torch.cuda.Event, name)
        pool.submit(task)
    while batch := pool.take_batch():
        pool.run(batch)
    assert journal.said == [
        *["a arrived", "computed 1 rows", "taken", "answered"],
        *["b arrived", "computed 3 rows", "taken"],
        *["b arrived", "computed 1 rows", "taken", "answered"],
    ]


@pytest.mark.parametrize("keep_activations", [0, 64])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_an_expert_on_a_device_is_the_module_here(device: str, keep_activations: int) -> None:
    torch.manual_seed(0)
    here = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    there = copy.deepcopy(here)
    mine, theirs = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (here, there))
    spec = TensorSpec(4, dtype=torch.float64)
    backend = ExpertBackend("ffn.0", there, theirs, args_schema=[spec], keep_activations=keep_activations)
    with ExpertServer([backend], device=device) as server:
        expert = RemoteExpert("ffn.0", server.endpoint)
        for rows in (1, 5, 2048):
            x = torch.randn(rows, 4, dtype=torch.float64)
            near, far = x.clone().requires_grad_(), x.clone().requires_grad_()
            expected, answer = here(near), expert(far)
            torch.testing.assert_close(answer, expected)
            expected.square().mean().backward()
            answer.square().mean().backward()
            torch.testing.assert_close(far.grad, near.grad)
            mine.step()
            mine.zero_grad()
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(b.cpu(), a)
