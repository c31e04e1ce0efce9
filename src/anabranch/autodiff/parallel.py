"""``map_with_parallel_backward``: calls of an ``autograd.Function`` that run at once, forward and backward.

torch's engine runs one backward after another on a CPU thread, so the calls of a mixture's experts would wait for each
other's answers. Here every call has its own graph, and one node joins them::

    x0 ─┐          ┌─ leaf ──> func ──> out ─┐
        ├─ _Join ──┤                         ├──> outputs      forward: all calls, then the node
    x1 ─┘          └─ leaf ──> func ──> out ─┘                 backward: the node, which runs all calls

As it is one node, nothing before or after it starts until all calls have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from anabranch.autodiff.call_threads import run_at_once
from anabranch.autodiff.isolated import IsolatedCall, check_function, isolate

_Result = TypeVar("_Result")


def map_with_parallel_backward(
    func: type[Function], *args_per_call: Sequence[object], max_workers: int | None = None
) -> tuple[tuple[Tensor, ...], ...]:
    """Apply ``func`` to several sets of arguments, all at once, in forward and in backward.

    >>> class Double(Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return x * 2
    ...     @staticmethod
    ...     def backward(ctx, grad):
    ...         return grad * 2
    >>> x = torch.ones(2, requires_grad=True)
    >>> (a,), (b,) = map_with_parallel_backward(Double, (x,), (x * 3,))
    >>> (a + b).sum().backward()
    >>> x.grad
    tensor([8., 8.])

    Whatever depends on one call waits for all of them. The calls run with the caller's grad mode, autocast and CUDA
    stream, on threads that are gone when this returns, and so do their backwards. A call none of whose outputs is used
    has no backward. Derivatives of any order, as far as the Function's backward has them.

    Args:
        func: the Function's class. It must not change its arguments in place; on CPU random numbers come from the
            process's one generator, in no particular order.
        args_per_call: for each call its arguments, tensors or not, equally many for all.
        max_workers: the most calls to run at once; all by default.

    Returns:
        For each call the tuple of its outputs; a Function that returns a bare tensor has one output.

    Raises:
        ValueError: calls with unequal numbers of arguments, or ``max_workers`` below 1.
        TypeError: ``func`` is not an ``autograd.Function`` class, or a call's arguments not a sequence, such as a bare
            tensor.
        BaseException: the first that a call raised, after the others have stopped; a note names the call's index.

    Source: ``map_with_parallel_backward`` of hivemind.
    """
    check_function(func)
    _check(args_per_call, max_workers)
    recorded, name = torch.is_grad_enabled(), func.__name__
    returned = run_at_once(
        [partial(_forward, func, args) if recorded else partial(func.apply, *args) for args in args_per_call],
        max_workers=max_workers,
        describe=lambda index: f"in forward of call {index} of {len(args_per_call)} of {name}",
    )
    if not recorded:
        return tuple(_as_tuple(outputs) for outputs in returned)
    calls = [call for call, _ in returned]
    inputs = [args[place] for call, args in zip(calls, args_per_call, strict=True) for place in call.places]
    return _join(_Calls(calls, max_workers, name), [outputs for _, outputs in returned], inputs)


def _check(args_per_call: Sequence[Sequence[object]], max_workers: int | None) -> None:
    if max_workers is not None and max_workers < 1:
        raise ValueError(f"max_workers is at least 1, got {max_workers}")
    for index, args in enumerate(args_per_call):
        if not isinstance(args, tuple | list):
            raise TypeError(f"call {index} must be a tuple of its arguments, got {type(args).__name__}")
    counts = [len(args) for args in args_per_call]
    if len(set(counts)) > 1:
        raise ValueError(f"all calls must have the same number of arguments, got {counts}")


def _as_tuple(returned: object) -> tuple[Tensor, ...]:
    return returned if isinstance(returned, tuple) else (returned,)


def _forward(func: type[Function], args: Sequence[object]) -> tuple[IsolatedCall, tuple[Tensor, ...]]:
    call, returned = isolate(func, args, [isinstance(arg, Tensor) and arg.requires_grad for arg in args])
    return call, _as_tuple(returned)


class _Calls:
    """The calls behind one node of the outer graph."""

    def __init__(self, calls: list[IsolatedCall], max_workers: int | None, name: str) -> None:
        self.calls = calls
        self.max_workers = max_workers
        self.name = name

    def split(self, flat: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
        """Gradients of the outputs that have one, flat over all calls, as one list an output a call."""
        remaining = iter(flat)
        return [[None if out is None else next(remaining) for out in call.outputs] for call in self.calls]

    def backward(self, gradients: list[list[Tensor | None]], retain: bool) -> list[Tensor | None]:
        """Return the gradients of all leaves of all calls."""

        def one(call: IsolatedCall, grads: list[Tensor | None]) -> list[Tensor | None]:
            return call.backward(grads, retain=retain)

        return [leaf for leaves in self._run(one, gradients) for leaf in leaves]

    def differentiable_backward(
        self, gradients: list[list[Tensor | None]], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return the same as a function of the inputs and gradients: their backward is again calls behind one node."""

        def one(call: IsolatedCall, grads: list[Tensor | None]) -> tuple[IsolatedCall, list[Tensor | None]]:
            starts = [None if grad is None else grad.detach().requires_grad_() for grad in grads]
            found = call.backward(starts, create=True)
            leaves = [*call.leaves, *(start for start in starts if start is not None)]
            return IsolatedCall(leaves, found, (), 0), found

        pairs = self._run(one, gradients)
        remaining = iter(inputs)
        reals: list[object] = []
        for call, grads in zip(self.calls, gradients, strict=True):
            reals += [next(remaining) for _ in call.leaves]
            reals += [grad for grad in grads if grad is not None]
        joined = _Calls([call for call, _ in pairs], self.max_workers, f"backward of {self.name}")
        found = _join(joined, [tuple(outputs) for _, outputs in pairs], reals)
        return [gradient for outputs in found for gradient in outputs]

    def _run(
        self, one: Callable[[IsolatedCall, list[Tensor | None]], _Result], gradients: list[list[Tensor | None]]
    ) -> list[_Result]:
        used = [index for index, grads in enumerate(gradients) if any(grad is not None for grad in grads)]
        results = run_at_once(
            [partial(one, self.calls[index], gradients[index]) for index in used],
            max_workers=self.max_workers,
            describe=lambda position: f"in backward of call {used[position]} of {len(self.calls)} of {self.name}",
        )
        by_index = dict(zip(used, results, strict=True))
        # For a call that is not used this runs nothing.
        return [
            by_index[index] if index in by_index else one(call, gradients[index])
            for index, call in enumerate(self.calls)
        ]


class _Join(Function):
    """The node of the outer graph; its inputs are the leaves' originals, its outputs those that have a gradient."""

    @staticmethod
    def forward(ctx: _JoinContext, calls: _Calls, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.calls = calls
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return tuple(out.detach() for call in calls.calls for out in call.outputs if out is not None)

    @staticmethod
    def backward(ctx: _JoinContext, *flat: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors  # an error if the graph has been freed
        calls = ctx.calls
        assert calls is not None
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        if not retain:
            ctx.calls = None
        gradients = calls.split(flat)
        if torch.is_grad_enabled():
            return None, *calls.differentiable_backward(gradients, inputs)
        return None, *calls.backward(gradients, retain)


class _JoinContext(FunctionCtx):
    calls: _Calls | None
    saved_tensors: tuple[Tensor, ...]


def _join(
    calls: _Calls, outputs: Sequence[tuple[Tensor | None, ...]], inputs: Sequence[object]
) -> tuple[tuple[Tensor, ...], ...]:
    """Return the outputs of all calls, those that have a gradient connected to ``inputs`` through one node."""
    if not any(out is not None for call in calls.calls for out in call.outputs):
        return cast(tuple[tuple[Tensor, ...], ...], tuple(outputs))
    joined = iter(_Join.apply(calls, *inputs))  # type: ignore[no-untyped-call]
    return tuple(
        tuple(out if live is None else next(joined) for out, live in zip(outs, call.outputs, strict=True))  # type: ignore[misc]
        for outs, call in zip(outputs, calls.calls, strict=True)
    )
