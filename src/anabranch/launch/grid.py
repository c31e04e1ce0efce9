"""The function behind ``job.grid``: the workers as a grid of pipelines, and the process groups of its lines.

::

    data=2, pipeline=3       stage 0   stage 1   stage 2
                  pipeline 0:  rank 0 ── rank 1 ── rank 2      pipeline_group
                  pipeline 1:  rank 3 ── rank 4 ── rank 5
                                 │         │         │
                                 └ data_group        └ data_group
"""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # defined in C++

from anabranch.deadline import Deadline
from anabranch.errors import PeerLost
from anabranch.job import Grid, Job
from anabranch.liveness.group import rank_names, too_late
from anabranch.liveness.meeting import BACKEND_GRACE, interruptible, meet_peers
from anabranch.liveness.peers import job_store, peers_of_job

_SECONDS, _HEARTBEAT, _PAUSE = 600.0, 1.0, 0.01
_TIMEOUT = timedelta(seconds=_SECONDS + BACKEND_GRACE)  # the waits of the groups' users end earlier, with a rank's name
_numbers = count()  # of grids, the same on all ranks


def make_grid(job: Job, data: int, pipeline: int) -> Grid:
    """Return the value of ``Job.grid``."""
    if data < 1 or pipeline < 1 or data * pipeline != job.world_size:
        workers = f"{job.world_size} worker{'s' * (job.world_size != 1)}"
        raise ValueError(f"data={data} times pipeline={pipeline} is to be {job.world_size}: the job has {workers}")
    if job.role != "worker":
        raise ValueError(f"only workers have a place in the grid; this process has the role {job.role!r}")
    _meet(job)
    if job.world_size > 1:
        peers_of_job()  # which the others find while they wait
    rows = [list(range(start, start + pipeline)) for start in range(0, job.world_size, pipeline)]
    columns = [list(range(stage, job.world_size, pipeline)) for stage in range(pipeline)]
    grid = Grid(
        data=data,
        pipeline=pipeline,
        data_rank=job.rank // pipeline,
        pipeline_rank=job.rank % pipeline,
        data_group=_own_group(columns, job.rank),
        pipeline_group=_own_group(rows, job.rank),
    )
    if job.world_size > 1:
        _wait_for_all(job)
    return grid


def _meet(job: Job) -> None:
    """Initialise ``torch.distributed`` unless it is initialised."""
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if job.world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
    else:
        meet_peers(backend, _SECONDS)
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _own_group(lines: list[list[int]], rank: int) -> dist.ProcessGroup:
    # Every rank makes every group, in the same order, as torch wants it.
    groups = {tuple(line): interruptible(partial(dist.new_group, line, timeout=_TIMEOUT)) for line in lines}
    return cast(dist.ProcessGroup, next(group for line, group in groups.items() if rank in line))


def _wait_for_all(job: Job) -> None:
    """Return once all have made their groups: gloo fails where one ends while another still connects."""
    store, number = job_store(), next(_numbers)
    names = [f"anabranch/grid {number} of {rank}" for rank in range(job.world_size)]
    store.set(names[job.rank], "made")
    peers, deadline = peers_of_job(), Deadline.after(_SECONDS)

    def wait() -> None:
        while not store.check(names):
            absent = [rank for rank, name in enumerate(names) if not store.check([name])]
            peers.look_up(absent, _HEARTBEAT)
            if lost := peers.lost(absent, _HEARTBEAT):
                raise PeerLost(next(iter(lost.values())), peer=rank_names([*lost]), operation="make a grid")
            if absent and deadline.expired():
                raise too_late(absent, "make a grid", deadline, None)
            time.sleep(_PAUSE)

    with suppress(dist.DistNetworkError):  # rank 0 has seen all, and gone with its store
        interruptible(wait)
