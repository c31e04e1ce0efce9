"""Sums over the workers of one host, in shared memory against gloo.

::

    anabranch run --workers 4 benchmarks/all_reduce.py [--rounds N] [--out DIR]

One thread a worker. The numbers are written before each sum, as backward does, or each core would keep its part in its
cache; the time of writing alone is subtracted from both.
"""

from __future__ import annotations

from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from measure import alternate, keep, machine, options_of, table
from torch import Tensor

from anabranch.collectives import Workers
from anabranch.collectives.shared_memory import FlatForm, SharedSum, shared_sums

SIZES = (1 << 10, 25 << 10, 1 << 18, 1 << 21)  # float32 numbers


def over_gloo(numbers: Tensor, flat: Tensor) -> None:
    dist.all_reduce(flat.copy_(numbers))


def shared(numbers: Tensor, one: SharedSum) -> None:
    one.flat.copy_(numbers)
    one.start(operation="sum", step=None).finish()


def compare_size(size: int, workers: Workers, rounds: int) -> dict[str, object]:
    (one,) = shared_sums(workers, [FlatForm(size, torch.float32, torch.device("cpu"))])
    assert one is not None
    numbers, flat = torch.randn(size), torch.zeros(size)
    sides = {
        "write": partial(flat.copy_, numbers),
        "gloo": partial(over_gloo, numbers, flat),
        "shared": partial(shared, numbers, one),
    }
    calls = min(100, max(4, (1 << 22) // size))
    seconds = alternate(sides, rounds=rounds, calls=calls, before=dist.barrier)
    figures: dict[str, object] = {"KiB": size >> 8}
    for name, taken in (("median", median), ("minimum", min)):
        gloo, ours = (taken(seconds[side]) - taken(seconds["write"]) for side in ("gloo", "shared"))
        figures |= {f"gloo_{name}_ms": gloo * 1e3, f"shared_{name}_ms": ours * 1e3, f"{name}_ratio": gloo / ours}
    return figures


def main() -> None:
    arguments = options_of(__doc__, rounds=9).parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    before = machine()
    with Workers() as workers:
        rows = [{"workers": workers.size, **compare_size(size, workers, arguments.rounds)} for size in SIZES]
        if workers.rank == 0:
            print(f"# all_reduce\n\n{table(rows)}\n\nmachine before: {before}")
            keep("all_reduce", before, rows, arguments.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
