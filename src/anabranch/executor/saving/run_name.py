"""``RunName``: the run that a checkpoint belongs to, so that two runs do not save over each other's.

A run is one start of ``anabranch run``, restarts and new members included; else one Executor. It may also save where
the newest checkpoint is one that it has loaded, which it continues, or an earlier one of that run. So the one of two
that comes later is refused, also if it has loaded what the other has saved over since.
"""

from __future__ import annotations

import os
import socket
import sys
import uuid
from datetime import datetime
from pathlib import Path
from typing import Any

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
        self._continued: dict[str, int] = {}  # by a run's name, up to when its checkpoints are this one's too

    def state(self) -> dict[str, Any]:
        """Return the entry of a checkpoint."""
        return {"name": self._name, "by": self._by, "continues": self._continued}

    def known(self) -> list[Any]:
        """Return which checkpoints of others this run continues."""
        return [sorted(self._loaded), self._continued]

    def know(self, known: list[Any]) -> None:
        """Continue these, which another worker's run does: a newcomer."""
        self._loaded, self._continued = {*known[0]}, known[1]

    def take_over(self, state: object, written: set[int]) -> None:
        """Continue the run that saved ``state``, and those that it has continued.

        Args:
            state: of the checkpoint that was loaded.
            written: when the checkpoints in its folder were; what that run saved before then to other folders
                (``best`` beside ``last``) is continued too.
        """
        self._loaded |= written
        run = _run_of(state)
        if name := run.get("name"):
            for each, until in {**run.get("continues", {}), name: max(written, default=0)}.items():
                self._continued[each] = max(until, self._continued.get(each, 0))

    def check(self, place: Place, newest: Manifest) -> None:
        """Raise ``CheckpointError`` if the ``newest`` checkpoint in ``place`` is neither this run's nor was loaded."""
        run = _run_of(newest.state)
        name = run.get("name", "")
        if newest.written in self._loaded or name == self._name or newest.written <= self._continued.get(name, 0):
            return
        by = f"another run ({run['by']})" if "by" in run else "something other than an Executor"
        when = datetime.fromtimestamp(newest.written / 1e9).isoformat(" ", "seconds")
        raise CheckpointError(
            f"cannot save to {place}: its newest checkpoint, of step {newest.step}, was saved by {by} at {when} and "
            "would be replaced; save to another folder, call resume or load to continue that run, or move it away"
        )


def _run_of(state: object) -> dict[str, Any]:
    run = state.get("run") if isinstance(state, dict) else None
    return run if isinstance(run, dict) else {}
