"""``GradManager``: a training loop's gradients, each handed to callbacks the moment it is final.

::

    attach ──> record ──> forward ──> backward ┌ sweep: grad final ─> callback ─> callback ─┐ ──> .grad
                                               └ ............ grad final ─> callback ─> ... ┘ afterwards

During the sweep nothing is written to ``.grad``: a callback may return a future (an all-reduce under way), so what a
parameter gets is known only afterwards. The engine itself is torch's, unchanged: with no callback attached
``backward`` is ``torch.autograd.backward``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self, TypeAlias, cast

import torch
from torch import Tensor

from anabranch.autodiff import sessions
from anabranch.autodiff.futures import GradientFuture, is_future, result_of
from anabranch.autodiff.hooks import watch_leaf, watch_result
from anabranch.autodiff.roots import check_differentiable, roots_on_tape, sweep
from anabranch.deadline import Deadline

__all__ = ["Callback", "GradManager", "GradManagerGroup"]

Gradient: TypeAlias = "Tensor | GradientFuture"
Callback: TypeAlias = "Callable[[Tensor, Gradient], Gradient | None]"
"""``callback(tensor, gradient)`` returns the gradient to go on with, a future of it, or ``None`` to keep it."""


class _Slot:
    """One attached tensor: its callbacks and, during a sweep, what they made of its gradient."""

    __slots__ = ("__weakref__", "callbacks", "handle", "reached", "set_aside", "sweeping", "tensor", "value")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.callbacks: list[Callback] = []
        self.handle: torch.utils.hooks.RemovableHandle | None = None
        self.set_aside: Tensor | None = None
        self.sweeping = False
        self.reached: list[tuple[Tensor, _Slot]] = []  # of the running sweep: all its slots, in the order of arrival
        self.value: Gradient | None = None

    def take(self, tensor: Tensor | None, grad: Tensor) -> None:
        """Runs the callbacks on a gradient that has just become final."""
        if tensor is None:
            return
        if self.value is not None:
            raise RuntimeError(
                f"the gradient of a tensor of shape {tuple(tensor.shape)} arrived twice in one sweep, as it does when "
                "torch.utils.checkpoint runs with use_reentrant=True; pass use_reentrant=False"
            )
        value: Gradient = grad
        self.value = grad
        self.reached.append((tensor, self))
        for callback in self.callbacks:
            answer = callback(tensor, value)
            if answer is not None:
                value = self.value = answer


class GradManager:
    """Records a computation and runs its backward, calling back with each gradient as soon as it is final.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> manager = GradManager().attach(weight, callbacks=lambda tensor, grad: grad * 10)
    >>> with manager:
    ...     loss = (weight * weight).sum()
    ...     manager.backward(loss)
    >>> weight.grad
    tensor([20., 40.])

    Leaves that are not attached are treated as ``torch.autograd.backward`` treats them.

    Args:
        timeout: seconds that ``backward`` waits, after its sweep, for all the futures that callbacks returned.

    Source: the GradManager of MegEngine.
    """

    def __init__(self, *, timeout: float = 1800.0) -> None:
        Deadline.after(timeout)
        self._timeout = timeout
        self._slots: dict[int, _Slot] = {}
        self._watched: list[_Slot] = []
        self._recording = False
        self._lent: list[weakref.ref[Tensor]] = []
        self.siblings: object | None = None

    def attach(
        self, tensors: Tensor | Iterable[Tensor], callbacks: Callback | Iterable[Callback] | None = ()
    ) -> GradManager:
        """Watches ``tensors``, weakly; attaching one again adds to its callbacks.

        A plain tensor that does not require a gradient is made to between ``record`` and ``release``; a frozen
        ``nn.Parameter`` stays frozen.

        Args:
            tensors: a tensor or an iterable of them, of a floating or complex dtype.
            callbacks: one or several, called as ``callback(tensor, grad)`` in order: each returns the gradient to go
                on with, a future of it, or ``None`` to keep what it was given.

        Raises:
            TypeError: something that is no tensor, or a tensor of integers; a callback that cannot be called.
        """
        wanted = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        chain = [] if callbacks is None else [callbacks] if callable(callbacks) else list(callbacks)
        for callback in chain:
            if not callable(callback):
                raise TypeError(f"a callback is called as callback(tensor, grad), got {callback!r}")
        for tensor in wanted:
            check_differentiable(tensor)
        for tensor in wanted:
            slot = self._slot_of(tensor)
            if chain and not slot.callbacks:
                self._watched.append(slot)
            slot.callbacks.extend(chain)
            if self._recording:
                self._prepare(slot)
        return self

    def _slot_of(self, tensor: Tensor) -> _Slot:
        slot = self._slots.get(id(tensor))
        if slot is None or slot.tensor() is not tensor:  # an id is used again once its tensor is dropped
            slot = self._slots[id(tensor)] = _Slot(tensor)
        return slot

    def attached_tensors(self) -> list[Tensor]:
        """The attached tensors that are still alive, in the order in which they were first attached."""
        return [tensor for slot in self._slots.values() if (tensor := slot.tensor()) is not None]

    def record(self) -> None:
        """Begins a session; ``backward`` or ``release`` ends it.

        Raises:
            RuntimeError: it is recording already.
        """
        if self._recording:
            raise RuntimeError("this GradManager is recording already; call backward() or release() first")
        self._recording = True
        sessions.begin(self)
        for slot in self._slots.values():
            self._prepare(slot)

    def _prepare(self, slot: _Slot) -> None:
        """Makes sure that the gradient will come by; what stays set from step to step is found set."""
        if slot.handle is not None:
            return
        tensor = slot.tensor()
        if tensor is None:
            return
        if not tensor.requires_grad:
            if isinstance(tensor, torch.nn.Parameter):
                return
            tensor.requires_grad_()
            self._lent.append(weakref.ref(tensor))
        if not tensor.is_leaf:
            tensor.retain_grad()
        if slot.callbacks:
            slot.handle = watch_leaf(tensor, slot) if tensor.is_leaf else watch_result(tensor, slot)

    def release(self) -> None:
        """Ends the session without a backward; nothing happens if there is none."""
        if not self._recording:
            return
        self._recording = False
        sessions.end(self)
        for reference in self._lent:
            tensor = reference()
            if tensor is not None and tensor.is_leaf:
                tensor.requires_grad_(False)
        self._lent.clear()

    def backward(
        self, y: Tensor | Sequence[Tensor] | None = None, dy: Tensor | Sequence[Tensor | None] | None = None
    ) -> None:
        """Sweeps back from ``y``, runs the callbacks, then accumulates into ``.grad``, and ends the session.

        Args:
            y: the roots, ones that require no gradient are ignored; ``None`` for a rank that has none.
            dy: their gradients, of their shapes; ones by default.

        Raises:
            RuntimeError: it is not recording, or the session has been used.
            ValueError: ``dy`` without ``y``, or of another length or shape.
            DeadlineExceeded: a callback's future had no result within ``timeout`` seconds.
        """
        if not self._recording:
            raise RuntimeError("this GradManager is not recording: its session was never begun, or has been used")
        try:
            roots, gradients = roots_on_tape(y, dy)
            retain, create = sessions.sweep_flags(self)
            if self._watched:
                self._sweep_watched(roots, gradients, retain, create)
            elif roots:
                sweep(roots, gradients, retain, create)
        finally:
            self.release()

    def _sweep_watched(self, roots: list[Tensor], gradients: list[Tensor | None], retain: bool, create: bool) -> None:
        reached: list[tuple[Tensor, _Slot]] = []
        kept: list[tuple[Tensor, _Slot]] = []
        for slot in self._watched:
            tensor = slot.tensor()
            slot.sweeping = True
            slot.reached = reached
            if tensor is not None and (grad := tensor.grad) is not None:
                slot.set_aside = grad
                tensor.grad = None
                kept.append((tensor, slot))
        try:
            if roots:
                sweep(roots, gradients, retain, create)
            self._accumulate(reached, create)
        finally:
            for tensor, slot in kept:
                if tensor.grad is None:
                    tensor.grad = slot.set_aside
                slot.set_aside = None
            for slot in self._watched:
                slot.sweeping = False
                slot.reached = []
                slot.value = None

    def _accumulate(self, reached: list[tuple[Tensor, _Slot]], create: bool) -> None:
        deadline: Deadline | None = None
        for tensor, slot in reached:
            value = slot.value
            slot.value = None
            if not isinstance(value, Tensor):
                if not is_future(value):
                    raise TypeError(f"a callback returns a tensor, a future or None, got {value!r}")
                deadline = deadline or Deadline.after(self._timeout)
                value = result_of(
                    cast(GradientFuture, value), deadline, peer="a callback's future", operation="GradManager.backward"
                )
            before = slot.set_aside
            tensor.grad = value if before is None else _sum(before, value, create)

    def __enter__(self) -> Self:
        self.record()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __or__(self, other: GradManager | GradManagerGroup) -> GradManagerGroup:
        """A group, to be entered with ``with``, whose members do not record one another's backward."""
        if not isinstance(other, GradManager | GradManagerGroup):
            return NotImplemented
        return GradManagerGroup([self]) | other


class GradManagerGroup:
    """Managers that record together and not one another; made by ``a | b``."""

    def __init__(self, members: Iterable[GradManager]) -> None:
        self._members = list(dict.fromkeys(members))

    def __or__(self, other: GradManager | GradManagerGroup) -> GradManagerGroup:
        """The group of both sides' members."""
        if isinstance(other, GradManager):
            return GradManagerGroup([*self._members, other])
        if isinstance(other, GradManagerGroup):
            return GradManagerGroup([*self._members, *other._members])
        return NotImplemented

    def __enter__(self) -> Self:
        begun: list[GradManager] = []
        try:
            for member in self._members:
                member.record()
                member.siblings = self
                begun.append(member)
        except BaseException:
            self._release(begun)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._release(self._members)

    def _release(self, members: Sequence[GradManager]) -> None:
        for member in reversed(members):
            member.siblings = None
            member.release()


def _sum(before: Tensor, value: Tensor, create: bool) -> Tensor:
    """As torch accumulates: in place unless the sum itself is differentiated or a sparse side forbids it."""
    if create or before.requires_grad or value.requires_grad or (before.is_sparse and not value.is_sparse):
        return value + before
    with torch.no_grad():
        return before.add_(value)
