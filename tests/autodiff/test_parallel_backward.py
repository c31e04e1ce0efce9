"""map_with_parallel_backward: concurrency, order, modes, errors and memory, against plain ``apply`` one by one."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import anabranch as ab

WAIT = 30.0


class OldStyle(Function):
    """x * y and x + y; a number among the arguments."""

    @staticmethod
    def forward(ctx, x, scale, y):
        ctx.save_for_backward(x, y)
        ctx.scale = scale
        return x * y * scale, x + y

    @staticmethod
    def backward(ctx, grad_product, grad_sum):
        x, y = ctx.saved_tensors
        return grad_product * y * ctx.scale + grad_sum, None, grad_product * x * ctx.scale + grad_sum


class WithSetupContext(Function):
    @staticmethod
    def forward(x, scale, y):
        return x * y * scale, x + y

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, scale, y = inputs
        ctx.save_for_backward(x, y)
        ctx.scale = scale

    backward = OldStyle.backward


class Bare(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.cos(x)


def arguments() -> list[tuple[torch.Tensor, float, torch.Tensor]]:
    torch.manual_seed(3)
    return [
        (torch.randn(4, requires_grad=True), float(index), torch.randn(4, requires_grad=index != 1))
        for index in range(3)
    ]


@pytest.mark.parametrize("func", [OldStyle, WithSetupContext])
@pytest.mark.parametrize("max_workers", [None, 1, 2])
def test_outputs_and_gradients_equal_calls_one_by_one(func, max_workers) -> None:
    calls, plain = arguments(), arguments()
    outputs = ab.map_with_parallel_backward(func, *calls, max_workers=max_workers)
    expected = [func.apply(*args) for args in plain]
    loss = sum((a * (index + 1)).sum() + (b * 5).sum() for index, (a, b) in enumerate(outputs))
    loss.backward()
    sum((a * (index + 1)).sum() + (b * 5).sum() for index, (a, b) in enumerate(expected)).backward()
    for got, want in zip(outputs, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for (x, _, y), (plain_x, _, plain_y) in zip(calls, plain, strict=True):
        assert torch.equal(x.grad, plain_x.grad)
        assert (y.grad is None) == (plain_y.grad is None)
        assert y.grad is None or torch.equal(y.grad, plain_y.grad)


def test_a_bare_tensor_is_one_output_and_is_not_split() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    ((first,), (second,)) = ab.map_with_parallel_backward(Bare, (x,), (x,))
    assert first.shape == second.shape == (3, 2)
    (first + 2 * second).sum().backward()
    assert torch.allclose(x.grad, 3 * torch.cos(x.detach()))


def test_no_calls_give_no_outputs() -> None:
    assert ab.map_with_parallel_backward(Bare) == ()


def made(forward: Any = lambda ctx, x: x * 1, backward: Any = lambda ctx, grad: grad, name: str = "Made") -> Any:
    """A Function of these two."""
    return type(name, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


def test_all_forwards_run_at_once_and_all_backwards_run_at_once() -> None:
    """Each call waits for all others: one at a time they would break."""
    there, back = threading.Barrier(5, timeout=WAIT), threading.Barrier(5, timeout=WAIT)
    func = made(lambda ctx, x: (there.wait(), x * 2)[1], lambda ctx, grad: (back.wait(), grad * 2)[1])
    xs = [torch.ones(2, requires_grad=True) for _ in range(5)]
    outputs = ab.map_with_parallel_backward(func, *[(x,) for x in xs])
    sum(out.sum() for (out,) in outputs).backward()
    assert all(x.grad.tolist() == [2.0, 2.0] for x in xs)


def test_nothing_downstream_starts_before_all_calls_have_ended() -> None:
    log: list[str] = []
    first_done = threading.Event()

    def forward(ctx, x, index):
        ctx.index = index
        return x * 1

    def backward(ctx, grad):
        assert ctx.index == 0 or first_done.wait(timeout=WAIT)
        log.append(f"call {ctx.index}")
        first_done.set()
        return grad, None

    downstream = made(backward=lambda ctx, grad: log.append("downstream") or grad)
    x = torch.ones(1, requires_grad=True)
    (a,), (b,) = ab.map_with_parallel_backward(made(forward, backward), *[(downstream.apply(x), i) for i in range(2)])
    (a + b).sum().backward()
    assert log == ["call 0", "call 1", "downstream", "downstream"]


@pytest.mark.parametrize("materialize", [True, False])
def test_an_unused_output_of_a_used_call_is_zeros_or_none_and_an_unused_call_has_no_backward(materialize) -> None:
    log: list = []

    def forward(ctx, x, index):
        ctx.index = index
        ctx.set_materialize_grads(materialize)
        return x * 1, x * 2

    def backward(ctx, *grads):
        log.append((ctx.index, *(grad if grad is None else grad.tolist() for grad in grads)))
        return torch.ones(1), None

    x = torch.ones(1, requires_grad=True)
    outputs = ab.map_with_parallel_backward(made(forward, backward), (x, 0), (x, 1))
    outputs[1][1].sum().backward()
    assert log == [(1, [0.0] if materialize else None, [1.0])]


def test_needs_input_grad_reaches_the_function() -> None:
    seen: list = []

    func = made(
        lambda ctx, x, y, number: (seen.append(ctx.needs_input_grad), x + y)[1],
        lambda ctx, grad: (seen.append(ctx.needs_input_grad), (grad, None, None))[1],
    )
    x, y = torch.ones(1, requires_grad=True), torch.ones(1)
    ((out,),) = ab.map_with_parallel_backward(func, (x, y, 3))
    out.backward()
    assert seen == [(True, False, False)] * 2


def test_integer_outputs_once_differentiable_and_none_gradients_work() -> None:
    class Odd(Function):
        @staticmethod
        def forward(ctx, x, y):
            indices = x.argsort()
            ctx.mark_non_differentiable(indices)
            return x * 2, indices, None

        @staticmethod
        @once_differentiable
        def backward(ctx, grad, *_):
            return grad * 2, None

    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    ((out, indices, nothing),) = ab.map_with_parallel_backward(Odd, (x, y))
    assert indices.dtype == torch.int64
    assert not indices.requires_grad
    assert nothing is None
    out.sum().backward(inputs=[x, y])
    assert x.grad.tolist() == [2.0] * 3
    assert y.grad is None


def test_second_derivatives_are_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    ((out,),) = ab.map_with_parallel_backward(Bare, (x,))
    with pytest.raises(RuntimeError, match=r"gradients of Bare .* cannot be differentiated again"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_backward_twice_with_retain_graph_works_and_without_it_is_torchs_error() -> None:
    x = torch.ones(2, requires_grad=True)
    (a,), (b,) = ab.map_with_parallel_backward(Bare, (x,), (x,))
    loss = (a + b).sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_contexts_are_freed_after_backward_while_the_outputs_are_held() -> None:
    def forward(ctx, x):
        ctx.kept = torch.zeros(3)
        alive.append(weakref.ref(ctx.kept))
        return x * 1

    alive: list = []
    x = torch.ones(2, requires_grad=True)
    outputs = ab.map_with_parallel_backward(made(forward), (x,), (x,))
    assert all(reference() is not None for reference in alive)
    sum(out.sum() for (out,) in outputs).backward()
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    assert outputs


def test_modes_of_the_caller_reach_the_calls() -> None:
    seen: list = []
    both = threading.Barrier(2)

    def forward(ctx, x):
        both.wait(timeout=WAIT)  # one of the two is on another thread
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        seen.append((autocast, torch.is_inference_mode_enabled(), torch.get_default_device().type))
        return x @ x

    func = made(forward)
    x = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = ab.map_with_parallel_backward(func, (x,), (x,))
    assert [out.dtype for (out,) in outputs] == [torch.bfloat16] * 2
    with torch.no_grad():
        outputs = ab.map_with_parallel_backward(func, (x,), (x,))
    assert not any(out.requires_grad for (out,) in outputs)
    with torch.inference_mode(), torch.device("meta"):
        outputs = ab.map_with_parallel_backward(func, (x,), (x,))
    assert all(out.is_inference() for (out,) in outputs)
    modes = [(torch.bfloat16, False, "cpu"), (None, False, "cpu"), (None, True, "meta")]
    assert seen == [mode for mode in modes for _ in range(2)]


def failing(phase: str, bad: int, stopped: list[int]) -> type[Function]:
    """Call ``bad`` raises; the others end after it has."""
    raised, begun = threading.Event(), threading.Barrier(3)

    def act(here: str, index: int) -> None:
        if here != phase:
            return
        begun.wait(timeout=WAIT)
        if index == bad:
            raised.set()
            raise KeyError("mine")
        assert raised.wait(timeout=WAIT)
        stopped.append(index)

    def forward(ctx, x, index):
        ctx.index = index
        act("forward", index)
        return x * 1

    return made(forward, lambda ctx, grad: (act("backward", ctx.index), (grad, None))[1], "Fails")


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("bad", [0, 2])
def test_the_first_error_has_its_call_s_index_and_is_raised_after_the_others_have_stopped(phase: str, bad: int) -> None:
    stopped: list[int] = []
    func = failing(phase, bad, stopped)
    x = torch.ones(1, requires_grad=True)
    threads = threading.active_count()
    with pytest.raises(KeyError, match="mine") as caught:
        sum(out.sum() for (out,) in ab.map_with_parallel_backward(func, (x, 0), (x, 1), (x, 2))).backward()
    assert caught.value.__notes__ == [f"in {phase} of call {bad} of 3 of Fails"]
    assert sorted(stopped) == [index for index in range(3) if index != bad]
    assert threading.active_count() == threads
    assert x.grad is None


def test_nested_maps_do_not_deadlock() -> None:
    class Nested(Function):
        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            if depth:
                with torch.no_grad():
                    (a,), (b,) = ab.map_with_parallel_backward(Nested, (x, depth - 1), (x, depth - 1), max_workers=2)
                return a + b
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            if not ctx.depth:
                return grad, None
            x = torch.zeros_like(grad, requires_grad=True)
            with torch.enable_grad():
                (a,), (b,) = ab.map_with_parallel_backward(Nested, (x, ctx.depth - 1), (x, ctx.depth - 1))
                (result,) = torch.autograd.grad((a + b), x, grad)
            return result, None

    x = torch.ones(2, requires_grad=True)
    (a,), (b,) = ab.map_with_parallel_backward(Nested, (x, 3), (x, 3), max_workers=2)
    (a + b).sum().backward()
    assert a.tolist() == [8.0, 8.0]
    assert x.grad.tolist() == [16.0, 16.0]


def test_misuse_is_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        ab.map_with_parallel_backward(Bare, (x,), (x, x))
    with pytest.raises(TypeError, match=r"call 1 .* Tensor"):
        ab.map_with_parallel_backward(Bare, (x,), x)
    for call in (ab.map_with_parallel_backward, ab.run_isolated_forward):
        with pytest.raises(TypeError, match=r"a subclass of torch\.autograd\.Function, got <built-in"):
            call(torch.sin, (x,))
    with pytest.raises(ValueError, match="max_workers"):
        ab.map_with_parallel_backward(Bare, (x,), max_workers=0)


def test_a_function_that_changes_its_argument_is_refused() -> None:
    class InPlace(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.mark_dirty(y)
            y.add_(1)
            return x * 1, y

        @staticmethod
        def backward(ctx, grad, _):
            return grad, None

    with pytest.raises(RuntimeError, match="InPlace changes an argument in place"):
        ab.map_with_parallel_backward(InPlace, (torch.ones(1, requires_grad=True), torch.ones(1)))


@pytest.mark.parametrize("func", [OldStyle, WithSetupContext])
def test_the_isolated_pair_runs_outside_the_graph_around_it(func) -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    ctx, (product, total) = ab.run_isolated_forward(func, x, 2.0, y)
    assert not product.requires_grad
    assert not total.requires_grad
    assert torch.equal(ctx.saved_tensors[1], y)
    dx, dscale, dy = ab.run_isolated_backward(func, ctx, torch.ones(3), None)
    assert torch.equal(dx, 2.0 * y)
    assert dscale is None
    assert dy is None
    assert x.grad is None
    with pytest.raises(ValueError, match="2 outputs, got 1"):
        ab.run_isolated_backward(func, ctx, torch.ones(3))
