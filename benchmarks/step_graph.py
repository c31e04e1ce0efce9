"""Whole training steps: plain PyTorch with fused Adam, the graph engine, and the graph engine with Inductor.

The sides alternate in one process; the ratio of medians counts, absolute times do not::

    python benchmarks/step_graph.py [--json OUT] [--only NAME ...] [--compile] [--rounds N]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.graph import StepProgram

Batch = dict[str, Tensor]


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.between, self.feed_forward = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.feed_forward(self.between(x))


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int = 100, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        places = self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(self.tokens(ids) + places))).flatten(0, 1)


class WideAndDeep(nn.Module):
    def __init__(self, rows: int = 20_000, fields: int = 8, width: int = 16) -> None:
        super().__init__()
        self.wide, self.table = nn.Embedding(rows, 1), nn.Embedding(rows, width)
        self.deep = mlp(fields * width + 13, 128, 64, 1)

    def forward(self, batch: Batch) -> Tensor:
        ids = batch["ids"]
        deep = self.deep(torch.cat([self.table(ids).flatten(1), batch["numbers"]], 1))
        return (self.wide(ids).sum(1) + deep).squeeze(1)


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"].flatten())


def click(model: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch), batch["y"])


def dense(rows: int, width: int) -> Batch:
    return {"x": torch.randn(rows, width), "y": torch.randint(0, 10, (rows,))}


def text(rows: int = 8, length: int = 32) -> Batch:
    return {"x": torch.randint(0, 100, (rows, length)), "y": torch.randint(0, 100, (rows, length))}


def clicks(rows: int = 128) -> Batch:
    return {
        "ids": torch.randint(0, 20_000, (rows, 8)),
        "numbers": torch.randn(rows, 13),
        "y": torch.randint(0, 2, (rows,)).float(),
    }


Case = tuple[Callable[[], nn.Module], Callable[[nn.Module, Batch], Tensor], Callable[[], Batch]]
CASES: dict[str, Case] = {
    "mlp_small": (lambda: mlp(64, 128, 128, 10), classify, lambda: dense(32, 64)),
    "mlp_deep": (lambda: mlp(*[64] * 12, 10), classify, lambda: dense(32, 64)),
    "transformer d64 L2": (lambda: Transformer(64, 2), classify, lambda: text(4, 16)),
    "wide & deep 20k rows": (WideAndDeep, click, clicks),
    "mlp_med": (lambda: mlp(512, 1024, 1024, 10), classify, lambda: dense(256, 512)),
    "transformer d256 L4": (lambda: Transformer(256, 4), classify, text),
}
TARGETS = dict(zip(CASES, (0.50, 0.60, 0.72, 0.60, 1.00, 1.00), strict=True))
COMPILED_TARGETS = dict(zip(CASES, (0.47, 0.45, 0.52, 0.75, 0.88, 0.90), strict=True))


def sides(case: Case, compiled: bool) -> dict[str, Callable[[], object]]:
    make_model, loss, make_batch = case
    found: dict[str, Callable[[], object]] = {}
    for name in ("eager", "graph", *(["compiled"] if compiled else [])):
        torch.manual_seed(0)
        model, batch = make_model(), make_batch()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        found[name] = _eager(model, loss, batch, optimizer)
        if name != "eager":
            program = StepProgram(model, loss, [optimizer], compile=name == "compiled")
            found[name] = lambda program=program, batch=batch: program.run(batch)["loss"]
    return found


def _eager(
    model: nn.Module, loss: Callable[[nn.Module, Batch], Tensor], batch: Batch, optimizer: torch.optim.Optimizer
) -> Callable[[], Tensor]:
    def step() -> Tensor:
        value = loss(model, batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        return value

    return step


def measure(run: dict[str, Callable[[], object]], rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    for step in run.values():
        for _ in range(5):
            step()
    start = time.perf_counter()
    run["eager"]()
    calls = max(1, int(seconds / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in run}
    for _ in range(rounds):
        for name, step in run.items():
            start = time.perf_counter()
            for _ in range(calls):
                step()
            times[name].append((time.perf_counter() - start) / calls)
    found = {}
    for name, seen in times.items():
        ratios = [mine / plain for mine, plain in zip(seen, times["eager"], strict=True)]
        found[name] = {
            "median_us": 1e6 * statistics.median(seen),
            "min_us": 1e6 * min(seen),
            "ratio": statistics.median(ratios),
            "ratio_of_minima": min(seen) / min(times["eager"]),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=CASES)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.2, help="per side and round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    print(f"{'':22}{'side':10}{'median us':>12}{'min us':>12}{'ratio':>8}{'of minima':>11}{'target':>8}")
    for name in options.only or CASES:
        results[name] = measure(sides(CASES[name], options.compile), options.rounds, options.seconds)
        for side, row in results[name].items():
            goal = {"eager": 1.0, "graph": TARGETS[name], "compiled": COMPILED_TARGETS[name]}[side]
            print(
                f"{name:22}{side:10}{row['median_us']:12.1f}{row['min_us']:12.1f}{row['ratio']:8.3f}"
                f"{row['ratio_of_minima']:11.3f}{goal:8.2f}"
            )
    if options.json:
        options.json.write_text(json.dumps({"load": os.getloadavg(), "results": results}, indent=2))


if __name__ == "__main__":
    main()
