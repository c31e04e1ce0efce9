"""Kept activations: the forward's own graph serves the backward, within a budget, with the same results."""

from __future__ import annotations

import copy

import pytest
import torch
from expert_modules import calling, together
from torch import Tensor, nn

from anabranch.errors import RemoteError
from anabranch.experts import ExpertBackend, ExpertServer, RemoteExpert
from anabranch.tensors import TensorSpec
from anabranch.transport import Client, Deadline, Outcome, Request


class Counted(nn.Module):
    """Linear, BatchNorm and dropout, with a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)


class Weighing(Client):
    """A client that adds up the bytes it sends with backwards."""

    sent = 0

    def gather(self, requests: list[Request], deadline: Deadline, **options: object) -> list[Outcome]:  # type: ignore[override]
        for request in requests:
            if request.verb == "expert.backward":
                self.sent += sum(tensor.nbytes for tensor in request.tensors)
        return super().gather(requests, deadline, **options)  # type: ignore[arg-type]


def backend_of(module: nn.Module, keep: int, **options: object) -> ExpertBackend:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    return ExpertBackend(
        "kept.0",
        module,
        optimizer,
        args_schema=[TensorSpec(4)],
        keep_activations=keep,
        **options,  # type: ignore[arg-type]
    )


def test_dropout_and_batch_norm_are_the_forwards_and_nothing_is_computed_or_sent_again() -> None:
    here = Counted()
    there = copy.deepcopy(here)
    optimizer = torch.optim.Adam(here.parameters(), lr=0.01)
    backend = backend_of(there, keep=100)
    there.calls = 0
    with ExpertServer([backend]) as server, Weighing() as client:
        expert = RemoteExpert("kept.0", server.endpoint, client=client)
        for step in range(3):
            x = torch.randn(6, 4)
            near, far = x.clone().requires_grad_(), x.clone().requires_grad_()
            expert.get_info()
            torch.manual_seed(step)
            expected = here(near)
            torch.manual_seed(step)
            answer = expert(far)
            assert torch.equal(answer, expected)
            expected.square().sum().backward()
            answer.square().sum().backward()
            assert torch.equal(far.grad, near.grad)
            optimizer.step()
            optimizer.zero_grad()
        assert client.sent == 3 * 6 * 4 * 4
    assert there.calls == 3
    for name, value in here.state_dict().items():
        assert torch.equal(value, there.state_dict()[name]), name


def test_a_backward_that_would_draw_another_mask_is_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    backend = backend_of(module, keep=2)
    with calling(backend) as expert:
        x = torch.ones(2, 4, requires_grad=True)
        expert(x).sum().backward()
        refused = pytest.raises(RemoteError, match=r"kept.0: 1 is Dropout\(p=0.5.*keep_activations=")
        first = expert(x)
        second = expert(x)  # for which the first one's are dropped
        with refused:
            first.sum().backward()
        second.sum().backward()
        assert backend.updates == 2
        module[1].p = 0.0
        expert(torch.ones(3, 4)).sum().backward()
        module[1].p = 0.5
        expert.eval()
        expert(torch.ones(3, 4)).sum().backward()
        assert backend.updates == 4


def test_activations_dropped_for_the_budget_are_recomputed() -> None:
    module = nn.Linear(4, 4)
    backend = backend_of(module, keep=4)
    with calling(backend) as expert:
        inputs = [torch.randn(2, 4, requires_grad=True) for _ in range(5)]
        outputs = [expert(x) for x in inputs]
        for output in outputs:
            output.sum().backward()
        large = torch.randn(5, 4, requires_grad=True)
        expert(large).sum().backward()
        assert all(x.grad is not None for x in [*inputs, large])
    assert backend.updates == 6


class Counting(nn.Module):
    """Sets its buffer anew in forward, and writes to another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("sums", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.sums += x.detach().sum(0)
        return self.linear(x)


def test_what_a_kept_forward_sets_or_writes_is_the_modules() -> None:
    module = Counting()
    with calling(backend_of(module, keep=8)) as expert:
        for _ in range(3):
            expert(torch.ones(2, 4)).sum().backward()
    assert module.calls == 3
    assert torch.equal(module.sums, torch.full((4,), 6.0))


class Shared(nn.Module):
    """Two parameters and the input whose gradients autograd hands out as one tensor, if there is one row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1, 4))
        self.second = nn.Parameter(torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first + self.second


def test_changing_a_gradient_in_place_changes_no_other_and_no_answer() -> None:
    module = Shared()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    backend = ExpertBackend(
        "kept.0", module, optimizer, args_schema=[TensorSpec(4)], keep_activations=8, clip_grad_norm=2.0
    )
    x = torch.ones(1, 4, requires_grad=True)
    with ExpertServer([backend]) as server:
        RemoteExpert("kept.0", server.endpoint)(x).backward(torch.full((1, 4), 4.0))
    assert torch.equal(x.grad, torch.full((1, 4), 4.0))  # type: ignore[arg-type]
    # The norm of two times four fours is 8 * sqrt(2): each is 2 / (8 * sqrt(2)) of itself.
    expected = torch.full((1, 4), -4.0 * 2.0 / (8.0 * 2.0**0.5))
    for parameter in module.parameters():
        assert torch.allclose(parameter.detach(), expected, atol=1e-5)


def test_two_backwards_of_one_forward_in_a_batch_both_count() -> None:
    module = nn.Linear(4, 4)
    backend = backend_of(module, keep=8, min_batch_size=2, timeout=60.0)
    x = torch.ones(2, 4, requires_grad=True)
    gradients: list[Tensor] = []
    with ExpertServer([backend]) as server:
        output = RemoteExpert("kept.0", server.endpoint)(x).sum()
        expected = module.weight.detach().sum(0).expand(2, 4)
        x.register_hook(lambda gradient: gradients.append(gradient.clone()))
        assert together(2, lambda _: output.backward(retain_graph=True)) == [None, None]
    assert backend.updates == 2
    assert len(gradients) == 2
    assert any(torch.allclose(gradient, expected) for gradient in gradients)
    assert all(float((gradient - expected).abs().max()) < 0.1 for gradient in gradients)
