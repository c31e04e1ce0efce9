"""The first steps of a model: seconds until the first has ended, and for each new shape.

::

    python benchmarks/first_steps.py [--only NAME ...] [--rounds 3] [--out DIR]

Each first step is taken in a process of its own, which has imported torch and the library and nothing else: the plain
loop with fused Adam, ``engine="tape"``, ``engine="graph"``, and the loop around ``torch.compile(module)``. Batches of
1, 8 and 32 shapes in turn: what each new one costs, and a step once all are known, beside the same steps of the loop.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from measure import keep, machine, options_of, table
from torch import Tensor

import anabranch as ab
from models import CASES, TRANSFORMERS, Case, classify, mlp

ALL = CASES | TRANSFORMERS
SIDES = ("loop", "tape", "graph", "torch.compile")
SHAPES = (1, 8, 32)


def stepper(case: Case, side: str) -> Callable[[tuple[Tensor, Tensor]], object]:
    model = case.model()
    if side in ("tape", "graph"):
        executor = ab.Executor(
            ab.TrainStep(model, case.loss, torch.optim.Adam(model.parameters(), fused=True)),
            engine=side,  # type: ignore[arg-type]
        )
        return lambda batch: executor.run(batch=batch)
    if side == "torch.compile":
        model.compile()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def loop(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        case.loss(model, batch).backward()
        optimizer.step()

    return loop


def first_step(name: str, side: str) -> float:
    """Seconds from a model that is there to the end of its first step, in this process."""
    torch.manual_seed(0)
    case = ALL[name]
    batch = case.batch()
    began = time.perf_counter()
    stepper(case, side)(batch)
    return time.perf_counter() - began


def first_step_elsewhere(name: str, side: str) -> float:
    command = [sys.executable, __file__, "--alone", name, side]
    return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout)


def shapes(count: int) -> dict[str, float]:
    """Milliseconds of a step with batches of so many shapes in turn, known ones and new ones."""
    case = Case(lambda: mlp(64, 128, 128, 10), classify, lambda: (torch.empty(0), torch.empty(0)))
    batches = [(torch.randn(8 + i, 64), torch.randint(0, 10, (8 + i,))) for i in range(count)]
    found: dict[str, float] = {}
    for side in ("loop", "graph"):
        torch.manual_seed(0)
        first, known = _passes(stepper(case, side), batches)
        found[f"{side}, new"] = statistics.median(first) * 1e3
        found[f"{side}, known"] = statistics.median(known) * 1e3
    return found


def _passes(
    step: Callable[[tuple[Tensor, Tensor]], object], batches: list[tuple[Tensor, Tensor]]
) -> tuple[list[float], list[float]]:
    """Seconds of the first step of each batch, and of a step in each later pass over all of them."""
    first = [_seconds(lambda batch=batch: step(batch)) for batch in batches]  # type: ignore[misc]
    for batch in batches:
        step(batch)
    rounds = max(200 // len(batches), 5)
    return first, [_seconds(lambda: [step(batch) for batch in batches]) / len(batches) for _ in range(rounds)]


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main() -> None:
    parser = options_of(__doc__, rounds=3)
    parser.add_argument("--only", nargs="+", choices=list(ALL), default=list(ALL))
    parser.add_argument("--alone", nargs=2, metavar=("NAME", "SIDE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.alone:
        print(first_step(*options.alone))
        return
    before = machine()
    rows: list[dict[str, object]] = []
    for name in options.only:
        turns = [{side: first_step_elsewhere(name, side) for side in SIDES} for _ in range(options.rounds)]
        row: dict[str, object] = {"case": name}
        row |= {f"first, {side} (s)": round(statistics.median(turn[side] for turn in turns), 3) for side in SIDES}
        rows.append(row)
        print(json.dumps(row), flush=True)
    misses = [{"shapes": count, **shapes(count)} for count in SHAPES]
    print("\n", table(misses), "\n")
    keep("first_steps", before, [*rows, *misses], options.out)


if __name__ == "__main__":
    main()
