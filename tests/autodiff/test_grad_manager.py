"""GradManager: sessions, callbacks, futures, accumulation; compared with ``torch.autograd.backward``."""

from __future__ import annotations

import concurrent.futures
import gc
import weakref

import pytest
import torch
from torch import nn

import anabranch as ab


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def reference(x: torch.Tensor, times: int = 1) -> list[torch.Tensor]:
    net = model()
    for _ in range(times):
        net(x).sum().backward()
    return [parameter.grad for parameter in net.parameters()]


@pytest.mark.parametrize("callbacks", [(), [lambda tensor, grad: None], lambda tensor, grad: grad])
@pytest.mark.parametrize("times", [1, 3])
def test_gradients_and_their_accumulation_equal_plain_backward_bit_for_bit(callbacks, times) -> None:
    net, x = model(), torch.randn(7, 4)
    manager = ab.GradManager().attach(net.parameters(), callbacks)
    for _ in range(times):
        with manager:
            manager.backward(net(x).sum())
    for parameter, expected in zip(net.parameters(), reference(x, times), strict=True):
        assert torch.equal(parameter.grad, expected)


def test_callbacks_run_in_backward_order_once_each_and_before_any_grad_is_written() -> None:
    net = model()
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    seen = []

    def callback(tensor, grad):
        assert all(parameter.grad is None for parameter in net.parameters())
        seen.append(names[id(tensor)])

    manager = ab.GradManager().attach(net.parameters(), callback)
    with manager:
        manager.backward(net(torch.randn(2, 4)).sum())
    assert sorted(seen) == sorted(names.values())
    assert {name[0] for name in seen[:2]} == {"2"}


def test_callbacks_chain_and_none_keeps_the_gradient() -> None:
    x = torch.ones(2, requires_grad=True)
    manager = ab.GradManager().attach(
        x, [lambda tensor, grad: grad + 1, lambda tensor, grad: None, lambda t, grad: grad * 10]
    )
    with manager:
        manager.backward((x * 2).sum())
    assert x.grad.tolist() == [30.0, 30.0]


@pytest.mark.parametrize("kind", [concurrent.futures.Future, torch.futures.Future])
def test_a_future_is_handed_to_the_next_callback_and_waited_for_after_the_sweep(kind) -> None:
    x = torch.ones(2, requires_grad=True)
    handed = []
    future = kind()
    result = torch.tensor([5.0, 6.0])

    def resolve(tensor, grad):
        handed.append(grad)
        grad.set_result(result)

    manager = ab.GradManager().attach(x, lambda tensor, grad: future).attach(x, resolve)
    with manager:
        manager.backward(x.sum())
    assert handed == [future]
    assert x.grad is result


def test_a_future_that_never_comes_is_a_deadline_exceeded_and_the_manager_works_on() -> None:
    x = torch.ones(2, requires_grad=True)
    answers = [concurrent.futures.Future(), None]
    manager = ab.GradManager(timeout=0.01).attach(x, lambda tensor, grad: answers.pop(0))
    with pytest.raises(ab.DeadlineExceeded, match="future"), manager:
        manager.backward(x.sum())
    assert x.grad is None
    with manager:
        manager.backward(x.sum())
    assert x.grad.tolist() == [1.0, 1.0]


def test_an_unreached_parameter_gets_no_callback_and_no_grad() -> None:
    used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    called = []
    manager = ab.GradManager().attach([used, unused], lambda tensor, grad: called.append(tensor))
    with manager:
        manager.backward(used.sum())
    assert [tensor is used for tensor in called] == [True]
    assert unused.grad is None


def test_an_exception_in_a_callback_ends_the_sweep_and_leaves_the_manager_usable() -> None:
    net, x = model(), torch.randn(2, 4)
    fail = [True]

    def callback(tensor, grad):
        if fail[0]:
            raise KeyError("mine")

    manager = ab.GradManager().attach(net.parameters(), callback)
    with pytest.raises(KeyError, match="mine"), manager:
        manager.backward(net(x).sum())
    assert all(parameter.grad is None for parameter in net.parameters())
    fail[0] = False
    with manager:
        manager.backward(net(x).sum())
    for parameter, expected in zip(net.parameters(), reference(x), strict=True):
        assert torch.equal(parameter.grad, expected)


def test_misuse_is_a_runtime_error() -> None:
    x = torch.ones(2, requires_grad=True)
    manager = ab.GradManager().attach(x)
    with pytest.raises(RuntimeError, match="not recording"):
        manager.backward(x.sum())
    with manager:
        with pytest.raises(RuntimeError, match="recording already"):
            manager.record()
        manager.backward(x.sum())
        with pytest.raises(RuntimeError, match="has been used"):
            manager.backward(x.sum())
    manager.release()


def test_attached_tensors_are_in_order_without_duplicates_and_weakly_held() -> None:
    first, second = torch.ones(1, requires_grad=True), torch.ones(2, requires_grad=True)
    manager = ab.GradManager().attach([second, first]).attach(second, lambda tensor, grad: None)
    assert [tensor is expected for tensor, expected in zip(manager.attached_tensors(), [second, first], strict=True)]
    with manager:
        manager.backward(second.sum())
    alive = weakref.ref(second)
    del second
    gc.collect()
    assert alive() is None
    assert len(manager.attached_tensors()) == 1


def test_integer_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        ab.GradManager().attach(torch.tensor([1]))


def test_a_sparse_gradient_reaches_the_callback_and_grad_sparse() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    layouts = []
    manager = ab.GradManager().attach(embedding.weight, lambda tensor, grad: layouts.append(grad.layout))
    for _ in range(2):
        with manager:
            manager.backward(embedding(torch.tensor([1, 3, 1])).sum())
    assert layouts == [torch.sparse_coo] * 2
    assert embedding.weight.grad.is_sparse
    assert embedding.weight.grad.to_dense()[:, 0].tolist() == [0.0, 4.0, 0.0, 2.0, 0.0]


def test_an_intermediate_may_be_attached_while_recording() -> None:
    a = torch.tensor([1.0], requires_grad=True)
    manager = ab.GradManager()
    with manager:
        b = a * 3
        manager.attach(b, lambda tensor, grad: grad * 2)
        manager.backward(b + 1)
    assert b.grad.tolist() == [2.0]


def test_second_order_through_nested_managers() -> None:
    x = torch.tensor([0.3], requires_grad=True)
    outer, inner = ab.GradManager().attach(x), ab.GradManager().attach(x, lambda tensor, grad: None)
    with outer:
        with inner:
            inner.backward(torch.cos(x))
        first = x.grad
        x.grad = None
        outer.backward(first)
    assert torch.allclose(x.grad, -torch.cos(x))


def test_siblings_of_a_group_do_not_record_one_another() -> None:
    x = torch.tensor([0.3], requires_grad=True)
    one, two = ab.GradManager().attach(x), ab.GradManager().attach(x)
    with one | two:
        y = torch.cos(x)
        one.backward(y)
        assert not x.grad.requires_grad
        two.backward(y)
    assert torch.allclose(x.grad, -2 * torch.sin(x))


def test_a_rank_without_a_loss_calls_backward_with_nothing() -> None:
    manager = ab.GradManager()
    with manager:
        manager.backward()
