"""Kills a random process of a training job every few seconds, and checks that the job keeps what it promises.

::

    python tools/soak.py [--minutes 10] [--every 20] [--seed N]
    python tools/soak.py --kills parameters,worker --steps 40      those, each so many steps after the one before

The job is ``soak_job.py`` on real processes, found by their names as ``ps`` shows them. Ends with a table, and with 1
if a promise was broken: then everything that was written is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from soak_job import STEP_SECONDS

ROLES = ("worker", "parameters", "expert", "rendezvous")
RECOVERY_SECONDS = 60.0
"""The longest that a job may be without a step: a whole restart, on a machine that others use, too."""

SETTLED_SECONDS = 25.0
SHORTEST_WATCHED_SECONDS = 20.0
MORE_DESCRIPTORS = 8
MORE_THREADS = 4
MORE_MEMORY = 0.10  # and so many bytes:
MORE_BYTES = 16 << 20

_NAME = re.compile(rf"({'|'.join(ROLES)})-(\d+)")


@dataclass(frozen=True)
class Reading:
    """What a process holds at one moment."""

    descriptors: int
    threads: int
    memory: int

    @classmethod
    def of(cls, pid: int) -> Reading | None:
        process = Path(f"/proc/{pid}")
        try:
            fields = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
            return cls(
                len(os.listdir(process / "fd")), int(fields["Threads"]), int(fields["RssAnon"].split()[0]) * 1024
            )
        except (OSError, KeyError):  # it has just ended
            return None

    def has_grown_since(self, first: Reading) -> bool:
        return (
            self.descriptors > first.descriptors + MORE_DESCRIPTORS
            or self.threads > first.threads + MORE_THREADS
            or self.memory > first.memory * (1 + MORE_MEMORY) + MORE_BYTES
        )


@dataclass
class Life:
    """One process from when it had settled to its end."""

    name: str
    since: float
    first: Reading | None = None
    last: Reading | None = None
    seconds: float = 0.0

    @property
    def role(self) -> str:
        return self.name.rpartition("-")[0] if _NAME.fullmatch(self.name) else self.name

    def read(self, pid: int, now: float) -> None:
        reading = Reading.of(pid) if now - self.since >= SETTLED_SECONDS else None
        if reading is not None:
            self.first = self.first or reading
            self.last = reading
            self.seconds = now - self.since - SETTLED_SECONDS

    @property
    def has_grown(self) -> bool:
        watched = self.first is not None and self.last is not None and self.seconds >= SHORTEST_WATCHED_SECONDS
        return watched and self.last.has_grown_since(self.first)


class Job:
    """The running job: its launcher, and the processes that it has."""

    def __init__(self, out: Path, workers: int, servers: int, experts: int) -> None:
        self.out = out
        roles = ["--workers", str(workers), "--servers", str(servers), "--experts", str(experts)]
        patience = ["--max-restarts", "100000", "--service-restarts", "1000/60s"]
        command = [sys.executable, "-m", "anabranch.cli", "run", *roles, "--durability", "log", *patience]
        command += ["--log-dir", str(out / "logs"), str(Path(__file__).with_name("soak_job.py")), str(out)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        with (out / "screen.txt").open("wb") as screen:
            self.launcher = subprocess.Popen(command, stdout=screen, stderr=screen, env=environment, process_group=0)
        self.lives: dict[int, Life] = {}
        self._records: dict[int, Record] = {}
        self._workers = workers

    def processes(self) -> dict[str, int]:
        """Return the process of each role by its name, ``worker-0``."""
        found = {}
        for path in Path(f"/proc/{self.launcher.pid}/task").glob("*/children"):
            for pid in map(int, path.read_text().split()):
                with suppress(OSError):
                    found[Path(f"/proc/{pid}/comm").read_text().strip()] = pid
        return found

    def watch(self) -> None:
        """Take a reading of each."""
        now = time.monotonic()
        for name, pid in {"launcher": self.launcher.pid, **self.processes()}.items():
            if not _NAME.fullmatch(name) and name not in ("launcher", "fork-server"):
                continue
            if pid not in self.lives or self.lives[pid].name != name:  # a fork has its server's name for a moment
                self.lives[pid] = Life(name, now)
            self.lives[pid].read(pid, now)

    def records(self) -> list[Record]:
        """Return what each worker has written down by now."""
        for rank in range(self._workers):
            self._records.setdefault(rank, Record()).follow(self.out / f"record-{rank}.jsonl")
        return list(self._records.values())

    def kill(self, name: str) -> bool:
        """Kills one process; False if it is not there."""
        pid = self.processes().get(name)
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return True

    def end(self) -> int | None:
        """Lets it finish its step and end; its exit code, or None if it did not end."""
        self.launcher.terminate()
        try:
            return self.launcher.wait(RECOVERY_SECONDS)
        except subprocess.TimeoutExpired:
            return None


@dataclass
class Record:
    """What one worker wrote down, counted.

    Attributes:
        done: steps that it has done, those done again counted again.
        again: steps that were done again, because the job went back to a checkpoint.
        step: where it stands.
        saved: the step of the last checkpoint that it was told of.
        lost: updates that the table lacked when it was last looked at.
        doubled: updates that the table had too many.
        checks: how often it was looked at.
        forgotten: checkpoints that were there, and were not when the job went back to them.
        gap: the longest time between two steps, in seconds.
        longest: the longest step.
        late: steps over their deadline.
        ended: whether it came to its end by itself.
        pauses: seconds from each step to the next.
    """

    done: int = 0
    again: int = 0
    step: int = 0
    saved: int = 0
    lost: int = 0
    doubled: int = 0
    checks: int = 0
    forgotten: int = 0
    gap: float = 0.0
    longest: float = 0.0
    late: int = 0
    ended: bool = False
    pauses: list[float] = field(default_factory=list)
    _before: float | None = None
    _read: int = 0

    @property
    def goodput(self) -> float:
        """The steps kept, of those that the time from the first to the last is enough for at the usual pace."""
        kept = len(self.pauses) - self.again
        return kept * statistics.median(self.pauses) / sum(self.pauses) if self.pauses else 0.0

    def follow(self, path: Path) -> None:
        """Read what was written since."""
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                self.take(json.loads(line))

    def take(self, line: dict[str, float | str]) -> None:
        event, step, now = str(line["event"]), int(line["step"]), float(line["time"])
        if event == "step":
            self.done += 1
            self.step = step
            if self._before is not None:
                self.pauses.append(now - self._before)
                self.gap = max(self.gap, self.pauses[-1])
            self._before = now
            self.longest = max(self.longest, float(line["seconds"]))
            self.late += float(line["seconds"]) > STEP_SECONDS
        elif event == "resume":
            self.again += max(0, self.step - step)
            self.forgotten += step < self.saved
            # One that was killed between its save and this line goes on from more than it had written down.
            self.done += max(0, step - self.step)
            self.step = step
        elif event == "save":
            self.saved = step
        elif event == "check":
            self.checks += 1
            self.lost += int(line["lost"])
            self.doubled += int(line["doubled"])
        elif event == "end":
            self.ended = True


@dataclass
class Result:
    """All that is told at the end."""

    seed: int
    seconds: float
    kills: Counter[str]
    records: list[Record]
    lives: list[Life]
    exit_code: int | None
    overdue: int
    trouble: list[str] = field(default_factory=list)

    def broken(self) -> list[str]:
        """Return the promises that were broken, a line each."""
        found = list(self.trouble)
        lost, doubled = sum(r.lost for r in self.records), sum(r.doubled for r in self.records)
        late = sum(record.late for record in self.records) + self.overdue
        gap = max(record.gap for record in self.records)
        if lost or doubled:
            found.append(f"{lost} acknowledged updates are lost and {doubled} were applied twice")
        if forgotten := sum(record.forgotten for record in self.records):
            found.append(f"{forgotten} whole checkpoints were not gone back to")
        if any(record.done - record.again != record.step for record in self.records):
            found.append("steps done, less those done again, are not the steps kept")
        if len({record.step for record in self.records}) != 1:
            found.append(f"the workers ended at different steps: {[record.step for record in self.records]}")
        if not all(record.ended and record.checks for record in self.records):
            found.append("not every worker came to its end and found its updates there")
        if self.exit_code != 0:
            found.append("the job did not end" if self.exit_code is None else f"the job ended with {self.exit_code}")
        if late:
            found.append(f"{late} waits went over their deadline")
        if gap > RECOVERY_SECONDS:
            found.append(f"{gap:.1f} s without a step, more than {RECOVERY_SECONDS:.0f}")
        grown = [life for life in self.lives if life.has_grown]
        return found + [f"{life.name} grew in {life.seconds:.0f} s: {life.first} -> {life.last}" for life in grown]

    def table(self) -> str:
        """At most 80 columns."""
        first, every = self.records[0], self.records
        lines = [
            f"seed {self.seed}, {self.seconds:.0f} s, {self.kills.total()} kills",
            "",
            f"steps kept                        {first.step:>9,}",
            f"steps done again after a restart  {first.again:>9,}",
            f"updates acknowledged              {sum(record.done for record in every):>9,}",
            f"updates lost                      {sum(record.lost for record in every):>9,}",
            f"updates applied twice             {sum(record.doubled for record in every):>9,}",
            f"looks at the table                {sum(record.checks for record in every):>9,}",
            f"goodput                           {min(r.goodput for r in every):>9.1%} of the steps without kills",
            f"longest time without a step       {max(r.gap for r in every):>9.1f} s, of {RECOVERY_SECONDS:.0f} allowed",
            f"longest step                      {max(r.longest for r in every):>9.1f} s, of {STEP_SECONDS:.0f} allowed",
            f"waits over their deadline         {sum(r.late for r in every) + self.overdue:>9,}",
            "",
            "               kills  lives  longest   descriptors     threads    memory, MB",
            "                                       first  last  first last   first  last",
        ]
        for role in ("launcher", "fork-server", *ROLES):
            lives = [life for life in self.lives if life.role == role]
            row = f"{role:<15}{self.kills[role]:>5}{len(lives):>7}"
            longest = max(lives, key=lambda life: life.seconds, default=None)
            if longest is not None and longest.first and longest.last:
                a, b = longest.first, longest.last
                row += f"{longest.seconds:>7.0f} s{a.descriptors:>8}{b.descriptors:>6}{a.threads:>7}{b.threads:>5}"
                row += f"{a.memory / 1e6:>8.0f}{b.memory / 1e6:>6.0f}"
            lines.append(row)
        return "\n".join(lines)


def soak(job: Job, kills: Sequence[str], steps: int, minutes: float, every: float, chance: random.Random) -> Result:
    """Kills, and looks on in between; ends the job."""
    result = Result(0, 0.0, Counter(), [], [], None, 0)
    began = time.monotonic()
    end = began + minutes * 60
    if _wait_for_steps(job, 1):
        due = time.monotonic() + every
        planned = list(kills)
        while planned or (not kills and time.monotonic() < end):
            if kills:
                if not _wait_for_steps(job, steps):
                    break
                _kill(job, planned.pop(0), chance, result.kills)
            elif time.monotonic() >= due:
                due += every
                _kill(job, chance.choice(ROLES), chance, result.kills)
            else:
                job.watch()
                time.sleep(min(1.0, max(0.0, due - time.monotonic())))
            if job.launcher.poll() is not None:
                result.trouble.append("the launcher ended by itself")
                break
    if not _wait_for_steps(job, 1 + steps):
        result.trouble.append(f"no more steps within {RECOVERY_SECONDS:.0f} s")
    job.watch()
    result.exit_code = job.end()
    result.seconds = time.monotonic() - began
    result.records = job.records()
    result.lives = list(job.lives.values())
    result.overdue = _overdue(job.out / "logs")
    return result


def _kill(job: Job, role: str, chance: random.Random, kills: Counter[str]) -> None:
    there = sorted(name for name in job.processes() if name.rpartition("-")[0] == role)
    if there and job.kill(name := chance.choice(there)):
        kills[role] += 1
        print(f"{time.strftime('%H:%M:%S')} killed {name} at step {job.records()[0].step}", flush=True)


def _wait_for_steps(job: Job, steps: int) -> bool:
    """Return True if every worker has done so many more steps before the job's time for recovering was over."""
    goal = [record.done + steps for record in job.records()]
    until = time.monotonic() + RECOVERY_SECONDS
    while any(record.done < done for record, done in zip(job.records(), goal, strict=True)):
        if time.monotonic() > until or job.launcher.poll() is not None:
            return False
        job.watch()
        time.sleep(0.05)
    return True


def _overdue(logs: Path) -> int:
    """How many errors say that a deadline has passed."""
    said = re.compile(rb"^anabranch\.errors\.DeadlineExceeded:", re.MULTILINE)
    return sum(len(said.findall(path.read_bytes())) for path in logs.glob("*.log"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=None, help="what is killed when; one that is printed by default")
    parser.add_argument("--kills", default="", help="roles, one after the other, in place of random ones")
    parser.add_argument("--steps", type=int, default=20, help="between --kills")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--experts", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None, help="a new folder; a temporary one by default")
    options = parser.parse_args()
    kills = [role for role in options.kills.split(",") if role]
    if unknown := set(kills) - set(ROLES):
        parser.error(f"--kills takes {', '.join(ROLES)}, got {', '.join(sorted(unknown))}")
    seed = random.SystemRandom().randrange(10_000) if options.seed is None else options.seed
    out = Path(tempfile.mkdtemp(prefix="anabranch-soak-")) if options.out is None else options.out
    out.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}; records and logs in {out}", flush=True)
    job = Job(out, options.workers, options.servers, options.experts)
    try:
        result = soak(job, kills, options.steps, options.minutes, options.every, random.Random(seed))
    finally:
        if job.launcher.poll() is None:
            job.launcher.kill()
            job.launcher.wait()
    result.seed = seed
    print(f"\n{result.table()}\n")
    broken = result.broken()
    for line in broken:
        print(f"BROKEN: {line}")
    if broken:
        print(f"all that was written is in {out}")
    else:
        print("every promise was kept")
        if options.out is None:
            shutil.rmtree(out)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
