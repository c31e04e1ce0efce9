"""``RowBlock``: some rows of a table in the form for a checkpoint or another shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.errors import SchemaError

__all__ = ["RowBlock"]


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Some rows of a table in the form for a checkpoint or another shard.

    Attributes:
        ids: int64 ``[rows]``.
        values: weights, then states: ``[rows, width * (1 + states)]``, float32 where weights are float16.
        stamps: int64 ``[rows]``: 1 + the step each row has been brought up to.
        sums: ``[rows]`` under row-wise Adagrad, else ``[0]``.
        usage: int64 ``[rows, 2]``, the number of steps that used a row and the last one; ``[0, 2]`` of a fixed table.
    """

    ids: Tensor
    values: Tensor
    stamps: Tensor
    sums: Tensor
    usage: Tensor

    def check(self, table: str, wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]], step: int) -> None:
        """Raise unless each tensor has the wanted shape and dtype, and the stamps are of steps up to ``step``.

        Raises:
            SchemaError: names the table and what differs.
        """
        for label, (shape, dtype) in wanted.items():
            given: Tensor = getattr(self, label)
            if tuple(given.shape) != shape or given.dtype != dtype:
                raise SchemaError(
                    f"table {table}: {label} of {shape} {dtype} expected, got {tuple(given.shape)} {given.dtype}"
                )
        if self.ids.numel() and not (self.stamps.min() >= 0 and self.stamps.max() <= step + 1):
            raise SchemaError(f"table {table}: stamps of 0 to {step + 1} expected after {step} steps")
