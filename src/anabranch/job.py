"""The facts of the job this process belongs to: its rank and role among the workers, and where the services are.

Read from the environment that ``anabranch run`` and ``torchrun`` set; without one the process is a job of one worker.
``anabranch.job`` is the function, as users call it; other names of this module come by ``from anabranch.job import``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

__all__ = ["Job", "Role", "job"]

Role = Literal["worker", "expert"]


@dataclass(frozen=True, slots=True)
class Job:
    """The facts of a job, as one of its processes sees them; made by ``job()``.

    Attributes:
        rank: this process among those of its role, from 0.
        world_size: how many processes have its role.
        local_rank: its rank among those of its role on this host.
        role: ``"worker"`` trains, ``"expert"`` serves.
        servers: endpoints of the parameter-server shards, in shard order.
        experts: how many expert processes the job has.
        directory: endpoint of the directory, ``None`` without one.
    """

    rank: int
    world_size: int
    local_rank: int
    role: Role = "worker"
    servers: tuple[str, ...] = ()
    experts: int = 0
    directory: str | None = None


def job(environment: Mapping[str, str] | None = None) -> Job:
    """The job this process belongs to.

    >>> job({})
    Job(rank=0, world_size=1, local_rank=0, role='worker', servers=(), experts=0, directory=None)
    >>> job({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}).rank
    3

    Args:
        environment: where to look; ``os.environ`` by default. ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` are
            torchrun's; ``ANABRANCH_SERVERS`` and ``ANABRANCH_DIRECTORY`` are comma-separated endpoints.

    Raises:
        ValueError: a variable that is no number, or a rank outside the world; names the variable and its value.
    """
    env = os.environ if environment is None else environment
    world_size = _number(env, "WORLD_SIZE", 1)
    rank = _number(env, "RANK", 0)
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} lies outside WORLD_SIZE={world_size}; set both, as torchrun does, or neither")
    role = env.get("ANABRANCH_ROLE", "worker")
    if role not in ("worker", "expert"):
        raise ValueError(f"ANABRANCH_ROLE={role!r} is no role; roles are 'worker' and 'expert'")
    return Job(
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, "LOCAL_RANK", rank),
        role=cast(Role, role),
        servers=tuple(part for part in env.get("ANABRANCH_SERVERS", "").split(",") if part),
        experts=_number(env, "ANABRANCH_EXPERTS", 0),
        directory=env.get("ANABRANCH_DIRECTORY") or None,
    )


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is no whole number; unset it or set it as torchrun does") from None
