"""GradManager: sessions, callbacks, futures, accumulation; compared with ``torch.autograd.backward``."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import anabranch as ab
from toys import in_job, interrupted_at


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
        manager.backward(net(torch.randn(2, 4)).sum() + net(torch.randn(2, 4)).sum())
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


@pytest.mark.parametrize("kind", [concurrent.futures.Future, torch.futures.Future])
def test_a_future_that_never_completes_is_a_deadline_exceeded_and_the_manager_stays_usable(kind) -> None:
    x = torch.ones(2, requires_grad=True)
    answers = [kind(), None]
    manager = ab.GradManager(timeout=0.01).attach(x, lambda tensor, grad: answers.pop(0))
    with pytest.raises(ab.DeadlineExceeded, match="future"), manager:
        manager.backward(x.sum())
    assert x.grad is None
    with manager:
        manager.backward(x.sum())
    assert x.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("times", [0, 1, 10])
def test_an_interrupt_at_any_line_adds_all_gradients_or_none(times: int) -> None:
    """An earlier ``.grad`` was lost between the hook that sets it aside and the one that puts it back."""
    kept: list[object] = []  # or a finalizer would run in a traced line, and swallow the interrupt
    line = 1
    while True:
        a, b, c = (torch.tensor([k, k + 1.0], requires_grad=True) for k in (1.0, 3.0, 5.0))
        manager = ab.GradManager().attach([a, b, c], lambda tensor, grad: grad * times if times else None)
        kept += [a, b, c, manager]
        a.grad, c.grad = torch.ones(2), torch.ones(2).mul_(2)
        before = [a.grad.clone(), torch.zeros(2), c.grad.clone()]
        after = [old + max(1, times) * (a * b * c / x).detach() for old, x in zip(before, (a, b, c), strict=True)]
        with manager:
            product = (a * b * c).sum()
            came = interrupted_at(line, lambda run=manager.backward, product=product: run(product))
        found = [torch.zeros(2) if x.grad is None else x.grad.clone() for x in (a, b, c)]
        assert [x.tolist() for x in found] in ([x.tolist() for x in before], [x.tolist() for x in after]), line
        product = (a * 2).sum()
        product.backward()  # a backward that is not the manager's is left alone
        assert a.grad.tolist() == (found[0] + 2).tolist()
        a.grad = None
        with manager:
            manager.backward(a.sum())  # nothing is left of the sweep before
        assert a.grad.tolist() == [max(1.0, times)] * 2
        if not came:
            break
        line += 1
    assert line > 60


@pytest.mark.parametrize("attached_first", ["with a callback", "without"])
def test_a_failed_sweep_changes_no_grad_of_tensors_attached_without_callbacks(attached_first: str) -> None:
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    a.grad = torch.full((2,), 7.0)
    held, fail = a.grad, [True]

    def callback(tensor, grad):
        if fail[0]:
            raise ConnectionError("a peer is lost")

    manager = ab.GradManager()
    for tensors, chain in [((a, c), ()), (b, callback)][:: -1 if attached_first == "with a callback" else 1]:
        manager.attach(tensors, chain)
    for fails in (True, False):
        fail[0] = fails
        with contextlib.suppress(ConnectionError), manager:
            hidden = c * 5
            manager.attach(hidden)
            manager.backward((b * 3).sum() + (a * 2 + hidden).sum())
        if fails:
            assert a.grad is held
            assert a.grad.tolist() == [7.0, 7.0]
            assert b.grad is c.grad is hidden.grad is None
    assert a.grad is held
    assert [t.grad.tolist() for t in (a, b, c, hidden)] == [[9.0] * 2, [3.0] * 2, [5.0] * 2, [1.0] * 2]


def test_an_unreached_parameter_gets_no_callback_and_no_grad() -> None:
    used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    called = []
    manager = ab.GradManager().attach([used, unused], lambda tensor, grad: called.append(tensor))
    with manager:
        manager.backward(used.sum())
    assert [tensor is used for tensor in called] == [True]
    assert unused.grad is None


def test_misuse_is_a_runtime_error() -> None:
    x = torch.ones(2, requires_grad=True)
    manager = ab.GradManager().attach(x)
    with pytest.raises(RuntimeError, match="not recording"):
        manager.backward(x.sum())
    with manager:
        with pytest.raises(RuntimeError, match="already recording"):
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


def test_two_tensors_that_share_one_gradient_are_treated_once_each() -> None:
    a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    manager = ab.GradManager().attach([a, b], lambda tensor, grad: grad.mul_(2))
    with manager:
        manager.backward((a + b).sum())
    assert a.grad.tolist() == b.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("old", ["dense", "sparse"])
@pytest.mark.parametrize("new", ["dense", "sparse"])
def test_dense_and_sparse_gradients_add_up_in_every_combination(old: str, new: str) -> None:
    def loss(weight, sparse):
        return nn.functional.embedding(torch.tensor([1, 1, 2]), weight, sparse=sparse == "sparse").sum()

    weight, plain = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(4, 2))
    manager = ab.GradManager().attach(weight, lambda tensor, grad: None)
    for kind in (old, new):
        with manager:
            manager.backward(loss(weight, kind))
        loss(plain, kind).backward()
    assert weight.grad.layout == plain.grad.layout
    assert torch.equal(weight.grad.to_dense(), plain.grad.to_dense())


def test_futures_returned_before_another_callback_raised_are_cancelled() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    pending: concurrent.futures.Future = concurrent.futures.Future()

    def callback(tensor, grad):
        if tensor is b:
            raise KeyError("mine")
        return pending

    manager = ab.GradManager().attach([a, b], callback)
    with pytest.raises(KeyError), manager:
        manager.backward((b * 1 * a).sum())
    assert pending.cancelled()
    assert a.grad is None


def test_a_future_that_fails_raises_its_own_error_and_writes_nothing() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    failed = concurrent.futures.Future()
    failed.set_exception(ConnectionError("lost"))
    manager = ab.GradManager().attach([a, b], lambda tensor, grad: failed if tensor is a else None)
    with pytest.raises(ConnectionError, match="lost"), manager:
        manager.backward((a + b).sum())
    assert a.grad is None
    assert b.grad is None


def test_a_callback_must_return_a_gradient() -> None:
    x = torch.ones(2, requires_grad=True)
    manager = ab.GradManager().attach(x, lambda tensor, grad: 3)
    with pytest.raises(TypeError, match="got 3"), manager:
        manager.backward(x.sum())
    with pytest.raises(TypeError, match="called as callback"):
        manager.attach(x, [3])


@pytest.mark.parametrize("change", [torch.norm, lambda grad: grad.expand(2, 2), lambda grad: grad.to("meta")])
def test_a_callback_returns_a_gradient_of_its_tensor_s_form(change: Any) -> None:
    """Where a ``.grad`` was there, it was broadcast, or the others' had been added before that failed."""
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    a.grad, b.grad = torch.zeros(2), torch.zeros(2)
    manager = ab.GradManager().attach([a, b], lambda tensor, grad: change(grad) if tensor is a else None)
    with pytest.raises(ValueError, match=r"for a tensor of shape \(2,\) on cpu"), manager:
        manager.backward((a + b).sum())
    assert a.grad.tolist() == b.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_grad_dtype_counts_as_in_torch_and_another_of_a_callback_changes_no_grad(dtype: torch.dtype) -> None:
    x, net, plain = torch.randn(2, 4), model(), model()
    net[0].weight.grad_dtype = plain[0].weight.grad_dtype = dtype
    plain(x).sum().backward()
    with ab.GradManager().attach(net.parameters(), lambda tensor, grad: grad) as manager:
        manager.backward(net(x).sum())
    grads = [parameter.grad for parameter in plain.parameters()]
    assert [grad.dtype for grad in grads] == [dtype, *[torch.float32] * 3]
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(net.parameters(), grads, strict=True))
    net.zero_grad()
    manager.attach(net[2].bias, lambda tensor, grad: grad.to(dtype))
    with pytest.raises(RuntimeError, match="with grad_dtype 'Float'"), manager:
        manager.backward(net(x).sum())
    assert {parameter.grad for parameter in net.parameters()} == {None}


def test_a_frozen_parameter_stays_frozen_and_joins_when_it_is_thawed() -> None:
    net, called = nn.Linear(2, 1), []
    net.bias.requires_grad_(False)
    manager = ab.GradManager().attach(net.parameters(), lambda tensor, grad: called.append(tensor is net.bias))
    for frozen in (True, False):
        net.bias.requires_grad_(not frozen)
        with manager:
            manager.backward(net(torch.ones(1, 2)).sum())
        assert net.bias.requires_grad == (not frozen)
        assert (net.bias.grad is None) == frozen
    assert called.count(True) == 1


def test_a_plain_tensor_requires_a_gradient_while_recording_only() -> None:
    x, seen = torch.ones(2), []
    manager = ab.GradManager().attach(x, lambda tensor, grad: seen.append(grad.tolist()))
    for _ in range(2):
        assert not x.requires_grad
        with manager:
            manager.backward((x * 3).sum())
    assert seen == [[3.0, 3.0]] * 2
    assert x.grad.tolist() == [6.0, 6.0]


def test_an_intermediate_that_has_a_gradient_gets_what_its_callbacks_return_added() -> None:
    x = torch.ones(2, requires_grad=True)
    members = [ab.GradManager() for _ in range(3)]
    with members[0] | members[1] | members[2]:
        hidden, other = x * 3, x * 5
        for number, member in enumerate(members):
            member.attach(hidden, lambda tensor, grad: grad * 10).attach(other, lambda tensor, grad: None)
            member.backward((hidden + other).sum())
            assert hidden.grad.tolist() == [10.0 * (number + 1)] * 2
            assert other.grad.tolist() == [number + 1.0] * 2


def test_dropping_a_manager_takes_its_hooks_off_and_release_ends_a_session() -> None:
    x = torch.ones(2, requires_grad=True)
    manager = ab.GradManager().attach(x, lambda tensor, grad: pytest.fail("dropped"))
    x.grad = torch.zeros(2)
    with manager:
        y = x.sum()
    with pytest.raises(RuntimeError, match="not recording"):
        manager.backward(y)
    del manager
    gc.collect()
    assert not x._post_accumulate_grad_hooks
    x.sum().backward()


def test_a_reentrant_checkpoint_that_splits_a_gradient_is_a_clear_error() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    manager = ab.GradManager().attach(layer.parameters(), lambda tensor, grad: None)
    with pytest.raises(RuntimeError, match="use_reentrant=False"), manager:
        manager.backward(checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True).sum())
    with manager:
        y = checkpoint(layer, checkpoint(layer, x, use_reentrant=False), use_reentrant=False)
        manager.backward(y.sum())
    assert layer.weight.grad is not None


def test_dy_is_checked_and_roots_may_be_several() -> None:
    x = torch.ones(2, requires_grad=True)
    manager = ab.GradManager().attach(x)
    with manager:
        manager.backward([x * 2, x * 3, torch.ones(1)], [torch.ones(2), None, None])
    assert x.grad.tolist() == [5.0, 5.0]
    for y, dy in ((x * 2, torch.ones(3)), ([x], [None, None])):
        with pytest.raises(ValueError, match="root"), manager:
            manager.backward(y, dy)


def test_groups_join_in_any_order_and_a_failed_entry_releases_the_others() -> None:
    x = torch.tensor([0.3], requires_grad=True)
    managers = [ab.GradManager().attach(x) for _ in range(3)]
    with managers[0] | (managers[1] | managers[2]):
        y = torch.cos(x)
        for manager in reversed(managers):  # the last has siblings that began before it
            manager.backward(y)
            assert not x.grad.requires_grad
    managers[1].record()
    with pytest.raises(RuntimeError, match="already recording"), managers[0] | managers[1]:
        pass
    managers[0].record()
    managers[0].release()
    managers[1].release()


# Callbacks that return the futures of ``torch.distributed``'s collectives: averages, compression, failures.

WORKERS = 2


def averaged(tensor: torch.Tensor, grad: torch.Tensor) -> torch._C.Future:
    return dist.all_reduce(grad.div_(WORKERS), async_op=True).get_future()


def compressed(tensor: torch.Tensor, grad: torch.Tensor) -> torch._C.Future:
    """As the guide has it: half the bytes on the wire, divided afterwards."""
    work = dist.all_reduce(grad.to(torch.bfloat16), async_op=True)
    return work.get_future().then(lambda future: future.value()[0].to(grad.dtype) / dist.get_world_size())


def failing(tensor: torch.Tensor, grad: torch.Tensor) -> torch._C.Future:
    def fail(future: torch._C.Future) -> torch.Tensor:
        raise ConnectionError("the codec is broken")

    return dist.all_reduce(grad, async_op=True).get_future().then(fail)


def gathered(tensor: torch.Tensor, grad: torch.Tensor) -> torch._C.Future:
    into = [torch.empty_like(grad) for _ in range(WORKERS)]
    return dist.all_gather(into, grad, async_op=True).get_future()


def trained(callback: object) -> list[list[float]]:
    torch.manual_seed(0)
    model, batch = nn.Linear(3, 2), torch.arange(12.0).reshape(4, 3)
    manager = ab.GradManager(timeout=30.0).attach(model.parameters(), callback)
    rank = dist.get_rank() if dist.is_initialized() else None
    with manager:
        manager.backward(model(batch if rank is None else batch[rank::WORKERS]).square().mean())
    return [parameter.grad.flatten().tolist() for parameter in model.parameters()]


def as_worker() -> dict[str, Any]:
    dist.init_process_group("gloo")
    results: dict[str, Any] = {"averaged": trained(averaged), "compressed": trained(compressed)}
    for callback in (failing, gathered):
        with pytest.raises((RuntimeError, ConnectionError, TypeError)) as caught:
            trained(callback)
        results[callback.__name__] = f"{caught.typename}: {caught.value}"
    return results | {"after": trained(averaged)}


def test_a_collectives_future_is_a_callbacks_answer() -> None:
    whole = [torch.tensor(values) for values in trained(lambda tensor, grad: None)]
    for found in in_job(as_worker, WORKERS):
        for mean, rounded, again, wanted in zip(
            found["averaged"], found["compressed"], found["after"], whole, strict=True
        ):
            torch.testing.assert_close(torch.tensor(mean), wanted)
            torch.testing.assert_close(torch.tensor(again), wanted)
            torch.testing.assert_close(torch.tensor(rounded), wanted, rtol=2**-6, atol=1e-3)
        assert found["compressed"] != found["averaged"]
        assert "the codec is broken" in found["failing"]
        assert found["gathered"].startswith("TypeError: a callback's future returns a tensor, or a list of one")
