"""all_reduce, send and recv on two workers: each check, made in one job for all, compares with one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import anabranch as ab
from anabranch.collectives import differentiable, shared_memory, workers
from toys import in_job

RANK: int
CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.detach(), want.detach(), rtol=0, atol=1e-12)


def inputs() -> list[Tensor]:
    return [torch.tensor([0.3, 0.9], dtype=torch.float64) * (rank + 1) for rank in range(2)]


@check
def all_reduce_has_three_derivatives() -> None:
    for op in ("sum", "mean"):
        three_derivatives(op)


def three_derivatives(op: str) -> None:
    """Three orders: every rank differentiates the sum of all ranks' losses by its own input."""
    plain = [x.clone().requires_grad_() for x in inputs()]
    total = sum(plain) / (2 if op == "mean" else 1)
    want = [torch.sin(total * (rank + 1)).sum() for rank in range(2)]
    x = inputs()[RANK].requires_grad_()
    got = torch.sin(ab.all_reduce(x, op) * (RANK + 1)).sum()
    for order in range(3):
        gradients = torch.autograd.grad(sum(want), plain, create_graph=True)
        (gradient,) = torch.autograd.grad(got, x, create_graph=order < 2)
        close(gradient, gradients[RANK])
        want = [(g * g).sum() for g in gradients]
        if order < 2:
            got = (gradient * gradient).sum()


@check
def all_reduce_leaves_its_argument_and_takes_any_layout() -> None:
    x = torch.arange(6.0).view(2, 3).t()
    y = ab.all_reduce(x)
    assert torch.equal(y, 2 * torch.arange(6.0).view(2, 3).t())
    assert torch.equal(x, torch.arange(6.0).view(2, 3).t())
    assert not y.requires_grad
    assert ab.all_reduce(torch.tensor(3)).item() == 6


@check
def tensors_of_any_size_are_summed_in_shared_memory() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", None)
        patch.setattr(shared_memory, "_PIECE", 100_003)
        for size in (1, 5000, 3, 300_000, 7, 200_000, 0):
            for dtype in (torch.float32, torch.float64):
                x = torch.arange(size, dtype=dtype)
                assert torch.equal(ab.all_reduce(x * (RANK + 1)), 3 * x)
    (sums,) = differentiable._sums.values()
    assert {one.room for one in sums._sums.values()} == {1 << 17}, "of a piece, not of the largest tensor"


@check
def a_rank_that_does_not_use_the_sum_takes_part_in_its_backward() -> None:
    x = torch.ones(3, requires_grad=True)
    manager = ab.GradManager().attach(x)
    with manager:
        y = ab.all_reduce(x)
        manager.backward((y * 5).sum() if RANK else None)
    assert x.grad.tolist() == [5.0] * 3


@check
def a_sum_that_no_rank_uses_has_no_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    manager = ab.GradManager().attach(x, lambda tensor, grad: 1 / 0)
    with manager:
        ab.all_reduce(x)
        manager.backward()
    assert x.grad is None


@check
def a_chain_of_two_ranks_equals_one_process() -> None:
    w = [torch.tensor([1.5, -0.5], dtype=torch.float64, requires_grad=True) for _ in range(2)]
    x = torch.tensor([0.2, 0.7], dtype=torch.float64)
    wanted = torch.autograd.grad(torch.sin(torch.exp(x * w[0]) * w[1]).sum(), w)
    manager, seen = ab.GradManager(), []
    manager.attach(w[RANK], lambda tensor, grad: seen.append(1))
    with manager:
        if RANK == 0:
            ab.send(torch.exp(x * w[0]), 1)
            manager.backward()
        else:
            manager.backward(torch.sin(ab.recv(0) * w[1]).sum())
    assert seen == [1]
    assert torch.equal(w[RANK].grad, wanted[RANK])


@check
def a_single_value_without_a_stride_of_its_own_is_sent_and_comes_back() -> None:
    """What ``sum`` sends back to a tensor of one value is an expanded number."""
    x = torch.tensor([2.0], requires_grad=True)
    if RANK == 0:
        ab.send(x, 1).backward()
        assert x.grad.tolist() == [1.0]
    else:
        ab.recv(0).sum().backward()


@check
def a_tensor_there_and_back_passes_its_gradient_through_the_token() -> None:
    """Without a session: the token that recv is given leads a backward on to the send before it."""
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    if RANK == 0:
        token = ab.send(x * x, 1)
        ab.recv(1, token).sum().backward()
        assert x.grad.tolist() == [40.0, 60.0]
    else:
        token = ab.send(ab.recv(0) * 10, 0)
        token.backward()


@check
def what_is_not_used_sends_no_gradient_and_leaves_nobody_waiting() -> None:
    w = torch.ones(2, requires_grad=True)
    manager = ab.GradManager().attach(w)
    with manager:
        if RANK == 0:
            ab.send(w * 2, 1)
            manager.backward()
        else:
            ab.recv(0)
            manager.backward()
    assert w.grad is None


@check
def tensors_without_a_gradient_travel_with_shape_and_dtype() -> None:
    tensors = [
        torch.arange(6).view(2, 3),
        torch.tensor(True),
        torch.zeros(0, 4, dtype=torch.float16),
        torch.randn(2, 2, dtype=torch.complex64),
        torch.randn(3, 4).t(),
        torch.tensor([1.5], dtype=torch.bfloat16),
    ]
    dist.broadcast(torch.view_as_real(tensors[3]), 0)
    dist.broadcast(tensors[4].t(), 0)
    for tensor in tensors:
        if RANK == 0:
            assert not ab.send(tensor, 1).requires_grad
        else:
            got = ab.recv(0)
            assert got.dtype == tensor.dtype
            assert torch.equal(got, tensor)
            assert not got.requires_grad


@check
def conjugates_and_negatives_travel_as_their_values_and_so_do_their_gradients() -> None:
    z = torch.complex(torch.ones(3), torch.arange(3.0)).requires_grad_()
    if RANK == 0:
        ab.send(z.conj(), 1).backward()
        assert z.grad.tolist() == [1j] * 3
        ab.send(z.detach().conj().imag, 1)
    else:
        ab.recv(0).conj().backward(torch.full((3,), 1j))
        assert ab.recv(0).tolist() == [0.0, -1.0, -2.0]


@check
def second_derivatives_pass_between_ranks() -> None:
    x = torch.tensor([0.4, 1.1], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(torch.sin(x * x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * first).sum(), x)
    got: dict[str, Tensor] = {}
    with ab.Grad() as outer, ab.Grad() as inner:
        if RANK == 0:
            outer.wrt(x, callback=lambda tensor, grad: got.__setitem__("second", grad))
            inner.wrt(x, callback=lambda tensor, grad: got.__setitem__("first", grad))
            ab.send(x * x, 1)
            inner([], [])
            outer((got["first"] * got["first"]).sum(), None)
            close(got["first"], first)
            close(got["second"], second)
        else:
            y = ab.recv(0)
            inner(torch.sin(y).sum(), None)
            outer([], [])


@check
def a_message_that_is_none_is_a_protocol_error() -> None:
    if RANK == 0:
        dist.send(torch.full((12,), 7), 1)
    else:
        with pytest.raises(ab.ProtocolError, match="rank 0"):
            ab.recv(0)


@check
def misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="needs another one of the"):
        ab.send(torch.ones(1), RANK)
    with pytest.raises(ValueError, match="needs another one of the"):
        ab.recv(2)
    with pytest.raises(ValueError, match="'max'"):
        ab.all_reduce(torch.ones(1), "max")
    with pytest.raises(ValueError, match=r"all_reduce.*torch\.func"):
        torch.func.grad(lambda x: ab.all_reduce(x).sum())(torch.ones(1))
    with pytest.raises(ValueError, match="8 dimensions"):
        ab.send(torch.zeros([1] * 9), 1 - RANK)


@check
def tensors_of_unequal_sizes_or_dtypes_are_not_summed_nor_later_ones() -> None:
    for unlike in (torch.ones(3 + RANK), torch.ones(2, dtype=(torch.float32, torch.float64)[RANK])):
        group = dist.new_group([0, 1])
        for _ in range(2):
            ab.all_reduce(torch.ones(2), group=group)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(workers, "SAID_AFTER", 0.2)
            with pytest.raises(ab.BoundaryError, match="not all of|has left the sum|in another call|waits in"):
                ab.all_reduce(unlike, group=group)
        with pytest.raises(ab.PeerLost, match="an earlier sum"):  # the ranks are no longer in step
            ab.all_reduce(torch.ones(2, dtype=torch.float64), group=group)
        differentiable._sums[group]._workers.has_left_work = False  # the process may end as it likes


@check
def a_wait_ends_at_its_deadline_and_names_the_rank() -> None:
    """The last: a point-to-point wait that gives up breaks gloo's connection; rank 1 lives until it has."""
    store = dist.distributed_c10d._get_default_store()
    if RANK == 1:
        store.wait(["given up"], timedelta(seconds=60))
    if RANK == 0:
        started = time.monotonic()
        with pytest.raises(ab.DeadlineExceeded, match=r"rank 1, operation recv"):
            ab.recv(1, timeout=0.3)
        assert time.monotonic() - started < 20
        store.set("given up", "")


def go_through() -> list[str]:
    global RANK
    dist.init_process_group("gloo")
    RANK = dist.get_rank()
    for function in CHECKS:
        function()
    return [function.__name__ for function in CHECKS]


def test_two_workers_differentiate_what_they_send_and_sum_as_one_process_does() -> None:
    """One that fails has its name in the traceback."""
    first, second = in_job(go_through, 2)
    assert first == second
    assert len(first) > 10


def test_a_job_of_one_worker_sums_alone_and_sends_nothing() -> None:
    x = torch.ones(2, requires_grad=True)
    y = ab.all_reduce(x, "mean")
    y.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="init_process_group"):
        ab.send(x, 1)
