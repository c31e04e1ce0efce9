"""What the executor's tape engine costs over a hand-written PyTorch loop, one worker.

::

    python benchmarks/tape_overhead.py [--only NAME ...] [--rounds N] [--device cuda] [--out DIR]
"""

from __future__ import annotations

import torch
from measure import alternate, compare, machine, options_of, report, waiting_for

import anabranch as ab
from models import CASES, Case


def compare_case(case: Case, rounds: int, device: str) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    batch = case.batch()
    theirs = case.model()
    optimizer = torch.optim.Adam(theirs.parameters(), fused=True)

    def loop() -> None:
        optimizer.zero_grad()
        case.loss(theirs, batch).backward()
        optimizer.step()

    with ab.Executor(case.step(), engine="tape") as executor:
        sides = {"loop": loop, "executor, tape": lambda: executor.run(batch=batch)}
        seconds = alternate(sides, rounds=rounds, calls=case.calls, after=waiting_for(device))
    return compare(seconds, "loop")


def main() -> None:
    parser = options_of(__doc__, rounds=25)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--device", default="cpu", help="where the model and its batches are")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = machine()
    device = arguments.device
    results = {name: compare_case(CASES[name].on(device), arguments.rounds, device) for name in arguments.only}
    report("tape_overhead", before, results, arguments.out)


if __name__ == "__main__":
    main()
