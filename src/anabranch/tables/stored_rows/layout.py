"""``RowLayout``: the layout of weights and optimizer states in a row of a table's storage.

::

    float32, Adam        w0 w1 .. | exp_avg .. | exp_avg_sq ..      stride = width * (1 + states)
    float16, Adam        w0 w1 .. | exp_avg .. | exp_avg_sq ..      stride = width * (1 + 2 * states)
                         2 bytes    4 bytes each, in the place of two weights
"""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.tables.kernels.selection import as_tensor
from anabranch.tables.row_storage import RowStorage

__all__ = ["RowLayout"]


class RowLayout:
    """Rows of ``width`` weights of ``dtype``, each weight with ``states`` numbers of optimizer state.

    Attributes:
        width: weights of a row.
        states: state values per weight.
        halves: whether weights are float16, whose states are float32.
        row: numbers of a row as ``read`` gives it, ``width * (1 + states)``.
        stride: numbers from one stored row to the next.
    """

    __slots__ = ("halves", "row", "states", "stride", "width")

    def __init__(self, width: int, dtype: torch.dtype, states: int) -> None:
        self.width, self.states = width, states
        self.halves = dtype == torch.float16
        self.row = width * (1 + states)
        self.stride = width * (1 + 2 * states) if self.halves else self.row

    def read(self, storage: RowStorage, where: Tensor | slice) -> Tensor:
        """Return rows with their states, ``[n, row]``, in the dtype of the states."""
        rows = as_tensor(storage.values)[: storage.rows * self.stride].view(-1, self.stride)[where]
        if not self.halves:
            return rows
        weights, states = rows[:, : self.width], rows[:, self.width :]
        if not self.states:
            return weights.float()
        aligned = states.clone(memory_format=torch.contiguous_format)
        return torch.cat([weights.float(), aligned.view(torch.float32)], dim=1)

    def write(self, storage: RowStorage, where: Tensor, rows: Tensor) -> None:
        """Put rows with their states back; float16 weights are rounded."""
        if self.halves:
            weights, states = rows[:, : self.width], rows[:, self.width :]
            rows = weights.half()
            if self.states:
                rows = torch.cat([rows, states.contiguous().view(torch.float16)], dim=1)
        as_tensor(storage.values).view(-1, self.stride)[where] = rows
