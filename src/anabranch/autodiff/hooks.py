"""Every hook that the package sets on a user's tensors or modules; no other file registers one.

A gradient can be taken at two places::

    ... ──> grad_fn ──(1)──> AccumulateGrad ──(2)──> .grad
                  a tensor hook             a post-accumulate hook

(1) sees the engine's own buffer, which two tensors may share; (2) sees it after torch has stolen or, where it is
shared, copied it, with the layout of the parameter, and can take it out of ``.grad`` again without another copy. So
leaves are watched at (2), with ``.grad`` set aside for the sweep, and results of operations at (1).

Hooks are set once and stay; each asks whether a sweep of its own is running. They hold what they call weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

__all__ = ["GradientSink", "record_outputs", "watch_leaf", "watch_result"]


class GradientSink(Protocol):
    """Who takes a final gradient."""

    def take(self, tensor: Tensor | None, grad: Tensor) -> None:
        """Called once in a sweep, with the tensor (``None`` if it has been dropped) and its final gradient."""

    @property
    def sweeping(self) -> bool:
        """Whether a sweep of this sink's own is running."""

    @property
    def set_aside(self) -> Tensor | None:
        """What the leaf's ``.grad`` was before the sweep."""


def watch_leaf(tensor: Tensor, sink: GradientSink) -> RemovableHandle:
    """Gives ``sink`` the leaf's gradient once it is final, and leaves ``.grad`` as it was."""
    reference = weakref.ref(sink)

    def take(leaf: Tensor) -> None:
        target = reference()
        if target is None or not target.sweeping:
            return
        grad = leaf.grad
        leaf.grad = target.set_aside
        if grad is not None:
            target.take(leaf, grad)

    handle: RemovableHandle = tensor.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    return handle


def watch_result(tensor: Tensor, sink: GradientSink) -> RemovableHandle:
    """Gives ``sink`` the final gradient of a tensor that an operation made."""
    reference = weakref.ref(sink)
    watched = weakref.ref(tensor)

    def take(grad: Tensor | None) -> None:
        target = reference()
        # The engine calls with None for a result of which only a sibling (another chunk) was used.
        if grad is not None and target is not None and target.sweeping:
            target.take(watched(), grad)

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
