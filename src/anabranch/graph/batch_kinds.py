"""A batch's kind, a hint which programs to try first: guards decide, and a wrong hint costs a longer search."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

__all__ = ["kind_of"]


def kind_of(batch: object) -> object:
    """Return the shapes, dtypes and devices of the tensors of plain containers, and the types of all else."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype, batch.device
    if isinstance(batch, Mapping):
        return tuple([(key, kind_of(value)) for key, value in batch.items()])
    if isinstance(batch, (tuple, list)):
        return tuple([kind_of(value) for value in batch])
    if isinstance(batch, (str, bool)):
        return batch
    kept = getattr(batch, "__dict__", None)
    if kept and not callable(batch):
        return type(batch), tuple([kind_of(v) for v in kept.values() if isinstance(v, (Tensor, dict))])
    return type(batch)
