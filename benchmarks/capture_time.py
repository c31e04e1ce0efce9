"""How capture, passes, planning and code generation grow with the number of operations, to 10^5.

::

    python benchmarks/capture_time.py [--sizes N ...] [--out DIR]
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from measure import keep, machine, options_of
from torch import Tensor

from anabranch.graph import Graph, capture, gradients


def chain(length: int) -> Graph:
    def fn(x: Tensor) -> Tensor:
        y = x
        for index in range(length):
            y = torch.sin(y) if index % 3 else y * x
        return y.sum()

    return capture(fn, torch.ones(4))


def seconds(action: Callable[[], object]) -> tuple[float, object]:
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result


def measure(length: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    figures["capture"], graph = seconds(lambda: chain(length))
    assert isinstance(graph, Graph)
    figures["gradients"], both = seconds(lambda: gradients(graph, wrt=["x"]))
    assert isinstance(both, Graph)
    figures["operations"] = len(both.nodes)
    figures["plan memory"], _ = seconds(both.memory_plan)
    figures["generate code"], _ = seconds(both.program)
    figures["run"], _ = seconds(lambda: both(torch.ones(4)))
    return figures


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1_000, 10_000, 30_000])
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = machine()
    measure(50)  # warms up
    rows = [measure(size) for size in options.sizes]
    names = [name for name in rows[0] if name != "operations"]
    print("microseconds an operation")
    print("| operations | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for row in rows:
        print(
            f"| {row['operations']:.0f} | "
            + " | ".join(f"{1e6 * row[n] / row['operations']:.1f}" for n in names)
            + " |"
        )
    keep("capture_time", before, rows, options.out)


if __name__ == "__main__":
    main()
