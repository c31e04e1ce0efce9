"""A batch's tensors, and the rows (dim 0) they agree in.

Rows are what a mean loss is a mean over, so they are the weight of a worker's gradient; a batch whose tensors disagree
has no such weight and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from anabranch.tensors.jagged import KeyedJagged
from anabranch.tensors.structures import Structure, flatten, map_structure, paths, unflatten

__all__ = ["as_tensors", "count_rows"]


class _SparseMatrix(Protocol):
    """The attributes that scipy.sparse matrices and arrays share; scipy itself is never imported."""

    shape: tuple[int, ...]

    def tocsr(self) -> _SparseMatrix: ...


def as_tensors(batch: Structure, device: torch.device | None = None) -> Structure:
    """``batch`` with numpy arrays and scipy.sparse matrices as tensors, moved to ``device`` if one is given.

    >>> as_tensors({"x": np.zeros((2, 3), dtype=np.float32), "name": "kept"})
    {'x': tensor([[0., 0., 0.],
            [0., 0., 0.]]), 'name': 'kept'}

    Arrays share memory with the result where torch can. A sparse matrix becomes a ``torch.sparse_csr`` tensor. Leaves
    of other types are kept as they are, and a batch that is right already is returned itself.
    """
    plain = _tensors_of(batch)
    if plain and (device is None or all(leaf.device == device for leaf in plain)):
        return batch
    leaves, treedef = flatten(batch)
    changed = False
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if device is None or leaf.device == device:
                continue
            leaves[index] = leaf.to(device, non_blocking=True)
            changed = True
        elif isinstance(leaf, np.ndarray) or type(leaf).__module__.startswith("scipy.sparse"):
            tensor = _from_numpy(leaf) if isinstance(leaf, np.ndarray) else _from_scipy(cast(_SparseMatrix, leaf))
            leaves[index] = tensor if device is None else tensor.to(device)
            changed = True
    return unflatten(treedef, leaves) if changed else batch


def _tensors_of(batch: Structure) -> Sequence[Tensor]:
    """Return the leaves of a tensor, or of a flat tuple or list of tensors, much faster than ``flatten``; else
    nothing.
    """
    if type(batch) is Tensor:
        return (batch,)
    if isinstance(batch, (tuple, list)) and type(batch) in (tuple, list) and {*map(type, batch)} == {Tensor}:
        return cast("Sequence[Tensor]", batch)
    return ()


def _from_numpy(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _from_scipy(matrix: _SparseMatrix) -> Tensor:
    csr = matrix.tocsr()
    starts, columns, values = (
        torch.from_numpy(np.ascontiguousarray(getattr(csr, name))) for name in ("indptr", "indices", "data")
    )
    return torch.sparse_csr_tensor(
        starts, columns, values, size=matrix.shape, check_invariants=True, device=values.device
    )


def count_rows(batch: Structure) -> int:
    """Return the number of rows on which all of the batch's tensors agree.

    >>> count_rows({"x": torch.zeros(4, 2), "y": torch.zeros(4)})
    4

    Tensors without dimensions, and leaves that are not tensors, are ignored. A ``KeyedJagged`` has the rows of
    its features.

    Raises:
        ValueError: if the tensors disagree, or none has rows; names each tensor with its shape.
    """
    leaves: Sequence[object] = _tensors_of(batch)
    if not leaves:
        leaves = flatten(batch, _is_jagged)[0]
        if any(not isinstance(leaf, Tensor) and isinstance(leaf, Mapping) for leaf in leaves):
            batch = map_structure(_opened, batch)
            leaves = flatten(batch, _is_jagged)[0]
    rows = -1
    for leaf in leaves:
        own = len(leaf) if isinstance(leaf, KeyedJagged) or (isinstance(leaf, Tensor) and leaf.ndim) else rows
        if rows not in (-1, own):
            raise ValueError(_disagreement(batch, leaves))
        rows = own
    if rows < 0:
        raise ValueError(
            "the batch holds no tensor with rows (dim 0); convert its numbers to tensors or arrays, or give TrainStep "
            "rows=callable(batch) -> weight"
        )
    return rows


def _is_jagged(node: object) -> bool:
    return isinstance(node, KeyedJagged)


def _opened(leaf: object) -> object:
    """Return a mapping of a type that is not one of ``flatten``'s, such as a tokenizer's, as a dict."""
    return map_structure(_opened, dict(leaf)) if isinstance(leaf, Mapping) else leaf


def _disagreement(batch: Structure, leaves: Sequence[object]) -> str:
    shapes = ", ".join(
        f"{path or 'batch'} {leaf if isinstance(leaf, KeyedJagged) else tuple(leaf.shape)}"
        for path, leaf in zip(paths(batch, _is_jagged), leaves, strict=True)
        if isinstance(leaf, KeyedJagged) or (isinstance(leaf, Tensor) and leaf.ndim)
    )
    return (
        f"the batch's tensors disagree in rows (dim 0): {shapes}; make them agree, or give TrainStep "
        "rows=callable(batch) -> weight"
    )
