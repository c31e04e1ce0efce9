"""The tape's memory: what operations save for their backward, freed when the sessions that recorded it end.

torch keeps saved tensors alive for as long as anything holds a root. A session ends sooner, so while one is entered
every saved tensor is packed into a cell that the graph holds and the tape can empty::

    root ──> grad_fn ──> cell ──> saved tensor        tape ··(weakly)··> cell

The tape knows its cells weakly: a sweep that frees the graph frees them on the way, as without a session.
"""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Tape"]


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
        self._prune_at = 4096

    def hooks(self) -> saved_tensors_hooks:
        """Return a context in which the operations of this thread save into the tape."""
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> _Cell:
        cell = _Cell((tensor, tensor._version))
        cells = self._cells
        cells.append(_weakly(cell))
        if len(cells) > self._prune_at:
            self._cells = [reference for reference in cells if reference() is not None]
            self._prune_at = max(4096, 2 * len(self._cells))
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
        raise RuntimeError(
            "the saved tensors of this graph were freed when its Grad session ended; run backward inside the session"
        )
    tensor: Tensor
    tensor, version = cell  # type: ignore[assignment]
    # torch itself checks only tensors saved without hooks.
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}, expected {version}"
        )
    return tensor
