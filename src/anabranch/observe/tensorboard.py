"""``TensorBoardSink``: a run's numbers as TensorBoard shows them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """Writes the metrics of an ``Executor`` into ``folder``, for ``tensorboard --logdir FOLDER``.

    ::

        executor = ab.Executor(step, sinks=[ab.observe.TensorBoardSink("runs/first")])

    Scalars by the number of optimizer steps; events as text, under ``events/``. The folder is made with the first of
    them: on rank 0.

    Args:
        folder: where; one per run.

    Raises:
        ModuleNotFoundError: TensorBoard is not installed: ``pip install 'anabranch[tensorboard]'``.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ModuleNotFoundError(
                "TensorBoardSink needs tensorboard: pip install 'anabranch[tensorboard]'", name="tensorboard"
            ) from error
        self.folder = Path(folder)
        self._make = SummaryWriter
        self._writer: SummaryWriter | None = None
        self._step = 0

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            self._writer = self._make(str(self.folder))
        return self._writer

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Write a step's numbers."""
        writer, self._step = self._open(), step
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    def event(self, name: str, facts: dict[str, object]) -> None:
        """Write an event as text."""
        text = json.dumps(facts, default=str)
        self._open().add_text(f"events/{name}", text, self._step)

    def close(self) -> None:
        """Flush and close the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
