"""The ranks of parallel pipelines.

::

                stage 0      stage 1
    row 0       rank 0 ────> rank 1        a row is a pipeline: its ranks take the same batches
                  │            │
    row 1       rank 2 ────> rank 3        a column holds one stage: its ranks average their gradients
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import msgspec
import torch.distributed as dist

from anabranch.collectives import Workers
from anabranch.executor.steps import Step, TrainStep
from anabranch.pipeline import Pipe


def check_pipes(steps: Mapping[str, Step], group: dist.ProcessGroup | None, comm_mode: str | None) -> Pipe | None:
    """Return the pipe whose ranks these are, if one of the steps' is across ranks.

    Raises:
        ValueError: steps that cannot run on the same ranks, ``rows=`` for a pipe, or a data-parallel ``group`` with
            other stages in it.
    """
    for name, step in steps.items():
        if isinstance(step.model, Pipe) and isinstance(step, TrainStep) and step.rows is not None:
            raise ValueError(f"step {name!r} trains a Pipe, which splits batches along their rows; leave out rows=")
    across = [step.model for step in steps.values() if isinstance(step.model, Pipe) and step.model.process_group]
    if not across:
        return None
    pipe = across[0]
    for name, step in steps.items():
        if not isinstance(step.model, Pipe) or step.model.process_group is not pipe.process_group:
            raise ValueError(
                f"step {name!r} does not run on the ranks of the other steps' Pipe; build all Pipes of an Executor "
                "on one process_group, or make another Executor"
            )
    if comm_mode is not None:
        line = set(dist.get_process_group_ranks(cast(dist.ProcessGroup, pipe.process_group)))
        column = set(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
        if len(line & column) > 1:
            raise ValueError(
                f"gradients would be averaged over ranks {sorted(column)}, of which {sorted(line & column)} are stages "
                "of one pipeline; give process_group= the ranks that hold the same stage (job.grid(...).data_group)"
            )
    return pipe


def seed_pipes(steps: Mapping[str, Step], seed: int) -> None:
    """From now on pipes draw from the streams of ``seed``."""
    for step in steps.values():
        if isinstance(step.model, Pipe):
            step.model.seed = seed


class PipelineGrid:
    """Parallel pipelines as one sequence of ranks: ``row * stages + stage``.

    Args:
        column: the ranks that hold this rank's stage; ``None`` if there is one pipeline.
        line: the ranks of this pipeline.
    """

    def __init__(self, column: Workers | None, line: Workers) -> None:
        self._column = column
        self._line = line
        self.stages = line.size
        self.size = line.size * (1 if column is None else column.size)
        self.rank = line.rank + (0 if column is None else column.rank * line.size)

    def all_gather_bytes(self, data: bytes, *, operation: str) -> list[bytes]:
        """Every rank's ``data``, in the order of ranks."""
        row = self._line.all_gather_bytes(data, operation=operation)
        if self._column is None:
            return row
        rows = self._column.all_gather_bytes(msgspec.msgpack.encode(row), operation=operation)
        return [one for text in rows for one in msgspec.msgpack.decode(text, type=list[bytes])]

    def gather_bytes(self, data: bytes, *, operation: str) -> list[bytes]:
        """Return the same on rank 0, nothing on the others."""
        row = self._line.gather_bytes(data, operation=operation)
        if self._column is None or self._line.rank:
            return row
        rows = self._column.gather_bytes(msgspec.msgpack.encode(row), operation=operation)
        return [one for text in rows for one in msgspec.msgpack.decode(text, type=list[bytes])]

    def check_present(self) -> None:
        """Raise ``PeerLost`` if a rank of this row or of this column is known to be lost."""
        self._line.check_present()
        if self._column is not None:
            self._column.check_present()

    def close(self) -> None:
        """End watching the ranks of this pipeline."""
        self._line.close()
