"""Copies to and from a device: in time, complete, and beside the computing."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from anabranch.deadline import Deadline
from anabranch.experts import (
    Directory,
    ExpertBackend,
    ExpertServer,
    RemoteExpert,
    RemoteMixtureOfExperts,
    Task,
    TaskPool,
)
from anabranch.experts.server.device_copies import DeviceCopies
from anabranch.tensors import TensorSpec
from backward_threads import NotesThreads

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


class OwnThread(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return NotesThreads.apply(x)  # type: ignore[no-any-return,no-untyped-call]


@pytest.mark.parametrize("keep_activations", [0, 64])
def test_an_expert_differentiates_on_the_servers_thread_alone(
    keep_activations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller in the same process waits on torch's thread of the device: the expert must not need it."""
    monkeypatch.setattr(NotesThreads, "seen", [])
    backend = ExpertBackend("own.0", OwnThread(), args_schema=[TensorSpec(4)], keep_activations=keep_activations)
    with ExpertServer([backend]) as server:
        x = torch.ones(2, 4, requires_grad=True)
        RemoteExpert("own.0", server.endpoint)(x).sum().backward()
    assert x.grad is not None
    assert NotesThreads.seen == [False]


@pytest.mark.parametrize("keep_activations", [0, 64])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_caller_and_expert_may_share_a_device_and_a_process(device: str, keep_activations: int) -> None:
    backend = ExpertBackend("own.0", nn.Linear(4, 4), args_schema=[TensorSpec(4)], keep_activations=keep_activations)
    with ExpertServer([backend], device=device) as server:
        expert = RemoteExpert("own.0", server.endpoint)
        x = torch.ones(2, 4, device=device, requires_grad=True)
        expert(expert(x * 2)).sum().backward()
        near = x.detach().clone().requires_grad_()
        backend.module(backend.module(near * 2)).sum().backward()
    torch.testing.assert_close(x.grad, near.grad)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_callers_of_an_expert_on_a_device_get_their_own_answers(device: str) -> None:
    backend = ExpertBackend("same.0", nn.Linear(1, 1), args_schema=[TensorSpec(1)])
    nn.init.ones_(backend.module.weight)
    nn.init.zeros_(backend.module.bias)
    wrong: list[tuple[float, Tensor]] = []
    with ExpertServer([backend], device=device) as server, torch.no_grad():
        expert = RemoteExpert("same.0", server.endpoint)

        def ask(value: float) -> None:
            for rows in (1, 300, 8000):  # eight times 8000 may wait at once
                answer = expert(torch.full((rows, 1), value))
                if not torch.equal(answer, torch.full((rows, 1), value)):
                    wrong.append((value, answer))

        threads = [threading.Thread(target=ask, args=(float(value),)) for value in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert wrong == []


class PaddedSum(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return (x * mask[..., None]).sum(1), x * 2.0


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_an_expert_of_padded_sequences_on_a_device(device: str) -> None:
    backend = ExpertBackend("sum.0", PaddedSum(), args_schema=[TensorSpec(None, 4, pad=True)], timeout=0.05)
    with ExpertServer([backend], device=device) as server:
        expert = RemoteExpert("sum.0", server.endpoint)
        for length in (1, 5, 300):
            x = torch.randn(2, length, 4, device=device, requires_grad=True)
            total, double = expert(x)
            torch.testing.assert_close(total, x.sum(1))
            torch.testing.assert_close(double, 2.0 * x)
            (total.sum() + double.sum()).backward()
            torch.testing.assert_close(x.grad, torch.full_like(x, 3.0))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_a_mixture_under_autocast_gives_the_dtype_of_its_experts(device: str) -> None:
    directory, spec = Directory(), TensorSpec(4, dtype=torch.bfloat16)
    backends = [ExpertBackend(f"same.{i}", nn.Identity(), args_schema=[spec], outputs_schema=spec) for i in range(2)]
    with ExpertServer(backends, device=device, directory=directory):
        mixture = RemoteMixtureOfExperts(4, [2], directory, "same", k_best=2).to(device)
        x = torch.ones(3, 4, device=device)
        with torch.autocast("cuda", dtype=torch.bfloat16):  # where sums are in single precision
            answer = mixture(x)
        assert answer.dtype == torch.bfloat16
        torch.testing.assert_close(answer, x.bfloat16())
