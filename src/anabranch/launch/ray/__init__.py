"""Jobs on a Ray cluster: the same roles, decisions and exit codes as on one machine. Ray is imported when one is run.

Open ``ray_engine.py`` first; ``role_actor.py`` runs on the nodes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from anabranch.launch.python_program import PythonProgram
from anabranch.launch.ray.ray_engine import RayError, check_resources, launch_on_ray
from anabranch.launch.spec import JobSpec, Resources
from anabranch.launch.supervision.budget import RestartBudget

__all__ = ["RayError", "launch_on_ray", "run"]


def run(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    workers: int | tuple[int, int] = 1,
    servers: int = 0,
    experts: int = 0,
    address: str | None = None,
    resources: Resources | None = None,
    max_restarts: int = 0,
    min_workers: int | None = None,
    worker_restarts: str = "3/600s",
) -> int:
    """Run a script as a job on a Ray cluster, and return its exit code: 0, 1, or 130 on Ctrl-C.

    Args:
        script: the Python file, below the current directory, which is shipped to the nodes.
        args: its ``sys.argv[1:]``.
        workers: how many workers; ``(N, MAX)`` begins with N, and others join whenever the cluster has room for them.
        servers: how many parameter servers.
        experts: how many processes that serve experts.
        address: ``HOST:PORT`` of the head node; by default ``RAY_ADDRESS``, or a cluster of this machine.
        resources: the Ray resources of each role, such as ``{"worker": {"CPU": 2, "GPU": 1}}``.
        max_restarts: how often a job that fails is restarted.
        min_workers: with fewer left of those that are lost, the others wait for replacements; by default ``workers``.
        worker_restarts: how often a lost worker is replaced, as ``N/SECONDSs``.

    Raises:
        ValueError: invalid numbers or resources, or a script that does not exist.
        RayError: the cluster cannot be reached, or cannot run the job; names the cure.
        ModuleNotFoundError: without the extra ``ray``.
    """
    least, most = workers if isinstance(workers, tuple) else (workers, None)
    with tempfile.TemporaryDirectory(prefix="anabranch-logs-") as folder:
        spec = JobSpec(
            program=PythonProgram(str(script), tuple(map(str, args))),
            log_dir=Path(folder),
            workers=least,
            max_workers=most,
            servers=servers,
            experts=experts,
            max_restarts=max_restarts,
            min_workers=min_workers,
            worker_restarts=RestartBudget.parse(worker_restarts),
            live=True,
            resources=check_resources(resources or {}),
        )
        outcome = launch_on_ray(spec, _tell, address=address)
        first = outcome.first_failure
        if first is not None:
            _tell(f"{first.describe()}\n{first.last_words()}")
    return outcome.exit_code


def _tell(line: str) -> None:
    sys.stderr.write(f"anabranch: {line}\n")
    sys.stderr.flush()
