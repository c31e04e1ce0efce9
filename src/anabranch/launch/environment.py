"""The environment of a process: torchrun's variables, so that a script runs the same under either, and where
the services of the job are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from anabranch.job import JOB_VARIABLE, MEETING_VARIABLE
from anabranch.transport.network.certificates import KEYS_VARIABLE

__all__ = [
    "LINGER_SECONDS",
    "LINGER_VARIABLE",
    "LISTEN_VARIABLE",
    "RUN_VARIABLE",
    "expert_environment",
    "service_environment",
    "threads_each",
    "worker_environment",
]

LINGER_SECONDS = 25.0
"""Seconds for which a service of a job serves on after its first signal while workers are connected."""

LINGER_VARIABLE = "ANABRANCH_LINGER"
"""The environment variable with these seconds, of an expert process."""

LISTEN_VARIABLE = "ANABRANCH_LISTEN"
"""The environment variable that says where an expert process listens, where its script does not."""

RUN_VARIABLE = "ANABRANCH_RUN"
"""The environment variable that tells a job from others that use the same directory; unset where it has its own."""

# The variables of members of the workers' process group, which experts are not.
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", MEETING_VARIABLE)


def service_environment(
    servers: Sequence[str],
    directory: str,
    experts: int,
    *,
    keys: Path | None = None,
    run: str | None = None,
    base: Mapping[str, str],
) -> dict[str, str]:
    """Return ``base`` with the addresses of the job's services.

    >>> service_environment(["unix:/run/a"], "unix:/run/d", 0, base={})
    {'ANABRANCH_DIRECTORY': 'unix:/run/d', 'ANABRANCH_EXPERTS': '0', 'ANABRANCH_SERVERS': 'unix:/run/a'}
    """
    env = {**base, "ANABRANCH_DIRECTORY": directory, "ANABRANCH_EXPERTS": str(experts)}
    if servers:
        env["ANABRANCH_SERVERS"] = ",".join(servers)
    if run is not None:
        env[RUN_VARIABLE] = run
    if keys is not None:
        env[KEYS_VARIABLE] = str(keys.absolute())
    return env


def expert_environment(
    index: int,
    experts: int,
    workers: int,
    *,
    run_id: str,
    threads: int,
    base: Mapping[str, str],
    listen: str | None = None,
) -> dict[str, str]:
    """Return the whole environment of the expert process ``index``: it has its rank among the experts, but no worker's.

    >>> env = expert_environment(1, 2, 1, run_id="x", threads=1, base={"MASTER_PORT": "29500"})
    >>> env["ANABRANCH_ROLE"], env["RANK"], env["WORLD_SIZE"], "MASTER_PORT" in env
    ('expert', '1', '2', False)
    """
    env = {name: value for name, value in base.items() if name not in _RENDEZVOUS}
    env |= {
        "ANABRANCH_ROLE": "expert",
        "ANABRANCH_WORKERS": str(workers),
        LINGER_VARIABLE: str(LINGER_SECONDS),
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(experts),
        "LOCAL_WORLD_SIZE": str(experts),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": run_id,
    }
    if listen is not None:
        env[LISTEN_VARIABLE] = listen
    env.setdefault("OMP_NUM_THREADS", str(threads))
    return env


def worker_environment(
    rank: int,
    workers: int,
    *,
    run_id: str,
    store_port: int,
    error_file: Path,
    base: Mapping[str, str],
    experts: int = 0,
    meeting: Path | None = None,
) -> dict[str, str]:
    """Return the whole environment of worker ``rank``: ``base``, overridden by torchrun's variables.

    >>> env = worker_environment(1, 2, run_id="x", store_port=29500, error_file=Path("/tmp/e"), base={})
    >>> env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["MASTER_PORT"]
    ('1', '2', '1', '29500')

    ``OMP_NUM_THREADS`` stays as the user set it. Otherwise several workers and experts share the cores evenly, where
    torch would give each of them all cores, and torchrun one. A single worker is left to torch, as under plain
    ``python``.
    """
    env = dict(base)
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "worker",
        JOB_VARIABLE: run_id,
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store_port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }
    if meeting is not None:
        env[MEETING_VARIABLE] = str(meeting)
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if workers + experts > 1:
        env.setdefault("OMP_NUM_THREADS", str(threads_each(workers + experts)))
    return env


def threads_each(processes: int) -> int:
    """Return the number of compute threads for each of this many processes."""
    return max(1, len(os.sched_getaffinity(0)) // processes)
