"""The environment of a process: torchrun's variables, so that a script runs the same under either, and where
the services of the job are.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from anabranch.job import JOB_VARIABLE, MEETING_VARIABLE
from anabranch.launch.spec import JobSpec
from anabranch.transport.certificates import KEYS_VARIABLE

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
    spec: JobSpec, index: int, *, run_id: str, base: Mapping[str, str], listen: str | None = None
) -> dict[str, str]:
    """Return the whole environment of the expert process ``index``: it has its rank among the experts, but no worker's.

    ``listen``: where it listens unless its script says so.
    """
    env = {name: value for name, value in base.items() if name not in _RENDEZVOUS}
    env |= {
        "ANABRANCH_ROLE": "expert",
        "ANABRANCH_WORKERS": str(spec.workers),
        LINGER_VARIABLE: str(LINGER_SECONDS),
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(spec.experts),
        "LOCAL_WORLD_SIZE": str(spec.experts),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": run_id,
    }
    if listen is not None:
        env[LISTEN_VARIABLE] = listen
    env.setdefault("OMP_NUM_THREADS", str(threads_each(spec.workers + spec.experts)))
    return env


def worker_environment(
    spec: JobSpec,
    rank: int,
    *,
    run_id: str,
    master: tuple[str, int],
    base: Mapping[str, str],
    meeting: Path | None = None,
) -> dict[str, str]:
    """Return the whole environment of worker ``rank``: ``base``, overridden by torchrun's variables.

    ``OMP_NUM_THREADS`` stays as the user set it. Otherwise several workers and experts share the cores evenly, where
    torch would give each of them all cores, and torchrun one. A single worker is left to torch, as under plain
    ``python``.

    Args:
        spec: the job.
        rank: the worker's.
        run_id: of the attempt.
        master: where the store listens for scripts that make their own process group.
        base: what all processes have.
        meeting: the file through which the workers meet; ``None`` where they do not share a machine.
    """
    env = dict(base)
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "worker",
        JOB_VARIABLE: run_id,
        "WORLD_SIZE": str(spec.workers),
        "LOCAL_WORLD_SIZE": str(spec.workers),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(spec.workers),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": os.path.join(tempfile.gettempdir(), f"anabranch-{run_id}-{rank}.json"),
    }
    if meeting is None:  # a rank has its actor, and so its GPU, for itself
        alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env |= alone | {"GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": str(spec.workers)}
    else:
        env[MEETING_VARIABLE] = str(meeting)
        env["TORCHELASTIC_ERROR_FILE"] = str(meeting.with_name(f"error-{rank}.json"))
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if spec.workers + spec.experts > 1 and meeting is not None:
        env.setdefault("OMP_NUM_THREADS", str(threads_each(spec.workers + spec.experts)))
    return env


def threads_each(processes: int) -> int:
    """Return the number of compute threads for each of this many processes."""
    return max(1, len(os.sched_getaffinity(0)) // processes)
