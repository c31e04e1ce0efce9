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


def join_pipelines(pipe: Pipe, column: Workers | None, timeout: float, heartbeat: float) -> Workers:
    """Return all ranks of parallel pipelines, one pipeline after the other; ``column`` holds this rank's stage."""
    line = Workers(pipe.process_group, timeout=timeout, heartbeat=heartbeat)
    if column is None or column.size == 1:
        return line
    with line:
        if line.size == 1:
            return column
        texts = column.all_gather_bytes(msgspec.json.encode((line.name, line.ranks)), operation="meet")
        rows = [msgspec.json.decode(text, type=tuple[str, list[int]]) for text in texts]
        ranks = [rank for _, row in rows for rank in row]
        name = f"{rows[0][0]} and those beside it"
        return Workers(ranks=ranks, name=name, timeout=timeout, heartbeat=heartbeat)
