"""What every run of an example does alike: its options, its place on disk, stopping when told to."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anabranch as ab
from anabranch.job import Grid

MODES = ("None", "AllReduce", "PS", "Hybrid", "auto")


@dataclass(frozen=True, slots=True)
class Team:
    """Who trains one model together: which share of a batch is this worker's, of how many, where the model is kept.

    ``leads`` is true of the one who writes there; ``grid`` is there if the shares are pipelines across workers.
    """

    mode: str
    rank: int
    workers: int
    out: Path
    leads: bool
    grid: Grid | None = None

    @property
    def comm_mode(self) -> str | None:
        """As the executor takes it."""
        return None if self.mode == "None" else self.mode

    def share(self, batch: int, what: str) -> int:
        """How much of a ``batch`` is this worker's."""
        if batch % self.workers:
            who = "pipelines" if self.grid else "workers"
            sys.exit(f"{what} {batch} cannot be shared equally by {self.workers} {who}; give a multiple of it")
        return batch // self.workers


def team_of(mode: str | None, out: Path, job: ab.Job, grid: Grid | None = None) -> Team:
    """By default the tables live on the servers if the job has any, and several workers average their gradients."""
    rank, workers = (grid.data_rank, grid.data) if grid else (job.rank, job.world_size)
    mode = mode or ("Hybrid" if job.servers else "AllReduce" if workers > 1 else "None")
    if mode == "None" and workers > 1:  # each trains a model of its own
        alone = out / f"{'pipeline' if grid else 'worker'}-{rank}"
        return Team(mode, 0, 1, alone, not grid or grid.pipeline_rank == 0, grid)
    return Team(mode, rank, workers, out, job.rank == 0, grid)


def present(team: Team, options: argparse.Namespace) -> Team:
    """Return the team as it is now: a worker may have been lost, and another have joined."""
    return team_of(options.comm_mode, options.out, ab.job(), team.grid)


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1, not {text!r}")
    return int(text)


def from_zero(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"a whole number from 0 to 2**31 - 1, not {text!r}")
    return int(text)


def comm_mode(text: str) -> str:
    modes = {mode.lower(): mode for mode in MODES}
    if text.lower() not in modes:
        raise argparse.ArgumentTypeError(f"one of {', '.join(MODES)}, not {text!r}")
    return modes[text.lower()]


def add_first(parser: argparse.ArgumentParser, *, steps: int, out: str) -> None:
    """Add the options that every example has."""
    add = parser.add_argument
    add("--steps", type=at_least_one, default=steps, help="optimizer steps (%(default)s)")
    add("--seed", type=from_zero, default=0, help="of the model and of all that is drawn (%(default)s)")
    add("--out", type=Path, default=Path(out), help="the run is written there (%(default)s)")


def add_usual(parser: argparse.ArgumentParser, *, steps: int, out: str, evaluations: str = "a fifth") -> None:
    """Add the options of every example that saves checkpoints."""
    add_first(parser, steps=steps, out=out)
    add = parser.add_argument
    add("--comm-mode", type=comm_mode, help=f"{', '.join(MODES)} (Hybrid with servers, AllReduce with several workers)")
    add("--engine", choices=["tape", "graph"], default="tape", help="how steps are run (%(default)s)")
    add("--evaluate-every", type=at_least_one, metavar="STEPS", help=f"({evaluations} of all steps)")
    add("--save-every", type=at_least_one, metavar="STEPS", help="(a quarter of all steps)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, if any (the default)")
    begins = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"  # a job that is restarted goes on
    help_ = "delete the checkpoint in --out and start anew"
    how.add_argument("--fresh", action="store_const", const=begins, default=False, help=help_)


def prepare(team: Team, settings: Mapping[str, object], *, fresh: bool) -> None:
    """Make the place for the model. What lies there goes on exactly as it began, or not at all."""
    checkpoint, kept = team.out / "checkpoint", team.out / "settings.json"
    team.out.mkdir(parents=True, exist_ok=True)
    if not fresh and checkpoint.exists():
        saved = json.loads(kept.read_text()) if kept.exists() else {}
        changed = [name for name in settings if saved.get(name) != settings[name]]
        if changed:
            was = ", ".join(f"{name} was {saved.get(name)}, now {settings[name]}" for name in changed)
            sys.exit(
                f"{team.out} holds another run: {was}. Give the same arguments to go on with it, another --out to keep "
                "it, or --fresh to start anew"
            )
    if team.leads:
        if fresh:
            shutil.rmtree(checkpoint, ignore_errors=True)
        write_whole(kept, json.dumps(dict(settings)))


def write_whole(path: Path, text: str) -> None:
    """Write a file that others may read meanwhile, and that a kill leaves as it was."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


class Stopped(Exception):
    """A worker was told to stop; all have saved after the same step."""

    code = 0

    def __init__(self, step: int) -> None:
        super().__init__(f"told to stop: saved after step {step}, the same command goes on from there")


def save_or_stop(
    executor: ab.Executor, team: Team, options: argparse.Namespace, beside: Callable[[], object] = lambda: None
) -> None:
    """Save every so many steps, at the end, and where a worker was told to stop, which ends the run."""
    step, every = executor.step, options.save_every or max(1, options.steps // 4)
    if step % every == 0 or step == options.steps or executor.stopping:
        beside()
        executor.save(team.out / "checkpoint")
    if executor.stopping and step < options.steps:
        raise Stopped(step)


@contextmanager
def stopped_by_signals(executor: ab.Executor) -> Iterator[None]:
    """Ctrl-C or SIGTERM lets the step under way end and be saved, on all workers alike; the next one ends at once."""
    come: list[int] = []

    def stop(number: int, frame: object) -> None:
        come.append(number)
        signal.signal(number, before[number])
        executor.request_stop()

    before = {int(number): signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Stopped as stopped:
        stopped.code = 130 if signal.SIGINT in come else 0
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def reported(run: Callable[[], Mapping[str, object]], *, resumes: bool = True) -> int:
    """Run, and print the last line on whoever is rank 0 at the end; returns the exit code."""
    try:
        result = run()
    except ab.CheckpointError as error:
        print(f"{error}; --fresh starts anew", file=sys.stderr)
        return 1
    except Stopped as stopped:
        if ab.job().rank == 0:
            print(stopped, file=sys.stderr)
        return stopped.code
    except KeyboardInterrupt:
        if ab.job().rank == 0:
            print("stopped" + "; the same command goes on from the last checkpoint" * resumes, file=sys.stderr)
        return 130
    if ab.job().rank == 0:
        line = json.dumps(dict(result))
        Path(str(result["out"]), "result.json").write_text(line)
        print(line, flush=True)
    return 0
