"""``RunName``: the run that a checkpoint belongs to, so that two runs do not save over each other's.

A run is one start of ``anabranch run``, restarts and new members included; else one Executor. It may also save where
the newest checkpoint is one that it has loaded, which it continues. So the one of two that comes later is refused, also
if it has loaded what the other has saved over since.
"""

from __future__ import annotations

import os
import socket
import sys
import uuid
from datetime import datetime
from pathlib import Path

from anabranch.checkpoint.manifest import Manifest
from anabranch.checkpoint.storage import Place
from anabranch.errors import CheckpointError
from anabranch.job import JOB_VARIABLE, job


class RunName:
    """The name of one run, and the checkpoints of others that it has loaded.

    Args:
        shared: whether the workers of a job save together; else each has a name of its own.
    """

    def __init__(self, *, shared: bool) -> None:
        start = os.environ.get(JOB_VARIABLE)
        rank = "" if shared or job().world_size == 1 else f"-{job().rank}"
        self._name = uuid.uuid4().hex if start is None else start + rank
        self._by = f"{Path(sys.argv[0]).name or 'python'}, process {os.getpid()} on {socket.gethostname()}"
        self._loaded: set[int] = set()

    def state(self) -> dict[str, str]:
        """Return the entry of a checkpoint."""
        return {"name": self._name, "by": self._by}

    def take_over(self, written: set[int]) -> None:
        """Continue the run whose checkpoints, the one that was loaded among them, were ``written`` at these times."""
        self._loaded |= written

    def check(self, place: Place, newest: Manifest) -> None:
        """Raise ``CheckpointError`` if the ``newest`` checkpoint in ``place`` is neither this run's nor was loaded."""
        run = newest.state.get("run") if isinstance(newest.state, dict) else None
        if newest.written in self._loaded or (isinstance(run, dict) and run.get("name") == self._name):
            return
        by = f"another run ({run.get('by')})" if isinstance(run, dict) else "something other than an Executor"
        when = datetime.fromtimestamp(newest.written / 1e9).isoformat(" ", "seconds")
        raise CheckpointError(
            f"cannot save to {place}: its newest checkpoint, of step {newest.step}, was saved by {by} at {when} and "
            "would be replaced; save to another folder, call resume or load to continue that run, or move it away"
        )
