"""What gradient callbacks, sessions and parallel backwards cost, against plain forward + backward and the slowest call.

    python benchmarks/autodiff.py [--rounds 1500] [--out DIR]

Sides alternate in random order, each step timed alone; the median, the minimum and their ratios are reported. A ratio
counts, an absolute time does not. ``twin`` is the plain side a second time: how far its ratio lies from 1 is the noise.

- *manager*: a ``GradManager`` with a callback on every parameter of ten Linear(64), batch 32; aim 1.05.
- *grad*: a ``Grad`` session with a callback on one tensor, which also frees its tape; aim 1.2. What PyTorch's saving
  hooks cost by themselves, without which a tape cannot be freed, stands beside it.
- *parallel*: 8 calls that sleep 50 ms, forward and backward, against 50 ms; aim 1.15.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch
from measure import keep, machine, options_of
from torch import Tensor, nn
from torch.autograd import Function

import anabranch as ab

Step = Callable[[], None]


def sides(batch: int = 32, width: int = 64, depth: int = 10) -> dict[str, Step]:
    """One forward and backward of each kind, on models of their own."""
    x = torch.randn(batch, width)

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])

    def clear(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None

    def plain() -> Step:
        net = model()
        parameters = list(net.parameters())

        def step() -> None:
            clear(parameters)
            net(x).sum().backward()

        return step

    def manager(callbacks: object) -> Step:
        net = model()
        parameters = list(net.parameters())
        gradients = ab.GradManager().attach(parameters, callbacks)

        def step() -> None:
            clear(parameters)
            with gradients:
                gradients.backward(net(x).sum())

        return step

    def hooks() -> Step:
        net = model()
        parameters = list(net.parameters())
        for parameter in parameters:
            parameter.register_hook(lambda grad: None)

        def step() -> None:
            clear(parameters)
            net(x).sum().backward()

        return step

    def grad(every: bool, callback: object) -> Step:
        net = model()
        wanted = list(net.parameters()) if every else [net[0].weight]

        def step() -> None:
            with ab.Grad().wrt(*wanted, callback=callback) as session:
                session(net(x).sum(), None)

        return step

    def saved(make: Callable[[Tensor], object], give: Callable[[object], object]) -> Step:
        net = model()

        def step() -> None:
            with torch.autograd.graph.saved_tensors_hooks(make, give):
                torch.autograd.grad(net(x).sum(), [net[0].weight])

        return step

    def autograd_grad(every: bool) -> Step:
        net = model()
        wanted = list(net.parameters()) if every else [net[0].weight]

        def step() -> None:
            torch.autograd.grad(net(x).sum(), wanted)

        return step

    def keep(tensor: Tensor, gradient: Tensor) -> None:
        pass

    return {
        "plain": plain(),
        "twin": plain(),
        "torch hook on every parameter": hooks(),
        "manager, no callback": manager(()),
        "manager, callback on every parameter": manager(keep),
        "autograd.grad, one tensor": autograd_grad(False),
        "autograd.grad, saving hooks that do nothing": saved(lambda tensor: tensor, lambda tensor: tensor),
        "grad, callback on one tensor": grad(False, keep),
        "autograd.grad, every parameter": autograd_grad(True),
        "grad, every parameter, no callback": grad(True, None),
        "grad, callback on every parameter": grad(True, keep),
    }


AGAINST = {
    "autograd.grad, saving hooks that do nothing": "autograd.grad, one tensor",
    "grad, callback on one tensor": "autograd.grad, one tensor",
    "grad, every parameter, no callback": "autograd.grad, every parameter",
    "grad, callback on every parameter": "autograd.grad, every parameter",
}


def overheads(rounds: int) -> list[dict[str, object]]:
    """Each side's times, and its ratios to the side it stands against."""
    steps = sides()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(50):
            step()
    order = list(steps)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - start)
    rows: list[dict[str, object]] = []
    for name, taken in times.items():
        base = times[AGAINST.get(name, "plain")]
        rows.append(
            {
                "side": name,
                "against": AGAINST.get(name, "plain"),
                "median_us": statistics.median(taken) * 1e6,
                "min_us": min(taken) * 1e6,
                "ratio_median": statistics.median(taken) / statistics.median(base),
                "ratio_min": min(taken) / min(base),
            }
        )
    return rows


class Sleep(Function):
    """A call that takes 50 ms in forward and 50 ms in backward, as one that waits for a far side does."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return nap(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return nap(gradient)


def nap(tensor: Tensor) -> Tensor:
    start = time.perf_counter()
    time.sleep(0.05)
    result = tensor * 1
    naps.append(time.perf_counter() - start)
    return result


naps: list[float] = []


def parallel(repeats: int, calls: int = 8) -> list[dict[str, object]]:
    """Forward and backward of ``calls`` calls at once, against the slowest of the calls."""
    x = torch.ones(16, requires_grad=True)
    taken: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": []}

    def timed(phase: str, step: Callable[[], object]) -> object:
        naps.clear()
        start = time.perf_counter()
        result = step()
        taken[phase].append((time.perf_counter() - start, max(naps)))
        return result

    for _ in range(repeats + 1):
        outputs = timed("forward", lambda: ab.map_with_parallel_backward(Sleep, *[(x,)] * calls))
        loss = sum(out.sum() for (out,) in outputs)
        timed("backward", loss.backward)
    rows: list[dict[str, object]] = []
    for phase, pairs in taken.items():
        totals, slowest = zip(*pairs[1:], strict=True)  # the first starts torch's engine
        ratios = [total / slow for total, slow in pairs[1:]]
        rows.append(
            {
                "side": f"parallel {phase}, {calls} calls of 50 ms",
                "against": "the slowest call",
                "median_us": statistics.median(totals) * 1e6,
                "min_us": min(totals) * 1e6,
                "slowest_median_us": statistics.median(slowest) * 1e6,
                "ratio_median": statistics.median(ratios),
                "ratio_min": min(ratios),
            }
        )
    return rows


def main() -> None:
    """Prints a table; with ``--out`` writes everything measured."""
    parser = options_of(__doc__, rounds=1500)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = machine()
    rows = overheads(args.rounds) + parallel(args.repeats)
    for row in rows:
        print(
            f"{row['side']:38} {row['median_us']:9.0f} us  min {row['min_us']:9.0f} us   "
            f"{row['ratio_median']:.3f}x  min {row['ratio_min']:.3f}x  of {row['against']}"
        )
    print(before)
    keep("autodiff", before, rows, args.out, bars="ratio_median", by=("side",))


if __name__ == "__main__":
    main()
