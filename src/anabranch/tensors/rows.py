"""A batch's tensors, and the rows (dim 0) they agree in.

Rows are what a mean loss is a mean over, so they are the weight of a worker's gradient; a batch whose tensors disagree
has no such weight and is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor

from anabranch.tensors.jagged import KeyedJagged
from anabranch.tensors.structures import Structure, flatten, paths, unflatten


def as_tensors(batch: Structure, device: torch.device | None = None) -> Structure:
    """``batch`` with numpy arrays and scipy.sparse matrices as tensors, moved to ``device`` if one is given.

    >>> as_tensors({"x": np.zeros((2, 3), dtype=np.float32), "name": "kept"})
    {'x': tensor([[0., 0., 0.],
            [0., 0., 0.]]), 'name': 'kept'}

    Arrays share memory with the result where torch can. A sparse matrix becomes a ``torch.sparse_csr`` tensor. Leaves
    of other types are kept as they are, and a batch that is right already is returned itself.
    """
    if plain := tensors_of(batch):
        for leaf in plain:
            if device is not None and leaf.device != device:
                break
        else:
            return batch
    leaves, treedef = flatten(batch)
    converted = [_as_tensor(leaf, device) for leaf in leaves]
    return batch if all(map(operator.is_, leaves, converted)) else unflatten(treedef, converted)


def _as_tensor(leaf: Any, device: torch.device | None) -> object:
    if isinstance(leaf, np.ndarray):
        leaf = torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())
    elif type(leaf).__module__.startswith("scipy.sparse"):  # scipy itself is never imported
        csr = leaf.tocsr()
        starts, columns, values = (
            torch.from_numpy(np.ascontiguousarray(array)) for array in (csr.indptr, csr.indices, csr.data)
        )
        leaf = torch.sparse_csr_tensor(
            starts, columns, values, size=csr.shape, check_invariants=True, device=values.device
        )
    if isinstance(leaf, Tensor) and device is not None and leaf.device != device:
        return leaf.to(device, non_blocking=True)
    return leaf


def tensors_of(batch: Structure) -> Sequence[Tensor]:
    """Return the leaves of a tensor, or of a flat tuple or list of tensors, much faster than ``flatten``; else
    nothing.
    """
    if type(batch) is Tensor:
        return (batch,)
    if not isinstance(batch, (tuple, list)) or type(batch) not in (tuple, list):
        return ()
    for leaf in batch:
        if type(leaf) is not Tensor:
            return ()
    return cast("Sequence[Tensor]", batch)


def count_rows(batch: Structure) -> int:
    """Return the number of rows on which all of the batch's tensors agree.

    >>> count_rows({"x": torch.zeros(4, 2), "y": torch.zeros(4)})
    4

    Tensors without dimensions, and leaves that are not tensors, are ignored. A ``KeyedJagged`` has the rows of
    its features.

    Raises:
        ValueError: if the tensors disagree, or none has rows; names each tensor with its shape.
    """
    plain = tensors_of(batch)
    leaves: Sequence[object] = plain or flatten(batch, is_jagged)[0]
    rows = {leaf.shape[0] for leaf in plain if leaf.ndim} or {_rows_of(leaf) for leaf in leaves} - {None}
    if len(rows) > 1:
        shapes = ", ".join(
            f"{path or 'batch'} {tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf}"
            for path, leaf in zip(paths(batch, is_jagged), leaves, strict=True)
            if _rows_of(leaf) is not None
        )
        raise ValueError(
            f"the batch's tensors disagree in rows (dim 0): {shapes}; make them agree, or give TrainStep "
            "rows=callable(batch) -> weight"
        )
    if not rows:
        raise ValueError(
            "the batch holds no tensor with rows (dim 0); convert its numbers to tensors or arrays, or give TrainStep "
            "rows=callable(batch) -> weight"
        )
    return cast(int, rows.pop())


def _rows_of(leaf: object) -> int | None:
    if isinstance(leaf, Tensor):
        return leaf.shape[0] if leaf.ndim else None
    return leaf.stride() if is_jagged(leaf) else None


def is_jagged(node: object) -> TypeGuard[KeyedJagged]:
    """Return True for ``KeyedJagged`` and for TorchRec's, whose three tensors differ in length."""
    return hasattr(type(node), "weights_or_none")
