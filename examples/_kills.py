"""Kills an expert process and a worker of its own job while that trains, and says how long each was missed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from _run import write_whole

import anabranch as ab


def leave_pid(out: Path, who: str) -> None:
    """Write down which process has this role."""
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / f"{who}.pid", str(os.getpid()))


class Kills:
    """``kill -9`` of the last expert process and of the last worker, once in a run, by rank 0.

    An expert process is missed until the restarted one serves: the others train on without it. A worker is missed until
    the step behind the one at which it was killed is done: another takes its place, or the job goes back to its
    checkpoint.

    Args:
        out: where the run is kept, with the processes' pids and what was killed.
        at: after which step, by the process.
        missing: the number of experts that are not in use.
        say: shows a line.
        fresh: nobody was killed in an earlier part of the run.
    """

    def __init__(
        self, out: Path, at: dict[str, int], missing: Callable[[], int], say: Callable[[str], None], *, fresh: bool
    ) -> None:
        self._out = out
        self._at = at
        self._missing = missing
        self._say = say
        self._path = out / "killed.json"
        known = self._path.exists() and not fresh
        self._killed: dict[str, dict[str, float]] = json.loads(self._path.read_text()) if known else {}

    @property
    def missed(self) -> dict[str, float]:
        """How long each was missed, in seconds."""
        return {who: round(facts["missed"], 1) for who, facts in self._killed.items() if "missed" in facts}

    def after(self, step: int) -> None:
        """Kill who is to be killed after ``step``, and look who is back."""
        for who, facts in self._killed.items():
            if "missed" not in facts and self._is_back(who, facts, step):
                facts["missed"] = time.time() - facts["at"]
                self._keep()
                self._say(f"{who} was missed for {facts['missed']:.1f} s, until step {step} was done")
        for who in [who for who, at in self._at.items() if at == step and who not in self._killed]:
            pid = self._pid(who)
            self._killed[who] = {"pid": pid, "step": step, "at": time.time()}
            self._keep()  # first: a restarted job reads it
            self._say(f"step {step}: kill -9 {pid}, which is {who}")
            os.kill(pid, signal.SIGKILL)

    def _is_back(self, who: str, facts: dict[str, float], step: int) -> bool:
        if who.startswith("worker"):
            return step > facts["step"]
        return self._pid(who) != facts["pid"] and not self._missing()

    def _pid(self, who: str) -> int:
        return int((self._out / f"{who}.pid").read_text())

    def _keep(self) -> None:
        write_whole(self._path, json.dumps(self._killed))


def plan_of_kills(job: ab.Job, steps: int) -> dict[str, int]:
    """Return which processes are killed, each after a step; never a lone worker."""
    at = {f"expert {job.experts - 1}": steps * 3 // 8} if job.experts else {}
    return at | ({f"worker {job.world_size - 1}": steps * 33 // 64} if job.world_size > 1 else {})
