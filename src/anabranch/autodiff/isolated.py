"""One call of an ``autograd.Function`` with its own graph, cut off from the graph around it.

::

    x ┄┄ detached ┄┄> leaf ──> func ──> out ┄┄ detached ┄┄> the caller's

The Function runs through torch's own ``apply``, so whatever a Function may do, old style or ``setup_context``, works;
its backward is ``torch.autograd.grad`` from ``out`` to the leaves, which any thread may run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.autograd import Function


class IsolatedCall:
    """A call's own graph, from its leaves to its outputs; also reads as the Function's own ``ctx``.

    Attributes:
        leaves: what gradients flow back to.
        places: which of the ``arity`` arguments they are.
        outputs: what they start from: tensors on this graph, ``None`` for outputs that have no gradient.
    """

    def __init__(self, leaves: Sequence[Tensor], outputs: Sequence[object], places: Sequence[int], arity: int) -> None:
        self.leaves = list(leaves)
        self.places = list(places)
        self.arity = arity
        self.outputs = [out if isinstance(out, Tensor) and out.requires_grad else None for out in outputs]

    def __getattr__(self, name: str) -> object:
        for out in self.__dict__.get("outputs", ()):
            if out is not None:
                return getattr(out.grad_fn, name)
        raise AttributeError(f"the isolated call has no context because no output has a gradient: there is no {name!r}")

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool = False) -> list[Tensor | None]:
        """Return the leaves' gradients; ``None`` among ``gradients`` is an output that was not used."""
        both = zip(self.outputs, gradients, strict=True)
        pairs = [(out, grad) for out, grad in both if out is not None and grad is not None]
        if not pairs or not self.leaves:
            return [None] * len(self.leaves)
        roots, starts = zip(*pairs, strict=True)
        # On this thread alone: torch's device thread may be the very one that waits for this call.
        with torch.autograd.set_multithreading_enabled(False):
            return list(torch.autograd.grad(roots, self.leaves, starts, retain_graph=retain, allow_unused=True))


def isolate(func: type[Function], args: Sequence[object], wants: Sequence[bool]) -> tuple[IsolatedCall, object]:
    """Run the Function on ``args``, of which some want gradients; return its graph and its outputs.

    Raises:
        RuntimeError: the Function changes an argument in place.
    """
    pairs = zip(args, wants, strict=True)
    arguments = [cast(Tensor, arg).detach().requires_grad_() if want else arg for arg, want in pairs]
    places = [index for index, want in enumerate(wants) if want]
    leaves = [cast(Tensor, arguments[place]) for place in places]
    versions = [_version(arg) for arg in arguments]
    with torch.enable_grad():
        returned = func.apply(*arguments)  # type: ignore[no-untyped-call]
    if versions != [_version(arg) for arg in arguments]:
        why = "which a call with its own graph cannot pass on; let it return a new tensor"
        raise RuntimeError(f"{func.__name__} changes an argument in place (mark_dirty), {why}")
    outputs = returned if isinstance(returned, tuple) else (returned,)
    return IsolatedCall(leaves, outputs, places, len(args)), returned


def check_function(func: object) -> None:
    """Raise ``TypeError`` unless ``func`` is the class of an ``autograd.Function``."""
    if not (isinstance(func, type) and issubclass(func, Function)):
        raise TypeError(f"func must be a subclass of torch.autograd.Function, got {func!r}")


def _version(arg: object) -> int | None:
    return arg._version if isinstance(arg, Tensor) and not arg.is_inference() else None


def run_isolated_forward(func: type[Function], *args: object) -> tuple[IsolatedCall, object]:
    """Run an ``autograd.Function`` outside the graph around it.

    >>> class Square(Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         ctx.save_for_backward(x)
    ...         return x * x
    ...     @staticmethod
    ...     def backward(ctx, grad):
    ...         return 2 * ctx.saved_tensors[0] * grad
    >>> ctx, y = run_isolated_forward(Square, torch.tensor(3.0))
    >>> y
    tensor(9.)
    >>> run_isolated_backward(Square, ctx, torch.tensor(1.0))
    (tensor(6.),)

    Args:
        func: the Function's class.
        args: its arguments. Those that require a gradient will have one; if none does, all floating tensors will.

    Returns:
        What ``run_isolated_backward`` needs, through which the Function's own ``ctx`` reads, and the outputs as the
        Function returns them, not connected to any graph.

    Raises:
        RuntimeError: the Function changes an argument in place.
    """
    check_function(func)
    wants = [isinstance(arg, Tensor) and arg.requires_grad for arg in args]
    if not any(wants):
        wants = [isinstance(arg, Tensor) and (arg.is_floating_point() or arg.is_complex()) for arg in args]
    call, returned = isolate(func, args, wants)
    several = returned if isinstance(returned, tuple) else (returned,)
    cut = tuple(out.detach() if isinstance(out, Tensor) else out for out in several)
    return call, cut if isinstance(returned, tuple) else cut[0]


def run_isolated_backward(
    func: type[Function], ctx: IsolatedCall, *grad_outputs: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments of a call made by ``run_isolated_forward``, for gradients of its outputs.

    Args:
        func: the Function's class, as given to the forward.
        ctx: what the forward returned; dropping it frees what was saved, until then it may be used again.
        grad_outputs: one an output, ``None`` for one that was not used.

    Returns:
        One an argument, ``None`` for those that have no gradient.

    Raises:
        ValueError: another number of gradients than outputs.
    """
    if len(grad_outputs) != len(ctx.outputs):
        raise ValueError(f"{func.__name__} returned {len(ctx.outputs)} outputs, got {len(grad_outputs)} gradients")
    gradients: list[Tensor | None] = [None] * ctx.arity
    for place, gradient in zip(ctx.places, ctx.backward(grad_outputs, retain=True), strict=True):
        gradients[place] = gradient
    return tuple(gradients)
