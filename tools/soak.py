"""Kills or freezes random processes of training jobs, and checks that the jobs keep what they promise.

::

    python tools/soak.py [--every 20,60] [--minutes 3] [--modes AllReduce,PS,Hybrid] [--kills 10] [--seed N]

First a job for each of ``--every``: a random worker, server or expert is killed or frozen every so many seconds; its
goodput is the steps kept, of those that the time would have been enough for at the rate of its first 30
seconds, which nothing disturbs. Then a job for each of ``--modes``, without experts, of which one or two workers at a
time are killed or frozen every few seconds; its parameters are compared with the undisturbed run's.

The jobs are ``soak_job.py`` on real processes, found by their names as ``ps`` shows them. Ends with a table, and with 1
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
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import safetensors.torch
import soak_job
import torch.utils.data

ROLES = ("worker", "parameters", "expert")
UNDISTURBED_SECONDS = 30.0
RECOVERY_SECONDS = 60.0
"""The longest that a job may be without a step, on a machine that others use, too."""

SHORTEST_WATCHED_SECONDS = 20.0
SETTLED_SECONDS = 25.0
MORE_DESCRIPTORS = 8
MORE_THREADS = 4
MORE_MEMORY = 0.10  # and so many bytes:
MORE_BYTES = 16 << 20
FORMER_GROUPS = 16  # descriptors and threads of a worker whose last memberships' collectives have not ended yet
LARGEST_DIFFERENCE = 1e-12

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

    def has_grown_since(self, first: Reading, more: int) -> bool:
        return (
            self.descriptors > first.descriptors + MORE_DESCRIPTORS + more
            or self.threads > first.threads + MORE_THREADS + more
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
        return watched and self.last.has_grown_since(self.first, FORMER_GROUPS if self.role == "worker" else 0)


class Job:
    """A running job: its launcher, and the processes that it has."""

    def __init__(self, out: Path, mode: str, workers: int, servers: int, experts: int) -> None:
        self.out, self.workers = out, workers
        (out / "tmp").mkdir(parents=True)
        roles = ["--workers", str(workers), "--servers", str(servers), "--experts", str(experts)]
        patience = ["--min-workers", "1", "--worker-restarts", "1000/60s", "--service-restarts", "1000/60s"]
        command = [sys.executable, "-m", "anabranch.cli", "run", *roles, "--durability", "log", *patience]
        program = [str(Path(__file__).with_name("soak_job.py")), str(out), "--mode", mode]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(out / "tmp")}
        with (out / "screen.txt").open("wb") as screen:
            self.launcher = subprocess.Popen(
                [*command, "--log-dir", str(out / "logs"), *program],
                stdout=screen,
                stderr=screen,
                env=environment,
                process_group=0,
            )
        self.lives: dict[int, Life] = {}

    def processes(self) -> dict[str, int]:
        """Return the process of each role by its name, ``worker-0``."""
        named = {}
        for path in Path(f"/proc/{self.launcher.pid}/task").glob("*/children"):
            for pid in map(int, path.read_text().split()):
                with suppress(OSError):
                    named[Path(f"/proc/{pid}/comm").read_text().strip()] = pid
        return named

    def watch(self) -> None:
        """Take a reading of each, once the job trains: before, a busy machine may import and compile for a minute."""
        now = time.monotonic()
        for name, pid in {"launcher": self.launcher.pid, **self.processes()}.items() if self.step() else ():
            if not _NAME.fullmatch(name) and name not in ("launcher", "fork-server"):
                continue
            if pid not in self.lives or self.lives[pid].name != name:  # a fork has its server's name for a moment
                self.lives[pid] = Life(name, now)
            self.lives[pid].read(pid, now)

    def steps(self) -> dict[str, int]:
        """Return the newest step that each worker has written down at the end of its record."""
        newest = Counter[str]()
        for path in self.out.glob("record-*"):
            name = path.name.replace("record", "worker")
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 2000))
                for line in file.read().split(b"\n")[1:-1]:
                    newest[name] = max(newest[name], json.loads(line).get("step", 0) - (b'"doing"' in line))
        return newest

    def step(self) -> int:
        """Return the newest of these steps."""
        return max(self.steps().values(), default=0)

    def wait_for_steps(self, steps: int) -> bool:
        """Return True if so many more steps were done before the job's time for recovering was over."""
        goal, until = self.step() + steps, time.monotonic() + RECOVERY_SECONDS
        while self.step() < goal:
            if time.monotonic() > until or self.launcher.poll() is not None:
                return False
            self.watch()
            time.sleep(0.05)
        return True

    def member(self, chance: random.Random) -> str:
        """Return a worker that has the state: not all others are newcomers as long as it is spared."""
        steps, processes = self.steps(), self.processes()
        newest = max(steps.values(), default=0)
        return chance.choice([one for one in sorted(steps) if one in processes and steps[one] >= newest] or [""])

    def strike(self, role: str, spared: str, chance: random.Random) -> str:
        """Kill or freeze a random process of the role, but one; return what was done, ``""`` if none is there."""
        there = {name: pid for name, pid in self.processes().items() if name.rpartition("-")[0] == role}
        there.pop(spared, None)
        if not there:
            return ""
        name = chance.choice(sorted(there))
        freezes = chance.random() < 0.5
        with suppress(ProcessLookupError):
            os.kill(there[name], signal.SIGSTOP if freezes else signal.SIGKILL)
        what = "froze" if freezes else "killed"
        print(f"{time.strftime('%H:%M:%S')} {what} {name} at step {self.step()}", flush=True)
        return f"{role} {'frozen' if freezes else 'killed'}"

    def end(self) -> int | None:
        """Let it finish its step and end; return its exit code, or None if it did not end."""
        self.launcher.terminate()
        try:
            return self.launcher.wait(RECOVERY_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def remains(self) -> list[str]:
        """Return what is left of it: processes, and files of its private folder, as sockets."""
        mark, living = f"TMPDIR={self.out / 'tmp'}".encode(), list[str]()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    living.append(f"process {process.name}")
        return living + [str(path) for path in (self.out / "tmp").rglob("*") if not path.is_dir()]


@dataclass
class Result:
    """All that is shown of a job.

    Attributes:
        name: of its column.
        strikes: how often what was done.
        steps: that it has kept.
        again: of them, interrupted and done again.
        memberships: that there were.
        missing, twice: samples that the last doing of a step has not, or more than once.
        lost, doubled: updates that the counting table lacked, or had too many, when it was last looked at.
        checks: how often it was looked at.
        goodput: the steps kept, of those at the undisturbed rate.
        gap: the longest time between two steps, in seconds.
        longest: the longest step.
        difference: the largest of the parameters from the undisturbed run's; ``None`` with experts.
        trouble: what else was wrong.
    """

    name: str
    seconds: float = 0.0
    strikes: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    again: int = 0
    memberships: int = 0
    missing: int = 0
    twice: int = 0
    lost: int = 0
    doubled: int = 0
    checks: int = 0
    goodput: float | None = None
    gap: float = 0.0
    longest: float = 0.0
    difference: float | None = None
    lives: list[Life] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)

    def read(self, records: Sequence[Sequence[dict[str, Any]]], batches: Iterable[list[int]]) -> None:
        """Count what the workers have written down, each its own."""
        doings: dict[int, dict[int, list[int]]] = {}
        times: dict[int, float] = {}
        looks = dict[int, dict[str, int]]()
        ends = [line for lines in records for line in lines if line["event"] == "end"]
        for worker, lines in enumerate(records):
            for line in lines:
                if line["event"] == "doing":
                    of_step = doings.setdefault(line["step"], {})
                    of_step.setdefault(line["number"], []).extend(line["ids"])
                elif line["event"] == "step":
                    times[line["step"]] = min(line["time"], times.get(line["step"], line["time"]))
                    self.longest = max(self.longest, line["seconds"])
                elif line["event"] == "check":
                    self.checks += 1
                    looks[worker] = line
        self.steps = max(times, default=0)
        self.again = max((line["again"] for line in ends), default=0)
        self.memberships = max((line["memberships"] for line in ends), default=0)
        self.lost, self.doubled = (sum(line[what] for line in looks.values()) for what in ("lost", "twice"))
        for step, batch in zip(range(1, self.steps + 1), batches, strict=False):
            done = Counter(doings[step][max(doings[step])] if step in doings else ())
            self.missing += len(batch) - sum(1 for one in batch if done[one])
            self.twice += done.total() - sum(1 for one in batch if done[one])
        ordered = [times[step] for step in sorted(times)]
        self.gap = max((later - before for before, later in pairwise(ordered)), default=0.0)
        if len({line["step"] for line in ends}) != 1 or ends[0]["step"] != self.steps:
            self.trouble.append(f"the workers ended at steps {[line['step'] for line in ends]}, of {self.steps}")

    def take_goodput(self, began: float, struck: float, records: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Compare the rate from ``struck`` on with that from ``began`` to there."""
        times: dict[int, float] = {}
        for line in (line for lines in records for line in lines if line["event"] == "step"):
            times[line["step"]] = min(line["time"], times.get(line["step"], line["time"]))
        before = [at for at in times.values() if began <= at < struck]
        after = [at for at in times.values() if at >= struck]
        if len(before) > 1 and after:
            rate = (len(before) - 1) / (max(before) - min(before))
            self.goodput = len(after) / (rate * (max(after) - struck))

    def broken(self) -> list[str]:
        """Return the promises that were broken, a line each."""
        lines = list(self.trouble)
        if self.missing or self.twice:
            lines.append(f"{self.missing} samples are missing, and {self.twice} were counted twice")
        if self.lost or self.doubled:
            lines.append(f"{self.lost} acknowledged updates are lost, and {self.doubled} were applied twice")
        if not self.checks:
            lines.append("nobody has looked at the counting table")
        if self.difference is not None and not self.difference <= LARGEST_DIFFERENCE:
            lines.append(f"a parameter differs by {self.difference:.2g} from the undisturbed run's")
        if self.longest > 2 * soak_job.STEP_SECONDS:
            lines.append(f"a step took {self.longest:.1f} s")
        if self.gap > RECOVERY_SECONDS:
            lines.append(f"{self.gap:.1f} s without a step, more than {RECOVERY_SECONDS:.0f}")
        grown = [life for life in self.lives if life.has_grown]
        lines += [f"{life.name} grew in {life.seconds:.0f} s: {life.first} -> {life.last}" for life in grown]
        return [f"{self.name}: {line}" for line in lines]


def table(results: Sequence[Result]) -> str:
    """Return the jobs side by side, in at most 80 columns, and the longest lives of their processes."""

    def row(label: str, values: Iterable[object]) -> str:
        return f"{label:<30}" + "".join(f"{value:>10}" for value in values)

    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    struck = [f"{role} {what}" for role in ROLES for what in ("killed", "frozen")]
    lines = [
        row("", [one.name for one in results]),
        row("seconds", [f"{one.seconds:.0f}" for one in results]),
        *(row(what, [one.strikes[what] for one in results]) for what in struck),
        row("steps kept", [f"{one.steps:,}" for one in results]),
        row("steps done again", [one.again for one in results]),
        row("memberships of the workers", [one.memberships for one in results]),
        row("samples missing, twice", [f"{one.missing}, {one.twice}" for one in results]),
        row("updates lost, twice", [f"{one.lost}, {one.doubled}" for one in results]),
        row("looks at the table", [one.checks for one in results]),
        row("largest difference", [shown(one.difference, ".1e") for one in results]),
        row("longest time without a step", [f"{one.gap:.1f} s" for one in results]),
        row("goodput", [shown(one.goodput, ".1%") for one in results]),
        "",
        "               lives  longest   descriptors     threads    memory, MB",
        "                                first  last  first last   first  last",
    ]
    for role in ("launcher", "fork-server", *ROLES):
        lives = [life for one in results for life in one.lives if life.role == role]
        text = f"{role:<15}{len(lives):>5}"
        longest = max(lives, key=lambda life: life.seconds, default=None)
        if longest is not None and longest.first and longest.last:
            a, b = longest.first, longest.last
            text += f"{longest.seconds:>7.0f} s{a.descriptors:>8}{b.descriptors:>6}{a.threads:>7}{b.threads:>5}"
            text += f"{a.memory / 1e6:>8.0f}{b.memory / 1e6:>6.0f}"
        lines.append(text)
    return "\n".join(lines)


def difference(trained: Path, steps: int) -> float:
    """Return how far the exported parameters are from those of the plain loop after so many steps."""
    model = soak_job.Model()
    optimizers, samples = soak_job.optimizers_of(model), soak_job.Samples()
    for ids in islice(soak_job.batches(), steps):
        batch = torch.utils.data.default_collate([samples[one] for one in ids])
        for optimizer in optimizers:
            optimizer.zero_grad()
        soak_job.loss(model, batch).backward()
        with torch.sparse.check_sparse_tensor_invariants(False):  # PyTorch warns where nobody has chosen
            for optimizer in optimizers:
                optimizer.step()
    theirs = safetensors.torch.load_file(trained / "model.safetensors")
    return max(float((theirs[name] - value).abs().max()) for name, value in model.state_dict().items())


def read_records(out: Path) -> list[list[dict[str, Any]]]:
    """Return the whole lines of each worker, in order."""
    paths = sorted(out.glob("record-*"))
    return [[json.loads(line) for line in path.read_bytes().split(b"\n")[:-1] if line] for path in paths]


def run(result: Result, job: Job, chance: random.Random, *, seconds: float, every: float, kills: int) -> None:
    """Disturb a job: for so many seconds every so many, or with so many kills of workers; then let it end."""
    began, disturbed = time.monotonic(), 0.0
    if not job.wait_for_steps(1):
        result.trouble.append("no first step")
    first = time.monotonic()
    due = first + (UNDISTURBED_SECONDS if seconds else 1.0)
    while result.strikes.total() < kills or (seconds and time.monotonic() < first + seconds):
        if time.monotonic() >= due:
            disturbed = disturbed or due
            spared = job.member(chance)
            for _ in range(1 if seconds else chance.choice([1, 1, 2])):
                result.strikes[job.strike(chance.choice(ROLES) if seconds else "worker", spared, chance)] += 1
            del result.strikes[""]
            if not job.wait_for_steps(5):
                break
            due = due + every if seconds else time.monotonic() + chance.uniform(0.5, 4.0)
        job.watch()
        time.sleep(min(0.5, max(0.0, due - time.monotonic())))
        if job.launcher.poll() is not None:
            result.trouble.append("the launcher ended by itself")
            break
    if not job.wait_for_steps(5):
        result.trouble.append(f"no more steps within {RECOVERY_SECONDS:.0f} s")
    job.watch()
    code = job.end()
    if code != 0:
        result.trouble.append("the job did not end" if code is None else f"the job ended with {code}")
    result.seconds, result.lives = time.monotonic() - began, list(job.lives.values())
    result.trouble += [f"{what} is left" for what in job.remains()]
    records = read_records(job.out)
    result.read(records, soak_job.batches())
    if seconds and disturbed:
        result.take_goodput(first, disturbed, records)
    if not seconds and not result.trouble:
        result.difference = difference(job.out / "trained", result.steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", default="20,60", help="seconds between two strikes, of a job each; may be empty")
    parser.add_argument("--minutes", type=float, default=3.0, help="of each of these jobs")
    parser.add_argument("--modes", default="AllReduce,PS,Hybrid", help="of a job each; may be empty")
    parser.add_argument("--kills", type=int, default=10, help="in each of these")
    parser.add_argument("--seed", type=int, default=None, help="what is struck when; one that is printed by default")
    parser.add_argument("--out", type=Path, default=None, help="a new folder; a temporary one by default")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10_000) if options.seed is None else options.seed
    out = Path(tempfile.mkdtemp(prefix="soak-")) if options.out is None else options.out
    print(f"seed {seed}; records and logs in {out}", flush=True)
    chance, results = random.Random(seed), list[Result]()
    jobs = [(f"{every} s", "Hybrid", (3, 1, 2), float(every)) for every in options.every.split(",") if every]
    jobs += [(mode, mode, (4, 0 if mode == "AllReduce" else 2, 0), 0.0) for mode in options.modes.split(",") if mode]
    for number, (name, mode, sizes, every) in enumerate(jobs):
        print(f"--- {name}", flush=True)
        results.append(Result(name))
        job = Job(out / str(number), mode, *sizes)
        try:
            seconds, kills = (options.minutes * 60, 0) if every else (0.0, options.kills)
            run(results[-1], job, chance, seconds=seconds, every=every, kills=kills)
        finally:
            if job.launcher.poll() is None:
                job.launcher.kill()
                job.launcher.wait()
    print(f"\nseed {seed}\n\n{table(results)}\n")
    broken = [line for one in results for line in one.broken()]
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
