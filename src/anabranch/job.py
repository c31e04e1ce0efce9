"""The facts of the job this process belongs to: its rank and role among the workers, and where the services are.

Read from the environment that ``anabranch run`` and ``torchrun`` set; without one the process is a job of one worker.
``anabranch.job`` is the function, as users call it; other names of this module come by ``from anabranch.job import``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, cast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Role = Literal["worker", "expert"]

MEETING_VARIABLE = "ANABRANCH_MEETING"
"""The environment variable with the file through which the workers of ``anabranch run`` meet, in a folder that no other
user may enter; its name ends with ``-MASTER_PORT``."""

JOB_VARIABLE = "ANABRANCH_JOB"
"""The environment variable with the name of one start of ``anabranch run``, the same after restarts."""

JOINED_VARIABLE = "ANABRANCH_JOINED"
"""The environment variable of a worker that has joined a running job, in place of one that was lost."""

RETURN_VARIABLE = "ANABRANCH_SERVERS_RETURN"
"""The environment variable of a job whose launcher kills a frozen parameter server, and restarts it as it was."""

LINGER_VARIABLE = "ANABRANCH_LINGER"
"""The environment variable with the seconds for which an expert process serves on after its first signal while workers
are connected."""

LISTEN_VARIABLE = "ANABRANCH_LISTEN"
"""The environment variable that says where an expert process listens, where its script does not."""

RUN_VARIABLE = "ANABRANCH_RUN"
"""The environment variable that tells a job from others that use the same directory; unset where it has its own."""


class DirectoryLike(Protocol):
    """The interface of a directory of the job's services, wherever its table is."""

    def announce(self, uids: Iterable[str], endpoint: str, ttl: float) -> None:
        """``endpoint`` serves ``uids`` for the next ``ttl`` seconds."""

    def withdraw(self, uids: Iterable[str], endpoint: str) -> None:
        """``endpoint`` does not serve ``uids`` any more."""

    def lookup(self, uids: Iterable[str]) -> dict[str, str]:
        """Return the endpoint of each announced uid."""

    def active(self, prefixes: Iterable[str]) -> dict[str, list[int]]:
        """Return the indices that follow each prefix in the announced uids."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The workers as pipelines side by side, made by ``Job.grid``: rank ``d * pipeline + p`` is stage p of pipeline d.

    Attributes:
        data: how many pipelines there are.
        pipeline: how many stages each has.
        data_rank: which pipeline this worker is in.
        pipeline_rank: which stage of it it is.
        data_group: the workers that are the same stage as this one, of all pipelines.
        pipeline_group: the workers of this one's pipeline.
    """

    data: int
    pipeline: int
    data_rank: int
    pipeline_rank: int
    data_group: ProcessGroup
    pipeline_group: ProcessGroup


Serve = Callable[..., DirectoryLike]
"""The function behind ``Job.serve``: takes the job, and what that takes."""

MakeGrid = Callable[["Job", int, int], Grid]
"""The function behind ``Job.grid``."""

# ``Job.serve`` and ``Job.grid`` need ``launch``, which depends on this module: ``anabranch/__init__.py`` provides them.
_provider: Callable[[], tuple[Serve, MakeGrid]]


def _provide(provider: Callable[[], tuple[Serve, MakeGrid]]) -> None:
    """Set where ``Job.serve`` and ``Job.grid`` are imported from at their first call."""
    global _provider
    _provider = provider


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
        directory: endpoint of the directory, or the URL of its Redis; ``None`` without one.
        workers: how many workers the job has; an expert process knows it too.
        joined: whether this worker has joined a running job, in place of one that was lost. In its first training run
            it takes the others' state; until then it is alone, and ``rank`` and ``world_size`` are what they will be.
    """

    rank: int
    world_size: int
    local_rank: int
    role: Role = "worker"
    servers: tuple[str, ...] = ()
    experts: int = 0
    directory: str | None = None
    workers: int = field(default=1, repr=False, compare=False)
    joined: bool = field(default=False, repr=False, compare=False)

    def serve(
        self,
        make_backends: Callable[[int, int], Sequence[object]],
        *,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_seconds: float = 60.0,
        listen: str | None = None,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        heartbeat: float = 1.0,
        timeout: float = 120.0,
    ) -> DirectoryLike:
        r"""In an expert process: serves experts until the job ends, then exits with 0. In a worker: where they are.

        >>> import torch, anabranch as ab
        >>> def make_backends(index, count):
        ...     module, schema = torch.nn.Identity(), [ab.TensorSpec(2)]
        ...     return [ab.ExpertBackend(f"same.{index}", module, args_schema=schema)]
        >>> # alone: served by threads of this process, until it ends
        >>> directory = ab.job().serve(make_backends)
        >>> directory.active(["same"])
        {'same': [0]}

        Call it at the same place in all processes, before anything that the workers do together: an expert process
        never comes back from it. It ends on SIGTERM, once it has answered what it was asked and has saved.

        Args:
            make_backends: called as ``make_backends(index, count)`` in the expert process ``index`` of ``count``;
                returns its ``ExpertBackend``\ s. Not called in workers, unless the job is one process alone: then with
                ``(0, 1)``.
            checkpoint_dir: where experts are saved, and found again when they are restarted.
            checkpoint_seconds: between two savings.
            listen: the endpoint of an expert process; by default a socket beside the directory's.
            keys: the directory of certificates, for TCP; by default that of ``ANABRANCH_KEYS``.
            insecure: allow TCP without certificates.
            heartbeat: seconds between the beats of an expert process.
            timeout: seconds that a worker waits for all expert processes of the job.

        Returns:
            The directory that ``RemoteExpert`` and the mixtures take.

        Raises:
            DeadlineExceeded: an expert process has not announced itself in time; names it.
            PeerLost: the directory does not answer.
            ValueError: several workers, and no servers.
            RuntimeError: in an expert process, off the main thread.
        """
        return _provider()[0](
            self,
            make_backends,
            checkpoint_dir=checkpoint_dir,
            checkpoint_seconds=checkpoint_seconds,
            listen=listen,
            keys=keys,
            insecure=insecure,
            heartbeat=heartbeat,
            timeout=timeout,
        )

    def grid(self, data: int = 1, pipeline: int = 1) -> Grid:
        """Return the workers as ``data`` pipelines of ``pipeline`` stages, with the process groups of both directions.

        >>> import torch, anabranch as ab
        >>> grid = ab.job().grid(data=1, pipeline=1)  # a lone process is a grid of its own
        >>> grid.data_group.size(), grid.pipeline_group.size()
        (1, 1)
        >>> torch.distributed.destroy_process_group()  # or leave that to the end of the process

        Joins ``torch.distributed`` if the script has not; all workers call it at the same place.

        Raises:
            ValueError: ``data * pipeline`` is not the number of workers.
            DeadlineExceeded, PeerLost: not everyone came.
        """
        return _provider()[1](self, data, pipeline)


def job(environment: Mapping[str, str] | None = None) -> Job:
    """Return the job this process belongs to.

    >>> job({})  # doctest: +NORMALIZE_WHITESPACE
    Job(rank=0, world_size=1, local_rank=0,
        role='worker', servers=(), experts=0, directory=None)
    >>> job({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}).rank
    3

    Args:
        environment: where to look; ``os.environ`` by default. ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` are
            torchrun's; ``ANABRANCH_SERVERS`` holds endpoints, comma-separated, ``ANABRANCH_DIRECTORY`` one,
            or several that keep one directory, or the URL of a Redis, ``ANABRANCH_EXPERTS`` and ``ANABRANCH_WORKERS``
            numbers of processes.

    Raises:
        ValueError: a variable that is not a number, or a rank outside the world; names the variable and its value.
    """
    env = os.environ if environment is None else environment
    world_size = _number(env, "WORLD_SIZE", 1)
    rank = _number(env, "RANK", 0)
    if not 0 <= rank < world_size:
        raise ValueError(
            f"RANK={rank} is out of range for WORLD_SIZE={world_size}; set both, as torchrun does, or neither"
        )
    role = env.get("ANABRANCH_ROLE", "worker")
    if role not in ("worker", "expert"):
        raise ValueError(f"ANABRANCH_ROLE={role!r} is not a role; roles are 'worker' and 'expert'")
    return Job(
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, "LOCAL_RANK", rank),
        role=cast(Role, role),
        servers=tuple(part for part in env.get("ANABRANCH_SERVERS", "").split(",") if part),
        experts=_number(env, "ANABRANCH_EXPERTS", 0),
        directory=env.get("ANABRANCH_DIRECTORY") or None,
        workers=world_size if role == "worker" else _number(env, "ANABRANCH_WORKERS", 1),
        joined=JOINED_VARIABLE in env,
    )


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number; unset it or set it as torchrun does") from None
