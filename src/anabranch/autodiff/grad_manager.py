"""``GradManager``: passes each gradient of a training loop to callbacks as soon as it is final.

::

    attach ──> record ──> forward ──> backward ┌ sweep: grad final ─> callback ─> callback ─┐ ──> .grad
                                               └ ............ grad final ─> callback ─> ... ┘ afterwards

During the sweep nothing is added to ``.grad``: a callback may return a future (an all-reduce in progress), so what a
parameter gets is known only afterwards. Attached tensors without callbacks wait too, so that all get a gradient or, if
the sweep fails, none. The engine itself is torch's, unchanged.
"""

from __future__ import annotations

import concurrent.futures
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from anabranch.autodiff import grad_sessions as sessions
from anabranch.autodiff.grad_sessions import check_differentiable, roots_on_tape, run_sweep
from anabranch.autodiff.hooks import Callback, GradientFuture, Sweep
from anabranch.deadline import Deadline


@dataclass(slots=True)
class _Slot:
    """One attached tensor, held weakly, and its callbacks."""

    tensor: weakref.ref[Tensor]
    callbacks: tuple[Callback, ...] = ()


class GradManager(sessions.Session):
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

    Raises:
        ValueError: ``timeout`` is not a finite number above 0.

    Source: the GradManager of MegEngine.
    """

    def __init__(self, *, timeout: float = 1800.0) -> None:
        super().__init__()
        Deadline.after(timeout)
        self._timeout = timeout
        self._slots: dict[int, _Slot] = {}
        self._unprepared: dict[int, _Slot] = {}  # those that have no hooks yet
        self._borrowed: list[weakref.ref[Tensor]] = []  # plain tensors that require a gradient while recording
        self._sweep = Sweep()
        self._hooked = False
        self._recording = False
        # Hooks belong to the tensors and would outlive the manager. A finalizer keeps its arguments alive, so they hold
        # no callbacks: these may lead back to the manager.
        self._handles: dict[int, RemovableHandle] = {}
        weakref.finalize(self, _remove, self._handles)

    def attach(
        self, tensors: Tensor | Iterable[Tensor], callbacks: Callback | Iterable[Callback] | None = ()
    ) -> GradManager:
        """Watch ``tensors``, weakly; attaching one again adds to its callbacks.

        >>> bias = torch.zeros(3)
        >>> GradManager().attach(bias).attached_tensors()[0] is bias
        True

        A plain tensor that does not require a gradient is made to between ``record`` and ``release``; a frozen
        ``nn.Parameter`` stays frozen. The result of an operation is attached while recording, before it is used.

        Args:
            tensors: a tensor or an iterable of them, of a floating or complex dtype.
            callbacks: one or several, called as ``callback(tensor, grad)`` in order: each returns the gradient to
                continue with, a future of it, or ``None`` to keep what it was given.

        Raises:
            TypeError: a value that is not a tensor, or a tensor of integers; a callback that cannot be called.
        """
        several = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        chain = () if callbacks is None else (callbacks,) if callable(callbacks) else tuple(callbacks)
        for callback in chain:
            if not callable(callback):
                raise TypeError(f"a callback is called as callback(tensor, grad), got {callback!r}")
        for tensor in several:
            check_differentiable(tensor)
        for key in [key for key, slot in self._slots.items() if slot.tensor() is None]:  # a new tensor may have its id
            del self._slots[key]
            for by_key in (self._unprepared, self._handles):
                by_key.pop(key, None)
        for tensor in several:
            key = id(tensor)
            slot = self._slots.get(key)
            if slot is None:
                slot = self._slots[key] = _Slot(weakref.ref(tensor))
            elif not chain:
                continue
            if (handle := self._handles.pop(key, None)) is not None:
                handle.remove()
            slot.callbacks += chain
            self._unprepared[key] = slot
        if chain and not self._hooked:
            self._hooked = True
            self._unprepared |= self._slots
        if self._recording:
            self._prepare()
        return self

    def attached_tensors(self) -> list[Tensor]:
        """Return the attached tensors that are still alive, in the order in which they were first attached."""
        return [tensor for slot in list(self._slots.values()) if (tensor := slot.tensor()) is not None]

    def record(self) -> None:
        """Begin a session; ``backward`` or ``release`` ends it.

        Raises:
            RuntimeError: it is recording already.
        """
        if self._recording:
            raise RuntimeError("this GradManager is already recording; call backward() or release() first")
        self._recording = True
        sessions.begin(self)
        if self._unprepared:
            self._prepare()

    def _prepare(self) -> None:
        """Set hooks on tensors that have none yet; plain ones are made to require a gradient, and stay on the list."""
        waiting: dict[int, _Slot] = {}
        for key, slot in self._unprepared.items():
            tensor = slot.tensor()
            if tensor is None:
                continue
            if not tensor.requires_grad:
                waiting[key] = slot
                if isinstance(tensor, torch.nn.Parameter):
                    continue
                tensor.requires_grad_()
                self._borrowed.append(slot.tensor)
            if key not in self._handles:
                self._hook(key, tensor, slot.callbacks)
        self._unprepared = waiting

    def _hook(self, key: int, tensor: Tensor, callbacks: tuple[Callback, ...]) -> None:
        if not tensor.is_leaf:
            tensor.retain_grad()
        if self._hooked and tensor.is_leaf:
            self._handles[key] = self._sweep.watch_leaf(tensor, callbacks)
        elif callbacks:
            self._handles[key] = self._sweep.watch_result(tensor, callbacks)

    def release(self) -> None:
        """End the session without a backward; nothing happens if there is none."""
        if not self._recording:
            return
        sessions.end(self)
        for reference in self._borrowed:
            tensor = reference()
            if tensor is not None and tensor.is_leaf:
                tensor.requires_grad_(False)
        self._borrowed.clear()
        self._recording = False  # last: after an interrupt in the lines above, all of them can be done again

    def backward(
        self, y: Tensor | Sequence[Tensor] | None = None, dy: Tensor | Sequence[Tensor | None] | None = None
    ) -> None:
        """Sweep back from ``y``, run the callbacks, then accumulate into ``.grad``, and end the session.

        When a callback or a hook raises, or Ctrl-C interrupts, the sweep ends there, no attached tensor's ``.grad`` is
        changed, futures returned so far are cancelled, and the exception continues to the caller.

        Args:
            y: the roots, ones that require no gradient are ignored; ``None`` for a rank that has none.
            dy: their gradients, of their shapes; ones by default.

        Raises:
            RuntimeError: it is not recording, or the session has been used.
            ValueError: ``dy`` without ``y``, or of another length or shape; a callback's gradient of another shape
                or device than its tensor.
            TypeError: a callback returned neither a tensor nor a future nor ``None``.
            DeadlineExceeded: a callback's future had no result within ``timeout`` seconds.
        """
        if not self._recording:
            raise RuntimeError("this GradManager is not recording: its session was not started, or has been used")
        try:
            roots, gradients = roots_on_tape(y, dy)
            roots += self.exits
            gradients += [None] * len(self.exits)
            if roots:
                retain, create = sessions.sweep_flags(self)
                if self._hooked:
                    self._run_hooked(roots, gradients, retain, create)
                else:
                    run_sweep(roots, gradients, retain, create)
        finally:
            self.release()

    def _run_hooked(self, roots: list[Tensor], gradients: list[Tensor | None], retain: bool, create: bool) -> None:
        sweep, before = self._sweep, [(tensor, tensor.grad) for tensor in self.attached_tensors()]
        aside = [(tensor, grad) for tensor, grad in before if grad is not None and id(tensor) in self._handles]
        added: list[tuple[Tensor, Tensor]] = []
        version: int | None = None
        try:
            for tensor, _ in aside:
                tensor.grad = None  # else what arrives would be added to it
            sweep.begin()
            run_sweep(roots, gradients, retain, create)
            sweep.end()
            final = self._resolve() if sweep.replaced else cast("list[Tensor]", sweep.values)
            for tensor, grad in aside:
                tensor.grad = grad
            added = self._assign(final, create, {id(tensor): grad for tensor, grad in aside})
            version = _version(added)
            _add(added)
        except BaseException:
            if version is None or version == _version(added):  # nothing was added yet
                for tensor, earlier in before:
                    tensor.grad = earlier
            for future in sweep.values:  # their results are ignored; those that run end by themselves
                if isinstance(future, concurrent.futures.Future):
                    future.cancel()
            raise
        finally:
            sweep.clear()

    def _assign(
        self, final: Sequence[Tensor], create: bool, aside: Mapping[int, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Write gradients to ``.grad``; return those to be added in place, each after what it is added to."""
        added: list[tuple[Tensor, Tensor]] = []
        for tensor, value in zip(self._sweep.tensors, final, strict=True):
            before = aside.get(id(tensor))
            if before is None:
                tensor.grad = value
            elif create or before.requires_grad or value.requires_grad or (before.is_sparse and not value.is_sparse):
                tensor.grad = value + before  # the sum itself is differentiated, or a sparse side forbids it
            elif not tensor.is_leaf:  # retain_grad has replaced ``.grad`` meanwhile
                tensor.grad = before + value
            else:
                added.append((before, value))
        return added

    def _resolve(self) -> list[Tensor]:
        """Wait for all futures and collect the callbacks' final results, before anything is written."""
        deadline = Deadline.after(self._timeout)
        final = [value if isinstance(value, Tensor) else _result_of(value, deadline) for value in self._sweep.values]
        for tensor, value in zip(self._sweep.tensors, final, strict=True):
            if (value.shape, value.device) != (tensor.shape, tensor.device):
                there, here = (f"of shape {tuple(one.shape)} on {one.device}" for one in (value, tensor))
                raise ValueError(f"a callback returned a gradient {there}, for a tensor {here}")
        return final

    def __enter__(self) -> Self:
        self.record()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __or__(self, other: GradManager | GradManagerGroup) -> GradManagerGroup:
        """Return a group, to be entered with ``with``, whose members do not record one another's backward."""
        return GradManagerGroup([self]).__or__(other)


class GradManagerGroup:
    """Managers that record together and not one another; made by ``a | b``.

    >>> x = torch.ones(2, requires_grad=True)
    >>> a, b = GradManager().attach(x), GradManager().attach(x)
    >>> with a | b:
    ...     y = (x * x).sum()
    ...     a.backward(y)
    ...     b.backward(y)
    >>> x.grad
    tensor([4., 4.])
    """

    def __init__(self, members: Iterable[GradManager]) -> None:
        self._members = list(dict.fromkeys(members))

    def __or__(self, other: GradManager | GradManagerGroup) -> GradManagerGroup:
        """Return the group of both sides' members."""
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
                begun.append(member)
                member.siblings = self
        except BaseException:
            _release(begun)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _release(self._members)


def _release(members: Sequence[GradManager]) -> None:
    for member in reversed(members):
        member.siblings = None
        member.release()


def _add(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add in place, in one call: an interrupt comes before or after all of it. None of them requires a gradient."""
    if pairs:
        torch._foreach_add_([before for before, _ in pairs], [value for _, value in pairs])


def _version(pairs: Sequence[tuple[Tensor, Tensor]]) -> int:
    """Return a number that ``_add`` changes."""
    return pairs[0][0]._version if pairs else 0


def _remove(handles: dict[int, RemovableHandle]) -> None:
    for handle in handles.values():
        handle.remove()


def _result_of(future: GradientFuture, deadline: Deadline) -> Tensor:
    """Return the future's result; raise ``DeadlineExceeded`` when the deadline comes first."""
    if not isinstance(future, concurrent.futures.Future | torch._C.Future):
        raise TypeError(f"a callback returns a tensor, a future or None, got {future!r}")
    pause = 1e-5  # torch's futures have no timeout
    while not future.done():
        deadline.check(peer="a callback's future", operation="GradManager.backward")
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    if isinstance(future, concurrent.futures.Future):
        return future.result(timeout=0)
    # Done already: no thread waits, but the current streams for the future's.
    (value,) = torch.futures.wait_all([cast("torch.futures.Future[object]", future)])
    # That of a collective is a list of its tensors, here of one.
    several = value if isinstance(value, list | tuple) else [value]
    if len(several) == 1 and isinstance(several[0], Tensor):
        return several[0]
    raise TypeError(f"a callback's future returns a tensor, or a list of one tensor like collectives, got {value!r}")
