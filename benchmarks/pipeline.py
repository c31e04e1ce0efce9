"""Pipelines across two processes and in one, against one thread, torch's own, and the simulator's word.

::

    python benchmarks/pipeline.py threads [--device cuda]           two stages in one process, against nn.Sequential
    anabranch run --workers 2 benchmarks/pipeline.py ranks          two processes, against torch.distributed.pipelining
    python benchmarks/pipeline.py simulator                         stages that sleep, against the simulated clock

The model is 8 x (Linear 1024 + ReLU) on 2048 rows, one thread a stage, nothing recomputed. The reference is the plain
module on the whole batch in one thread; the same microbatches one after the other stand beside it, and two threads or
processes that run half of the layers each and wait for nobody: more than that, less the time that a schedule leaves a
rank idle, the machine does not give. A speed-up is the reference's time divided by the side's. Where torchgpipe is
installed (`make bench-peers`), `threads` runs it too.
"""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import alternate, compare, machine, options_of, report, waiting_for
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

try:
    import torchgpipe
except ImportError:  # a peer, in a virtual environment of its own
    torchgpipe = None

import anabranch as ab
from anabranch.pipeline import Action, Kind, Simulation, make_schedule, simulate
from anabranch.record.spans import Span, heard

WIDTH, LAYERS = 1024, 8
STAGES = {"GPipe": 2, "1F1B": 2, "Interleaved1F1B": 4, "ZB1P": 2, "ZBV": 4}
TORCH = {
    "GPipe": (schedules.ScheduleGPipe, 2),
    "1F1B": (schedules.Schedule1F1B, 2),
    "Interleaved1F1B": (schedules.ScheduleInterleaved1F1B, 4),
    "InterleavedZeroBubble": (schedules.ScheduleInterleavedZeroBubble, 4),
    "ZBVZeroBubble": (schedules.ScheduleZBVZeroBubble, 4),
    "DualPipeV": (schedules.ScheduleDualPipeV, 4),
}
Side = Callable[[], object]


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]


def plain_sides(x: Tensor, target: Tensor, m: int) -> dict[str, Side]:
    model = nn.Sequential(*layers()).to(x.device)

    def whole() -> None:
        model.zero_grad()
        F.mse_loss(model(x), target).backward()

    def parts() -> None:
        model.zero_grad()
        for part, wanted in zip(x.chunk(m), target.chunk(m), strict=True):
            (F.mse_loss(model(part), wanted) / m).backward()

    return {"one thread": whole, f"one thread, {m} microbatches": parts}


def our_side(pipe: ab.Pipe, x: Tensor, target: Tensor) -> Side:
    def step() -> None:
        pipe.zero_grad()
        pipe.step(x, target, loss=F.mse_loss)

    return step


def ours(x: Tensor, target: Tensor, m: int, **where: object) -> dict[str, Side]:
    sides = {}
    for name, stages in STAGES.items():
        balance = [LAYERS // stages] * stages
        pipe = ab.Pipe(nn.Sequential(*layers()), balance, chunks=m, checkpoint="never", schedule=name, **where)
        sides[f"Pipe {name}"] = our_side(pipe, x, target)
    return sides


def torch_side(name: str, x: Tensor, target: Tensor, m: int) -> Side:
    make, n = TORCH[name]
    rank, size = dist.get_rank(), LAYERS // n
    here = [rank, n - 1 - rank] if name in ("ZBVZeroBubble", "DualPipeV") else list(range(rank, n, 2))
    parts = [nn.Sequential(*layers()[j * size : (j + 1) * size]) for j in here]
    stages = [PipelineStage(part, j, n, torch.device("cpu")) for part, j in zip(parts, here, strict=True)]
    schedule = make(stages if n > 2 else stages[0], m, loss_fn=F.mse_loss)

    def step() -> None:
        for part in parts:
            part.zero_grad()
        last = {"target": target, "losses": []} if n - 1 in here else {}
        schedule.step(*([x] if 0 in here else []), **last)

    return step


def ranks(x: Tensor, target: Tensor, m: int, rounds: int) -> dict[str, dict[str, float]]:
    group = dist.group.WORLD
    sides: dict[str, Side] = {}
    for name, side in plain_sides(x, target, m).items():
        sides[name] = side if dist.get_rank() == 0 else lambda: None
    sides["two processes, nothing shared"] = half_side(x, target, m, dist.get_rank())
    for name in TORCH:
        try:
            sides[f"torch {name}"] = torch_side(name, x, target, m)
        except ValueError as error:
            print(f"torch {name} does not run {m} microbatches: {error}")
    sides |= ours(x, target, m, process_group=group)
    # A side ends on both ranks before the next begins, so that the clock of rank 0 is everyone's.
    closed = {name: (lambda side=side: (side(), dist.barrier())) for name, side in sides.items()}
    return compare(alternate(closed, rounds=rounds, calls=1, before=dist.barrier), "one thread")


def torchgpipe_side(x: Tensor, target: Tensor, m: int) -> Side:
    balance = [LAYERS // 2] * 2
    pipe = torchgpipe.GPipe(nn.Sequential(*layers()), balance, devices=[x.device] * 2, chunks=m, checkpoint="never")

    def step() -> None:
        pipe.zero_grad()
        F.mse_loss(pipe(x), target).backward()

    return step


def half_side(x: Tensor, target: Tensor, m: int, half: int) -> Side:
    """One half of the layers on microbatches, waiting for nobody; the second finds its input's gradients too."""
    model = nn.Sequential(*layers()[half * LAYERS // 2 :][: LAYERS // 2]).to(x.device)

    def run() -> None:
        model.zero_grad()
        for part, wanted in zip(x.chunk(m), target.chunk(m), strict=True):
            (F.mse_loss(model(part.detach().requires_grad_(half == 1)), wanted) / m).backward()

    return run


def both(sides: list[Side]) -> Side:
    """Each on a thread of its own."""

    def run() -> None:
        running = [threading.Thread(target=side) for side in sides]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(timeout=600.0)

    return run


def threads(x: Tensor, target: Tensor, m: int, rounds: int) -> dict[str, dict[str, float]]:
    sides = plain_sides(x, target, m)
    sides["two threads, nothing shared"] = both([half_side(x, target, m, half) for half in range(2)])
    sides |= ours(x, target, m, devices=[x.device] * 2)
    if torchgpipe is not None:
        sides["torchgpipe"] = torchgpipe_side(x, target, m)
    return compare(alternate(sides, rounds=rounds, calls=1, after=waiting_for(x.device.type)), "one thread")


KEPT_BYTES = 40 << 20
"""Of a microbatch in each sleeping stage: so much that freed memory goes back to the system at once."""


BACKWARD, WEIGHT = 1.3, 0.7
"""Of the time of a forward; unequal, so that nothing ends just as something else begins: peaks would be ambiguous."""


class Sleep(nn.Module):
    """Takes a fixed time forward, others backward to its input and to its weight, and keeps memory between."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return _SleepInput.apply(x, self.seconds) + _SleepWeight.apply(self.weight, self.seconds)


class _SleepInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        ctx.save_for_backward(torch.full((KEPT_BYTES,), 1, dtype=torch.uint8))
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        assert ctx.saved_tensors[0].numel() == KEPT_BYTES
        time.sleep(BACKWARD * ctx.seconds)
        return grad, None


class _SleepWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, seconds):
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(WEIGHT * ctx.seconds)
        return grad, None


KINDS = {"forward": Kind.F, "backward": Kind.B, "weight": Kind.W, "recompute": Kind.R}


def simulated(m: int, rounds: int, seconds: float = 0.05) -> dict[str, dict[str, float]]:
    """Clock, bubble and memory of stages that sleep, beside what the simulator says from how long each action took."""
    found = {}
    for name, n in (("GPipe", 4), ("1F1B", 4), ("Interleaved1F1B", 8), ("ZB1P", 4), ("ZBV", 8)):
        schedule = make_schedule(name, n, m, ranks=4)
        model = nn.Sequential(*[Sleep(seconds) for _ in range(n)])
        x = torch.zeros(m, 1, requires_grad=True)  # or the first stage would have nothing to do for its input
        spans, ratios, bubbles, memory = [], [], [], []
        with ab.Pipe(model, [1] * n, devices=["cpu"] * 4, chunks=m, checkpoint="never", schedule=name) as pipe:
            for _ in range(rounds + 1):
                before = resident_bytes()
                with Watch() as watch, heard(watch.spans.append):
                    pipe.step(x, x.detach(), loss=F.mse_loss)
                actions = [span for span in watch.spans if span[0] in KINDS]
                span = (max(one[4] for one in actions) - min(one[3] for one in actions)) / 1e9
                took = durations(actions)
                expected = simulate(schedule, costs_of(took))
                spans.append(span)
                ratios.append(span / expected.makespan)
                bubbles.append((1 - sum(took.values()) / (4 * span), expected.bubble))
                memory.append((watch.most_bytes - before) / most_at_once(expected, schedule.splits_backward))
        spans, ratios, bubbles, memory = spans[1:], ratios[1:], bubbles[1:], memory[1:]
        bubble, wanted = bubbles[rounds // 2]
        held = list(expected.peak_activations)
        print(
            f"m={m} {name}: time {statistics.median(ratios):.3f} of the simulated, bubble {bubble:.3f} (simulated "
            f"{wanted:.3f}), peak memory {statistics.median(memory):.3f} of the simulated, {held} microbatches"
        )
        found[name] = {
            "median_ms": 1e3 * statistics.median(spans),
            "minimum_ms": 1e3 * min(spans),
            "ratio_of_medians": statistics.median(ratios),
            "median_of_ratios": statistics.median(ratios),
            "ratio_of_memory": statistics.median(memory),
            "bubble": bubble,
            "simulated_bubble": wanted,
        }
    return found


class Watch:
    """What is seen of one step; memory every two milliseconds, as peaks may lie between events."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.most_bytes = 0
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.wait(2e-3):
            self.most_bytes = max(self.most_bytes, resident_bytes())

    def __enter__(self) -> Watch:
        self._looking.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._looking.join(timeout=60.0)


def costs_of(took: dict[Action, float]) -> Callable[[Action], float]:
    """The simulator's costs: what computing took, and nothing for messages."""
    return lambda action: took.get(action, 0.0)


def durations(actions: list[Span]) -> dict[Action, float]:
    """How long each action took."""
    return {
        Action(KINDS[phase], facts["stage"], facts["microbatch"]): (end - start) / 1e9  # type: ignore[index, arg-type]
        for phase, _, _, start, end, _, facts, _ in actions
    }


def most_at_once(simulation: Simulation, splits_backward: bool) -> int:
    """The most bytes that all ranks together hold at one time."""
    frees = Kind.W if splits_backward else Kind.B
    changes = []
    for interval in itertools.chain(*simulation.intervals):
        if interval.action.kind is Kind.F:
            changes.append((interval.start, KEPT_BYTES))
        elif interval.action.kind is frees:
            changes.append((interval.end, -KEPT_BYTES))
    return max(itertools.accumulate(change for _, change in sorted(changes)))


def resident_bytes() -> int:
    """The memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def with_speed_up(results: dict[str, dict[str, float]], m: int) -> None:
    """Prints each side beside 2m/(m+1), and ours beside what the machine gives two, less the schedule's idle time."""
    ideal = 2 * m / (m + 1)
    most = next(1 / figures["median_of_ratios"] for name, figures in results.items() if "nothing shared" in name)
    for name, figures in results.items():
        speed_up = 1 / figures["median_of_ratios"]
        said = f"m={m} {name}: {speed_up:.2f}x one thread, {100 * speed_up / ideal:.0f} % of {ideal:.2f}"
        if name.startswith("Pipe "):
            schedule = name.removeprefix("Pipe ")
            bound = most * (1 - simulate(make_schedule(schedule, STAGES[schedule], m, ranks=2)).bubble)
            said += f", {100 * speed_up / bound:.0f} % of {bound:.2f}: nothing shared, less this schedule's idle time"
        print(said)


def main() -> None:
    parser = options_of(__doc__, rounds=7)
    parser.add_argument("what", choices=["threads", "ranks", "simulator"])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--device", default="cpu", help="of both stages of `threads`")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = machine()
    if arguments.what == "ranks":
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    x, target = torch.randn(2, arguments.rows, WIDTH).to(arguments.device if arguments.what == "threads" else "cpu")
    results = {}
    for m in arguments.microbatches:
        if arguments.what == "simulator":
            results[f"m={m}"] = simulated(m, arguments.rounds)
        else:
            results[f"m={m}"] = (ranks if arguments.what == "ranks" else threads)(x, target, m, arguments.rounds)
    if arguments.what != "ranks" or dist.get_rank() == 0:
        peers = "_peers" if torchgpipe is not None and arguments.what == "threads" else ""
        report(f"pipeline_{arguments.what}{peers}", before, results, arguments.out)
        if arguments.what != "simulator":
            for m, found in zip(arguments.microbatches, results.values(), strict=True):
                with_speed_up(found, m)
    if arguments.what == "ranks":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
