"""``map_with_parallel_backward``: calls of an ``autograd.Function`` that run at once, forward and backward.

torch's engine runs one backward after another on a CPU thread, so the calls of a mixture's experts would wait for each
other's answers. Here every call has its own graph, and one node joins them::

    x0 ─┐          ┌─ leaf ──> func ──> out ─┐
        ├─ _Join ──┤                         ├──> outputs      forward: all calls, then the node
    x1 ─┘          └─ leaf ──> func ──> out ─┘                 backward: the node, which runs all calls

As it is one node, nothing before or after it starts until all calls have ended.

The threads are started and joined by one function call. A pool of threads that were kept would have to be owned by
somebody, and calls that wait for calls of the same pool would deadlock. Starting a thread costs tens of microseconds;
what is worth running at once costs milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from anabranch.autodiff.boundary.crossing import current_answers, replay_from
from anabranch.autodiff.isolated import IsolatedCall, check_function, isolate
from anabranch.autodiff.thread_modes import ThreadModes, current_streams, on_streams

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
    has no backward. Second derivatives are refused.

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
    if max_workers is not None and max_workers < 1:
        raise ValueError(f"max_workers is at least 1, got {max_workers}")
    for index, args in enumerate(args_per_call):
        if not isinstance(args, tuple | list):
            raise TypeError(f"call {index} must be a tuple of its arguments, got {type(args).__name__}")
    if len(set(counts := list(map(len, args_per_call)))) > 1:
        raise ValueError(f"all calls must have the same number of arguments, got {counts}")
    recorded, name = torch.is_grad_enabled(), func.__name__
    returned = run_at_once(
        [partial(_forward, func, args) if recorded else partial(func.apply, *args) for args in args_per_call],
        max_workers=max_workers,
        describe=lambda index: f"in forward of call {index} of {len(args_per_call)} of {name}",
    )
    if not recorded:
        return tuple(map(_as_tuple, returned))
    calls, outputs = [call for call, _ in returned], [outputs for _, outputs in returned]
    if not any(out is not None for call in calls for out in call.outputs):
        return tuple(outputs)
    inputs = [args[place] for call, args in zip(calls, args_per_call, strict=True) for place in call.places]
    joined = iter(_Join.apply(calls, max_workers, name, *inputs))  # type: ignore[no-untyped-call]
    return tuple(
        tuple(out if live is None else next(joined) for out, live in zip(outs, call.outputs, strict=True))
        for outs, call in zip(outputs, calls, strict=True)
    )


def _as_tuple(returned: object) -> tuple[Tensor, ...]:
    return returned if isinstance(returned, tuple) else (returned,)


def _forward(func: type[Function], args: Sequence[object]) -> tuple[IsolatedCall, tuple[Tensor, ...]]:
    call, returned = isolate(func, args, [isinstance(arg, Tensor) and arg.requires_grad for arg in args])
    return call, _as_tuple(returned)


class _Join(Function):
    """The node that joins the calls to the graph around them."""

    @staticmethod
    def forward(
        ctx: Any, calls: list[IsolatedCall], max_workers: int | None, name: str, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.calls, ctx.max_workers, ctx.name = calls, max_workers, name
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return tuple(out.detach() for call in calls for out in call.outputs if out is not None)

    @staticmethod
    def backward(ctx: Any, *flat: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # an error if the graph has been freed
        if torch.is_grad_enabled():
            what = f"the gradients of {ctx.name} through map_with_parallel_backward cannot be differentiated again"
            raise RuntimeError(f"{what}; call {ctx.name}.apply where you need second derivatives")
        calls, retain = ctx.calls, torch._C._autograd._get_current_graph_task_keep_graph()
        if not retain:
            ctx.calls = None
        remaining = iter(flat)
        gradients = [[None if out is None else next(remaining) for out in call.outputs] for call in calls]
        used = [index for index, grads in enumerate(gradients) if any(grad is not None for grad in grads)]
        ran = run_at_once(
            [partial(calls[index].backward, gradients[index], retain=retain) for index in used],
            max_workers=ctx.max_workers,
            describe=lambda position: f"in backward of call {used[position]} of {len(calls)} of {ctx.name}",
        )
        by_index = dict(zip(used, ran, strict=True))
        unused = ([None] * len(call.leaves) for call in calls)
        leaves = (by_index.get(index, nothing) for index, nothing in enumerate(unused))
        return None, None, None, *chain.from_iterable(leaves)


def run_at_once(
    calls: Sequence[Callable[[], _Result]], *, max_workers: int | None, describe: Callable[[int], str]
) -> list[_Result]:
    """Return the calls' results, in order.

    Args:
        calls: run with the calling thread's modes.
        max_workers: the most to run at once; all by default.
        describe: what to note on an error of the call of that index.

    Raises:
        BaseException: the first that a call raised, once no call is running any more; calls not yet begun are not.
    """
    modes, streams, answers = ThreadModes.take(), current_streams(), current_answers()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    results: list[_Result | None] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        saving = saved_tensors_hooks(*hooks) if hooks else nullcontext()
        try:
            with modes.entered(), on_streams(streams), replay_from(answers), saving:
                if not errors:
                    results[index] = calls[index]()
        except BaseException as error:  # noqa: BLE001 - raised on the caller's thread
            error.add_note(describe(index))
            errors.append(error)

    with ThreadPoolExecutor(max(1, min(max_workers or len(calls), len(calls))), "anabranch-call") as pool:
        try:
            wait([pool.submit(run, index) for index in range(len(calls))])
        except BaseException as error:  # noqa: BLE001 - an interrupt, or no thread could be started; raised below
            errors.append(error)
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # an error holds this frame, which must not hold it
    return cast("list[_Result]", results)
