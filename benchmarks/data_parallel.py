"""A training step of two workers, the executor's AllReduce against DistributedDataParallel.

::

    anabranch run --workers 2 benchmarks/data_parallel.py [--only NAME ...] [--rounds N] [--out DIR]

One thread a worker, the same fused Adam on both sides, which take turns in one process a worker. The executor sums in
shared memory, DistributedDataParallel over gloo. With ``skip_nonfinite=None`` the executor does not look whether
gradients are finite, as DistributedDataParallel does not. Beside them the least that is possible: each worker by
itself, in a hand-written loop that sums nothing.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist
from measure import Side, alternate, compare, machine, options_of, report
from torch.nn.parallel import DistributedDataParallel

import anabranch as ab
from models import CASES, Case


def compare_case(case: Case, rounds: int) -> dict[str, dict[str, float]]:
    torch.manual_seed(dist.get_rank())  # rows of its own for each worker
    batch = case.batch()
    torch.manual_seed(0)
    theirs = case.model()
    parallel = DistributedDataParallel(theirs)
    optimizer = torch.optim.Adam(theirs.parameters(), fused=True)

    def ddp() -> None:
        optimizer.zero_grad()
        case.loss(parallel, batch).backward()
        optimizer.step()

    alone = case.model()
    own_optimizer = torch.optim.Adam(alone.parameters(), fused=True)

    def nothing_summed() -> None:
        own_optimizer.zero_grad()
        case.loss(alone, batch).backward()
        own_optimizer.step()

    with ExitStack() as stack:
        sides: dict[str, Side] = {"DistributedDataParallel": ddp, "nothing summed": nothing_summed}
        for engine, options in (("tape", {}), ("graph", {}), ("graph", {"skip_nonfinite": None})):
            executor = stack.enter_context(ab.Executor(case.step(**options), comm_mode="AllReduce", engine=engine))
            said = ", ".join([engine, *(f"{name}={value}" for name, value in options.items())])
            sides[f"executor, {said}"] = partial(executor.run, batch=batch)
        seconds = alternate(sides, rounds=rounds, calls=case.calls, before=dist.barrier)
    return compare(seconds, "DistributedDataParallel")


def main() -> None:
    parser = options_of(__doc__, rounds=15)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    before = machine()
    results = {name: compare_case(CASES[name], arguments.rounds) for name in arguments.only}
    if dist.get_rank() == 0:
        report("data_parallel", before, results, arguments.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
