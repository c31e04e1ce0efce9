"""What it costs a training step to be looked at: facts for ``anabranch status``, a sink, a trace.

::

    python benchmarks/observing.py [--only NAME ...] [--rounds N] [--out DIR]
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import torch
from measure import compare, machine, options_of, report

import anabranch as ab
from anabranch.record.process import ProcessRecord
from models import CASES, Case

STEPS = 5  # of a turn
Look = Callable[[], AbstractContextManager[object]]


class Kept:
    """A sink that keeps the last numbers."""

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.values = values

    def event(self, name: str, facts: dict[str, object]) -> None:
        pass

    def close(self) -> None:
        pass


def executor_of(case: Case, **options: object) -> ab.Executor:
    torch.manual_seed(0)
    return ab.Executor(case.step(), engine="tape", **options)  # type: ignore[arg-type]


def compare_case(case: Case, rounds: int, folder: Path) -> dict[str, dict[str, float]]:
    batch = case.batch()
    with ExitStack() as stack:
        alone, again, traced = (stack.enter_context(executor_of(case)) for _ in range(3))
        sunk = stack.enter_context(executor_of(case, sinks=[Kept()]))
        stack.enter_context(ProcessRecord(folder / "worker-0"))
        shown = stack.enter_context(executor_of(case))
        # A recorder sees the whole process, so a trace is taken only while its own side has its turn.
        sides: dict[str, tuple[ab.Executor, Look]] = {
            "nobody looks": (alone, nullcontext),
            "nobody looks, once more": (again, nullcontext),  # how far two equal executors lie apart
            "status": (shown, nullcontext),
            "a sink": (sunk, nullcontext),
            "a trace": (traced, lambda: traced.trace(folder / "trace.json")),
        }
        # Turns of a few steps, in a new order each time: a machine's moods last longer, and meet all sides alike.
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        names, order = list(sides), random.Random(0)
        for index in range(rounds + 1):
            order.shuffle(names)
            for name in names:
                executor, look = sides[name]
                with look():
                    executor.run(batch=batch)
                    started = time.perf_counter()
                    for _ in range(STEPS):
                        executor.run(batch=batch)
                    ended = time.perf_counter()
                if index:  # the first round warms up
                    seconds[name].append((ended - started) / STEPS)
    assert all(statistics.median(values) > 0 for values in seconds.values())
    return compare(seconds, "nobody looks")


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=400, help="a tenth for the two large models")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    def rounds_of(case: Case) -> int:
        return arguments.rounds if case.calls > STEPS else max(1, arguments.rounds // 10)

    before = machine()
    with tempfile.TemporaryDirectory() as folder:
        results = {name: compare_case(CASES[name], rounds_of(CASES[name]), Path(folder)) for name in arguments.only}
    report("observing", before, results, arguments.out)


if __name__ == "__main__":
    main()
