"""Whole training steps with fused Adam: a hand-written PyTorch loop, the graph engine, and the graph with Inductor.

::

    python benchmarks/step_graph.py [--only NAME ...] [--compile] [--rounds N] [--out DIR]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from measure import alternate, compare, machine, report
from models import CASES, Case

from anabranch.graph import StepProgram

TARGETS = dict(zip(CASES, (0.50, 0.60, 0.72, 0.60, 1.00, 1.00), strict=True))
COMPILED_TARGETS = dict(zip(CASES, (0.47, 0.45, 0.52, 0.75, 0.88, 0.90), strict=True))


def eager(case: Case) -> Callable[[], object]:
    torch.manual_seed(0)
    model, batch = case.model(), case.batch()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def loop() -> None:
        optimizer.zero_grad()
        case.loss(model, batch).backward()
        optimizer.step()

    return loop


def graph(case: Case, compiled: bool) -> Callable[[], object]:
    torch.manual_seed(0)
    model, batch = case.model(), case.batch()
    program = StepProgram(
        model,
        case.loss,  # type: ignore[arg-type]
        [torch.optim.Adam(model.parameters(), fused=True)],
        compile=compiled,
    )
    for _ in range(2):
        program.run(batch)
    return lambda: program.run(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--compile", action="store_true", help="measure the Inductor side too")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, default=None, help="a directory for the figures as JSON and Markdown")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = machine()
    results = {}
    for name in options.only:
        sides = {"eager": eager(CASES[name]), f"graph (target {TARGETS[name]})": graph(CASES[name], False)}
        if options.compile:
            sides[f"compiled (target {COMPILED_TARGETS[name]})"] = graph(CASES[name], True)
        calls = 5 if "med" in name or "256" in name else 50
        results[name] = compare(alternate(sides, rounds=options.rounds, calls=calls), "eager")
    report("step_graph", before, results, options.out)


if __name__ == "__main__":
    main()
