"""Six plans of one model: the step that each predicts, against the steps that are then made.

::

    anabranch run --workers 2 --servers 1 benchmarks/plans.py [--rounds N] [--steps N] [--out DIR]

A table of a million rows under a network of 1.2 million parameters, fused Adam, one thread a worker. In each round all
six are predicted, then every plan has its turn. Of the rounds the medians are compared. Predictions leave out the
optimizers.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import torch
from measure import keep, machine, table
from torch import Tensor, nn

import anabranch as ab
from anabranch.executor import Plan

WARM_UP = 3
ROWS, WIDTH, FIELDS, BATCH, HIDDEN = 1_000_000, 16, 8, 32, 1024
PLANS: dict[str, dict[str, object]] = {
    "None": {"comm_mode": None},
    "AllReduce": {"comm_mode": "AllReduce"},
    "Hybrid": {"comm_mode": "Hybrid"},
    "PS": {"comm_mode": "PS"},
    "PS, tables read whole": {"comm_mode": "PS", "use_sparse_pull": False},
    "Hybrid, four runs a step": {"comm_mode": "Hybrid", "accumulate": 4},
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        layers = [
            nn.Linear(FIELDS * WIDTH, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 1),
        ]
        self.net = nn.Sequential(*layers)

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(self.table(ids).flatten(1))[:, 0]


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).square().mean()


def new_step(accumulate: int = 1) -> ab.TrainStep:
    torch.manual_seed(0)
    model = Model()
    return ab.TrainStep(model, loss, torch.optim.Adam(model.parameters(), fused=True), accumulate=accumulate)


def batches(count: int, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 * seed + ab.job().rank)
    return [torch.randint(0, ROWS, (BATCH, FIELDS), generator=draw) for _ in range(count)]


def executor_of(options: dict[str, object]) -> ab.Executor:
    others = {name: value for name, value in options.items() if name != "accumulate"}
    return ab.Executor(new_step(options.get("accumulate", 1)), served="replace", **others)


def predicted(options: dict[str, object], seed: int) -> Plan:
    with executor_of(options) as executor:
        return executor.plan(batch=batches(1, seed)[0])


def measured(options: dict[str, object], steps: int, seed: int) -> float:
    """Return the median of a step's seconds."""
    seconds = []
    with executor_of(options) as executor:
        for batch in batches(steps + WARM_UP, seed):
            began = time.perf_counter()
            for _ in range(options.get("accumulate", 1)):
                executor.run(batch=batch)
            seconds.append(time.perf_counter() - began)
    return median(seconds[WARM_UP:])


def compare(rounds: int, steps: int) -> list[dict[str, object]]:
    plans, made = [], []
    for number in range(rounds):
        plans.append({name: predicted(options, number) for name, options in PLANS.items()})
        made.append({name: measured(options, steps, number) for name, options in PLANS.items()})
    return [
        {
            "plan": name,
            "predicted_ms": median(plan[name].step_seconds for plan in plans) * 1e3,
            "measured_ms": median(seconds[name] for seconds in made) * 1e3,
            "bytes": sum(plans[0][name].bytes.values()),
        }
        for name in PLANS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = machine()
    rows = compare(arguments.rounds, arguments.steps)
    if ab.job().rank:
        return
    foreseen, seen = (
        [row["plan"] for row in sorted(rows, key=lambda row: float(str(row[column])))]
        for column in ("predicted_ms", "measured_ms")
    )
    for row in rows:
        row |= {"predicted_place": foreseen.index(row["plan"]) + 1, "measured_place": seen.index(row["plan"]) + 1}
    print(f"# plans\n\n{table(rows)}\n\nthe predicted order is the measured one: {foreseen == seen}")
    print(f"\nmachine before: {before}")
    keep("plans", before, rows, arguments.out, bars="measured_ms", by=("plan",))


if __name__ == "__main__":
    main()
