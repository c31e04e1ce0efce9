"""The sessions that are recording, and a backward sweep over the graph that they share.

All sessions of a thread record one torch graph, so a sweep must leave it whole while another session may still need
it, and must itself be recorded if an outer session watches:

- ``retain_graph`` if any other session is recording: a sweep that frees the graph would end it for all;
- ``create_graph`` if a session that began earlier, and is not a sibling of the sweeping one, is recording.

For the same reason the memory of the tape is freed when the last of the sessions that overlap has ended. Boundary
operations hand their tokens to every session that records: a rank whose loss is elsewhere starts its
backward from them, and a sweep towards given tensors must not pass by what ends at a boundary.

The tape's memory: torch keeps saved tensors alive for as long as anything holds a root. A session ends sooner, so while
one is entered every saved tensor is packed into a cell that the graph holds and the tape can empty::

    root ──> grad_fn ──> cell ──> saved tensor        tape ··(weakly)··> cell

The tape knows its cells weakly: a sweep that frees the graph frees them on the way, as without a session.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Cell(list[object]):
    """One saved tensor, and how often it had been changed in place by then; empty once freed.

    A list: one is made at every save of every operation, and no class with an ``__init__`` is as fast.
    """

    __slots__ = ("__weakref__",)


_weakly = weakref.ref


class Tape:
    """The cells of the sessions of one thread that are, or were, entered at the same time."""

    def __init__(self) -> None:
        self._cells: list[weakref.ref[_Cell]] = []

    def hooks(self) -> saved_tensors_hooks:
        """Return a context in which the operations of this thread save into the tape."""
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> _Cell:
        cell = _Cell((tensor, tensor._version))
        self._cells.append(_weakly(cell))
        return cell

    def hold(self, value: object) -> list[object]:
        """Return a list of ``value`` alone that is emptied when the tape is freed; the caller keeps the list."""
        cell = _Cell((value,))
        self._cells.append(weakref.ref(cell))
        return cell

    def free(self) -> None:
        """Empty every cell; a sweep that comes too late raises ``RuntimeError``."""
        cells, self._cells = self._cells, []
        for reference in cells:
            cell = reference()
            if cell is not None:
                cell.clear()


def _unpack(cell: _Cell) -> Tensor:
    if not cell:
        raise RuntimeError("the saved tensors of this graph were freed when its Grad session ended")
    tensor: Tensor
    tensor, version = cell  # type: ignore[assignment]
    # torch itself checks only tensors saved without hooks.
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(tensor.shape)}"
        )
    return tensor


class Session:
    """A recording: of a ``Grad``, a ``GradManager``, a step.

    Attributes:
        siblings: an object shared by the members of a group, which do not record one another; ``None`` outside one.
        exits: tokens of the tape's ends at boundaries where a sweep comes in.
        entries: tokens of those where it leaves.
    """

    def __init__(self) -> None:
        self.siblings: object | None = None
        self.exits: list[Tensor] = []
        self.entries: list[Tensor] = []


class _Recording(threading.local):
    """The sessions of one thread, oldest first; weak, so that an abandoned session vanishes."""

    def __init__(self) -> None:
        self.sessions: list[weakref.ref[Session]] = []
        self.tape: Tape | None = None


_recording = _Recording()


def begin(session: Session) -> None:
    """``session`` records from here on."""
    _recording.sessions.append(weakref.ref(session))


def save_to_tape() -> saved_tensors_hooks:
    """Return a context in which what operations save is freed once no session of this thread records."""
    if _recording.tape is None:
        _recording.tape = Tape()
    return _recording.tape.hooks()


def hold_on_tape(value: object) -> list[object]:
    """Return a list of ``value``, which an operation keeps for its backward; emptied with the tape, if a session has
    one.
    """
    return [value] if _recording.tape is None else _recording.tape.hold(value)


def end(session: Session) -> None:
    """``session`` records no more, and lets its tokens go."""
    session.exits.clear()
    session.entries.clear()
    recording = _recording
    if sessions := recording.sessions:
        recording.sessions = [ref for ref in sessions if (other := ref()) is not None and other is not session]
    if recording.tape is not None and not recording.sessions:
        recording.tape.free()
        recording.tape = None


def live() -> list[Session]:
    """Return this thread's recording sessions, oldest first."""
    return [session for ref in _recording.sessions if (session := ref()) is not None]


def sweep_flags(session: Session) -> tuple[bool, bool]:
    """``(retain_graph, create_graph)`` for a backward sweep of ``session``, by the rules above."""
    if len(_recording.sessions) == 1:  # the common case: no other session
        return False, False
    sessions = live()
    outer = sessions[: sessions.index(session)]
    return len(sessions) > 1, any(one.siblings is None or one.siblings is not session.siblings for one in outer)


def boundary_exit(token: Tensor) -> Tensor:
    """Make ``token``, made by an operation that sent a value away, a root of every recording session's sweep."""
    for session in live():
        session.exits.append(token)
    return token


def boundary_entry(parameter: Tensor | None = None) -> Tensor:
    """Return a token that requires a gradient, for an operation that brings in a value and has no other such input.

    Every backward reaches the operation, whatever its inputs are. Without a session it is ``parameter``, if there is
    one, so that ``backward(inputs=model.parameters())`` does too.
    """
    if parameter is not None and not _recording.sessions:
        return parameter
    token = torch.empty((), requires_grad=True, device="cpu")
    for session in live():
        session.entries.append(token)
    return token


def check_differentiable(tensor: object) -> None:
    """Raise ``TypeError`` unless ``tensor`` is a tensor of a dtype that can have a gradient."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"gradients are of tensors, got {type(tensor).__name__}; of a module attach its parameters()")
    if not (tensor.requires_grad or tensor.is_floating_point() or tensor.is_complex()):
        what = f"a tensor of {tensor.dtype} and shape {tuple(tensor.shape)}"
        raise TypeError(f"{what} has no gradient; only floating-point and complex tensors do")


def roots_on_tape(
    y: Tensor | Sequence[Tensor] | None, dy: Tensor | Sequence[Tensor | None] | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the roots that require a gradient and the gradients they start with, ones where none is given.

    Raises:
        ValueError: another number or shape of ``dy``, or ``dy`` without ``y``.
        TypeError: a root that is not a tensor.
    """
    if isinstance(y, Tensor) and dy is None and not y.ndim and y.requires_grad:
        return [y], [None]  # a loss: nothing to check
    ys: list[Tensor] = [] if y is None else [y] if isinstance(y, Tensor) else list(y)
    dys: list[Tensor | None] = [dy] if isinstance(dy, Tensor) else [None] * len(ys) if dy is None else list(dy)
    if len(ys) != len(dys):
        raise ValueError(f"backward needs a gradient for each root: {len(ys)} roots, {len(dys)} gradients")
    roots: list[Tensor] = []
    gradients: list[Tensor | None] = []
    for index, (root, gradient) in enumerate(zip(ys, dys, strict=True)):
        if not isinstance(root, Tensor):
            raise TypeError(f"root {index} is a {type(root).__name__}; roots are tensors")
        if gradient is None:
            if not root.requires_grad:
                continue
            if root.ndim:
                gradient = torch.ones_like(root, memory_format=torch.preserve_format)
        elif gradient.shape != root.shape:
            raise ValueError(
                f"root {index} has shape {tuple(root.shape)} and its gradient {tuple(gradient.shape)}; they must agree"
            )
        if root.requires_grad:
            roots.append(root)
            gradients.append(gradient)
    return roots, gradients


def loss_and_returned(answer: object) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Check the result of the user's loss function, and split it into loss and further tensors.

    Raises:
        TypeError, ValueError: it is not a scalar tensor that depends on a parameter, with or without a dict.
    """
    returned: Any = {}
    loss: Any = answer
    if isinstance(answer, Tensor):
        pass
    elif isinstance(answer, tuple) and len(answer) == 2:
        loss, returned = answer
        if not isinstance(returned, Mapping):
            raise TypeError(f"besides the loss a step returns a dict of tensors, got {type(returned).__name__}")
    elif isinstance(answer, Mapping) and "loss" in answer:
        loss = answer["loss"]
        returned = {name: value for name, value in answer.items() if name != "loss" and isinstance(value, Tensor)}
    else:
        loss = getattr(answer, "loss", answer)
    if not isinstance(loss, Tensor):
        forms = "a scalar tensor, (scalar, dict), a mapping with 'loss' or an object with .loss"
        raise TypeError(f"loss(model, batch) returns {forms}, got {type(loss).__name__}")
    if loss.numel() != 1:
        what = f"the loss has shape {tuple(loss.shape)}, but backward starts from a single number"
        raise ValueError(f"{what}; return loss.mean() with reduction='mean', or loss.sum() with reduction='sum'")
    if not torch.is_grad_enabled():
        raise ValueError("gradients are switched off around this run (torch.no_grad, inference_mode)")
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on any parameter that requires a gradient; nothing would be trained")
    return loss if loss.ndim == 0 else loss.reshape(()), returned


def run_sweep(roots: list[Tensor], gradients: list[Tensor | None], retain: bool, create: bool) -> None:
    """``torch.autograd.backward``, recorded itself where an outer session watches."""
    if not create:
        torch.autograd.backward(roots, gradients, retain_graph=retain)
        return
    with warnings.catch_warnings():
        # torch warns that .grad then keeps the graph alive: here the outer session requested just that.
        warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph=True")
        torch.autograd.backward(roots, gradients, retain_graph=True, create_graph=True)
