"""The environment of a process: torchrun's variables, so that a script runs the same under either, and where
the services of the job are.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

from anabranch.job import JOB_VARIABLE, MEETING_VARIABLE
from anabranch.transport.certificates import KEYS_VARIABLE

if TYPE_CHECKING:
    from anabranch.launch.job import Attempt, Site
    from anabranch.launch.supervision.outcome import Role

__all__ = ["LINGER_SECONDS", "LINGER_VARIABLE", "LISTEN_VARIABLE", "RUN_VARIABLE", "environment_of"]

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


def environment_of(attempt: Attempt, site: Site, role: Role, rank: int) -> dict[str, str]:
    """Return the whole environment of a process; an expert's rank is that among the experts.

    ``OMP_NUM_THREADS`` stays as the user set it. Otherwise several workers and experts share the cores evenly, where
    torch would give each of them all cores, and torchrun one. A single worker is left to torch, as under plain
    ``python``.
    """
    spec = attempt.spec
    env = {**attempt.base, "TORCHELASTIC_RUN_ID": attempt.run_id}
    if site.directory is not None:
        env |= {"ANABRANCH_DIRECTORY": site.directory, "ANABRANCH_EXPERTS": str(spec.experts)}
        if site.parameters:
            env["ANABRANCH_SERVERS"] = ",".join(site.parameters)
        if attempt.run is not None:
            env[RUN_VARIABLE] = attempt.run
        if site.keys is not None:
            env[KEYS_VARIABLE] = str(site.keys.absolute())
    if role == "parameters":
        return env
    count = str(spec.counts[role])
    env |= {"RANK": str(rank), "WORLD_SIZE": count, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": count}
    if role == "expert":
        env |= {"ANABRANCH_ROLE": "expert", "ANABRANCH_WORKERS": str(spec.workers)}
        env[LINGER_VARIABLE] = str(LINGER_SECONDS)
        if (listen := site.expert_listens(rank)) is not None:
            env[LISTEN_VARIABLE] = listen
        for name in _RENDEZVOUS:
            env.pop(name, None)
    else:
        env |= {
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "worker",
            "ROLE_WORLD_SIZE": count,
            JOB_VARIABLE: attempt.run_id,
            "MASTER_ADDR": site.master[0],
            "MASTER_PORT": str(site.master[1]),
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        errors = tempfile.gettempdir() if site.meeting is None else site.meeting.parent
        env["TORCHELASTIC_ERROR_FILE"] = os.path.join(errors, f"anabranch-{attempt.run_id}-{rank}.json")
        if site.meeting is None:  # a rank has its actor, and so its GPU, for itself
            env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": count}
        else:
            env[MEETING_VARIABLE] = str(site.meeting)
    if (processes := spec.workers + spec.experts) > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    return env
