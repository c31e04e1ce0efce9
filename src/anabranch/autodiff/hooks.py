"""Every hook that the package sets on a user's tensors or modules; no other file registers one.

A leaf's gradient passes three places::

    ... ──> (1) ──> AccumulateGrad ──> .grad ──> (3)
                          (2)

At (1), a tensor hook, it is the engine's own buffer, which two tensors may share. At (2) torch steals the buffer, or
copies one that is shared or laid out unlike the leaf. So ``watch_leaf`` takes it at (3), out of ``.grad``, at no cost
beyond torch's own, and puts back at once what ``.grad`` held before; only where it held something must that be set
aside at (1), or (2) would add to it. Results of operations have (1) alone.

Hooks are set once and stay from step to step; outside a sweep of their own they do nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

__all__ = ["GradientSink", "Sweep", "record_outputs", "set_grad_aside", "watch_leaf", "watch_result"]


class Sweep:
    """Whether a session's own sweep is running; one object, shared by all of the session's hooks."""

    __slots__ = ("running",)

    def __init__(self) -> None:
        self.running = False


class GradientSink(Protocol):
    """Who takes a final gradient."""

    set_aside: Tensor | None
    """What the leaf's ``.grad`` held when its gradient arrived."""

    def take(self, tensor: Tensor | None, grad: Tensor) -> None:
        """Called once in a sweep, with the tensor (``None`` if it has been dropped) and its final gradient."""


def watch_leaf(tensor: Tensor, sink: GradientSink, sweep: Sweep) -> RemovableHandle:
    """Gives ``sink`` the leaf's final gradient at (3), and leaves ``.grad`` as it was."""

    def take(leaf: Tensor) -> None:
        if sweep.running:
            grad = leaf.grad
            leaf.grad = sink.set_aside
            if grad is not None:
                sink.take(leaf, grad)

    handle: RemovableHandle = tensor.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    return handle


def set_grad_aside(tensor: Tensor, sink: GradientSink, sweep: Sweep) -> RemovableHandle:
    """Keeps what a watched leaf's ``.grad`` holds out of the accumulation, at (1)."""
    watched = weakref.ref(tensor)

    def put(grad: Tensor | None) -> None:
        if grad is not None and sweep.running and (leaf := watched()) is not None:
            sink.set_aside = leaf.grad
            leaf.grad = None

    handle: RemovableHandle = tensor.register_hook(put)  # type: ignore[no-untyped-call]
    return handle


def watch_result(tensor: Tensor, sink: GradientSink, sweep: Sweep) -> RemovableHandle:
    """Gives ``sink`` the final gradient of a tensor that an operation made, at (1)."""
    watched = weakref.ref(tensor)

    def take(grad: Tensor | None) -> None:
        # The engine calls with None for a result of which only a sibling (another chunk) was used.
        if grad is not None and sweep.running:
            sink.take(watched(), grad)

    handle: RemovableHandle = tensor.register_hook(take)  # type: ignore[no-untyped-call]
    return handle


@contextmanager
def record_outputs(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, object]]:
    """Keeps, under each module's name, what its forward last returned while the block runs."""
    outputs: dict[str, object] = {}
    handles: list[RemovableHandle] = []

    def keep(name: str, module: nn.Module) -> None:
        def record(_module: nn.Module, _args: object, output: object) -> None:
            outputs[name] = output

        handles.append(module.register_forward_hook(record))

    try:
        for name, module in modules.items():
            keep(name, module)
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
