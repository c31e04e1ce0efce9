"""What a worker finds in its environment: torchrun's variables, so that a script cannot tell who started it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["worker_environment"]


def worker_environment(
    rank: int, workers: int, *, run_id: str, store_port: int, error_file: Path, base: Mapping[str, str]
) -> dict[str, str]:
    """The whole environment of worker ``rank``: ``base``, overridden by torchrun's variables.

    >>> env = worker_environment(1, 2, run_id="x", store_port=29500, error_file=Path("/tmp/e"), base={})
    >>> env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["MASTER_PORT"]
    ('1', '2', '1', '29500')

    ``OMP_NUM_THREADS`` stays as the user set it. Otherwise several workers share the cores evenly, where torch would
    give each of them all cores, and torchrun one. A lone worker is left to torch, as under plain ``python``.
    """
    env = dict(base)
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "worker",
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
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if workers > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))
    return env
