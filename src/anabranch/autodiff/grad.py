"""``Grad``: one differentiation session, whose callbacks get gradients and whose end frees the tape."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from anabranch.autodiff import grad_sessions as sessions
from anabranch.autodiff.grad_sessions import check_differentiable, roots_on_tape
from anabranch.autodiff.hooks import watch_result

GradCallback: TypeAlias = Callable[[Any, Tensor], object]
"""``callback(tensor, grad)``; the tensor is ``None`` if it has been dropped, what is returned is ignored.

The gradient is the engine's own, which may have other users: it must not be changed in place.
"""

_by_name: weakref.WeakValueDictionary[str, Grad] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def get_grad_managers() -> list[Grad]:
    """Return the live sessions: those made and not yet left.

    >>> with Grad("mine"):
    ...     [session.name for session in get_grad_managers()]
    ['mine']
    """
    return list(_by_name.values())


class Grad(sessions.Session):
    """One differentiation session: enter it, name the tensors to differentiate by, call it once with the roots.

    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> with Grad().wrt(x, callback=lambda tensor, grad: print(grad)) as grad:
    ...     y = (x * x).sum()
    ...     grad(y, torch.tensor(1.0))
    tensor([2., 4.])

    Leaving the ``with`` frees what operations saved in it, even while ``y`` is held and after an exception; where
    sessions overlap, leaving the last of them does. ``.grad`` is never written. A session entered inside another is
    recorded by it: second derivatives.

    Args:
        name: unique among the live sessions; one is made up by default.

    Attributes:
        name: as given or made up.

    Raises:
        ValueError: a live session has the name.

    Source: the Grad of MegEngine.
    """

    def __init__(self, name: str | None = None) -> None:
        if name is None:
            name = next(made for number in _numbers if (made := f"grad_{number}") not in _by_name)
        elif name in _by_name:
            raise ValueError(f"an open session is already called {name!r}; leave it first, or choose another name")
        super().__init__()
        self.name = name
        self._inputs: dict[tuple[Node, int], GradientEdge] = {}
        self._leaves: list[Tensor] = []  # those on which requires_grad is set until the session ends
        self._handles: list[RemovableHandle] = []
        self._saving: saved_tensors_hooks | None = None
        self._used = self._sweeping = False
        _by_name[name] = self

    def wrt(self, *tensors: Tensor, callback: GradCallback | None = None) -> Self:
        """Ask for the gradients of ``tensors``, leaves or results of operations, which may be dropped afterwards.

        A leaf that does not require a gradient is made to until the session ends. What was computed from an
        ``nn.Parameter`` before is differentiated too: torch's graph knows no sessions.

        Args:
            tensors: of a floating or complex dtype, each once in a session.
            callback: called as ``callback(tensor, grad)``, once, when the gradient is final, in backward order; not
                called for a tensor that no root reaches, and with ``None`` for a tensor that has been dropped.

        Raises:
            TypeError: a value that is not a tensor, or a tensor of integers; a callback that cannot be called.
            ValueError: a tensor that this session has been given already.
            RuntimeError: the session has been used.
        """
        self._check_unused()
        if callback is not None and not callable(callback):
            raise TypeError(f"a callback is called as callback(tensor, grad), got {callback!r}")
        call = None if callback is None else self._calling(callback)
        for tensor in tensors:
            if not (isinstance(tensor, Tensor) and tensor.requires_grad):
                check_differentiable(tensor)
                tensor.requires_grad_()
                self._leaves.append(tensor)
            edge = get_gradient_edge(tensor)  # keeps the node, not the tensor; a leaf's node holds the leaf
            place = edge.node, edge.output_nr
            if place in self._inputs:
                raise ValueError(
                    f"a tensor of shape {tuple(tensor.shape)} was given to session {self.name!r} twice; "
                    "combine the callbacks"
                )
            self._inputs[place] = edge
            if call is not None:
                self._handles.append(watch_result(tensor, call))
        return self

    def _calling(self, callback: GradCallback) -> GradCallback:
        alive = weakref.ref(self)

        def call(tensor: Tensor | None, grad: Tensor) -> None:
            session = alive()
            if session is not None and session._sweeping:
                callback(tensor, grad)

        return call

    def __call__(self, ys: Tensor | Sequence[Tensor], dys: Tensor | Sequence[Tensor | None] | None = None) -> None:
        """Sweep back from ``ys``, which start with ``dys``, and from the boundary tokens recorded.

        Args:
            ys: the roots; those that require no gradient are ignored, one given twice counts twice.
            dys: their gradients, of their shapes; ones for ``None``.

        Raises:
            RuntimeError: the session is not entered, or has been used.
            ValueError: another number of ``dys``, or another shape.
        """
        self._check_unused()
        if self._saving is None:
            raise RuntimeError(f"session {self.name!r} is not entered; use `with grad:` around the computation")
        roots, gradients = roots_on_tape(ys, dys)
        roots += self.exits
        gradients += [None] * len(self.exits)
        inputs = cast(Sequence[Tensor], [*self._inputs.values(), *self.entries])
        self._used = True
        if not roots or not inputs:
            return
        retain, create = sessions.sweep_flags(self)
        self._sweeping = True
        try:
            torch.autograd.grad(
                roots, inputs, gradients, retain_graph=retain or create, create_graph=create, allow_unused=True
            )
        finally:
            self._sweeping = False

    def _check_unused(self) -> None:
        if self._used:
            raise RuntimeError(f"session {self.name!r} has been used; a session runs one backward, make a new one")

    def __enter__(self) -> Self:
        self._check_unused()
        if self._saving is not None:
            raise RuntimeError(f"session {self.name!r} is already entered")
        sessions.begin(self)
        self._saving = sessions.save_to_tape()
        self._saving.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        saving, self._saving = self._saving, None
        assert saving is not None
        self._used = True
        saving.__exit__(*error)
        for handle in self._handles:
            handle.remove()
        for leaf in self._leaves:
            leaf.requires_grad_(False)
        for each in (self._handles, self._leaves, self._inputs):
            each.clear()
        if _by_name.get(self.name) is self:
            del _by_name[self.name]
        sessions.end(self)
