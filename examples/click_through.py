"""Click-through prediction: Wide & Deep, DeepFM or DCN on Criteo's or Adult's own text, in any communication mode.

    python examples/click_through.py                                              # one process, generated clicks
    python examples/click_through.py --data train.txt --model dcn                 # Criteo's own file
    anabranch run --workers 2 --servers 2 examples/click_through.py               # the tables on two servers

Without ``--data`` it writes clicks whose true probabilities are known, so that the best AUC that any model can reach
stands beside the model's::

    categories ──hash──> ids ──> table of vectors ──┬──> factorization, crossing, or nothing ──┐
                          └────> table of numbers ──┼──────────────── (wide) ──────────────────(+)──> click?
    numbers ───────────────────> log, missing? ─────┴──> three layers (deep) ──────────────────┘

The tables are what such models are made of: rows by id, of which a step touches few. Their gradient is sparse and
Adagrad moves them; Adam moves the rest. Where they live is the executor's business, not the model's.

``_clicks.py`` reads the text, ``_planted.py`` writes it, ``_run.py`` is what all examples do alike. Shapes: B lines, F
categories a line, K numbers a vector, N numbers a line with their flags.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from _clicks import FORMATS, Batch, Clicks, Floats, Part, area_under_curve, log_loss, split_file
from _planted import Best, Planted
from _run import (
    Team,
    add_usual,
    at_least_one,
    from_zero,
    prepare,
    present,
    reported,
    save_or_stop,
    stopped_by_signals,
    team_of,
)
from torch import Tensor, nn
from torch.nn import functional as F

import anabranch as ab

WIDTH = 16
LAYERS = (128, 64)


# The models. ----------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """A number for each category and each number of a line, added up: (B, F), (B, N) -> (B,)."""

    def __init__(self, rows: int, numbers: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(rows, 1, mode="sum", sparse=True)
        self.numbers = nn.Linear(numbers, 1)
        nn.init.zeros_(self.table.weight)

    def forward(self, ids_BF: Tensor, numbers_BN: Tensor) -> Tensor:
        return (self.table(ids_BF) + self.numbers(numbers_BN)).squeeze(-1)


def deep(inputs: int) -> nn.Sequential:
    """Layers from the vectors and numbers of a line to LAYERS[-1] of them."""
    layers: list[nn.Module] = []
    for before, after in zip((inputs, *LAYERS), LAYERS, strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers)


class ClickModel(nn.Module):
    """What the three models share: a vector for each category, and a deep half. (B, F), (B, N) -> log-odds (B,)."""

    def __init__(self, rows: int, categories: int, numbers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH, sparse=True)
        self.inputs = categories * WIDTH + numbers
        self.deep = deep(self.inputs)
        self.head = nn.Linear(LAYERS[-1], 1)
        nn.init.normal_(self.table.weight, std=0.03)

    def joined(self, vectors_BFK: Tensor, numbers_BN: Tensor) -> Tensor:
        return torch.cat([vectors_BFK.flatten(1), numbers_BN], 1)


class WideAndDeep(ClickModel):
    """Cheng et al., "Wide & Deep Learning for Recommender Systems" (2016)."""

    def __init__(self, rows: int, categories: int, numbers: int) -> None:
        super().__init__(rows, categories, numbers)
        self.wide = Wide(rows, numbers)

    def forward(self, ids_BF: Tensor, numbers_BN: Tensor) -> Tensor:
        inputs = self.joined(self.table(ids_BF), numbers_BN)
        return self.wide(ids_BF, numbers_BN) + self.head(self.deep(inputs)).squeeze(-1)


class DeepFM(ClickModel):
    """Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction" (2017)."""

    def __init__(self, rows: int, categories: int, numbers: int) -> None:
        super().__init__(rows, categories, numbers)
        self.wide = Wide(rows, numbers)

    def forward(self, ids_BF: Tensor, numbers_BN: Tensor) -> Tensor:
        vectors_BFK = self.table(ids_BF)
        # The products of all pairs of vectors: the square of their sum has each twice, and their own squares.
        pairs = (vectors_BFK.sum(1).square() - vectors_BFK.square().sum(1)).sum(1) / 2
        deep = self.head(self.deep(self.joined(vectors_BFK, numbers_BN))).squeeze(-1)
        return self.wide(ids_BF, numbers_BN) + pairs + deep


class DCN(ClickModel):
    """Wang et al., "DCN V2: Improved Deep & Cross Network and Practical Lessons" (2021): crossing beside deep."""

    def __init__(self, rows: int, categories: int, numbers: int, crossings: int = 2) -> None:
        super().__init__(rows, categories, numbers)
        self.crossings = nn.ModuleList(nn.Linear(self.inputs, self.inputs) for _ in range(crossings))
        self.head = nn.Linear(self.inputs + LAYERS[-1], 1)

    def forward(self, ids_BF: Tensor, numbers_BN: Tensor) -> Tensor:
        inputs = crossed = self.joined(self.table(ids_BF), numbers_BN)
        for crossing in self.crossings:
            crossed = crossed + inputs * crossing(crossed)
        return self.head(torch.cat([crossed, self.deep(inputs)], 1)).squeeze(-1)


MODELS = {"wide-deep": WideAndDeep, "deepfm": DeepFM, "dcn": DCN}


# Training. ------------------------------------------------------------------------------------------------------------


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["ids"], batch["numbers"]), batch["clicked"])


def scores(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"scores": model(batch["ids"], batch["numbers"])}


def training_step(model: ClickModel, rate: float) -> ab.TrainStep:
    named = dict(model.named_parameters())
    tables = [value for name, value in named.items() if name.endswith("table.weight")]
    others = [value for name, value in named.items() if not name.endswith("table.weight")]
    adagrad = torch.optim.Adagrad(tables, lr=rate, initial_accumulator_value=1e-4)
    return ab.TrainStep(model, loss, [adagrad, torch.optim.Adam(others, lr=4e-3, fused=True)])


class HeldOut:
    """Lines that are never trained on; each worker measures its share of their batches."""

    def __init__(self, clicks: Clicks, lines: int) -> None:
        self.batches: list[Batch] = []
        self.lines = 0
        for batch in clicks:
            self.batches.append(batch)
            self.lines += len(batch["clicked"])
            if self.lines >= lines:
                break
        if not self.lines:
            sys.exit(f"{clicks.part.path} has no lines to hold out; give more of them, or another --held-out")
        self.clicked: Floats = torch.cat([batch["clicked"] for batch in self.batches]).double().numpy()

    def measured(self, executor: ab.Executor, team: Team) -> tuple[float, float]:
        """Log loss and AUC."""
        found = torch.zeros(self.lines, dtype=torch.float64)
        ends = np.cumsum([len(batch["clicked"]) for batch in self.batches])
        for number in range(team.rank, len(self.batches), team.workers):
            batch = self.batches[number]
            end = int(ends[number])
            found[end - len(batch["clicked"]) : end] = executor.run("validate", batch)["scores"]
        if team.workers > 1:
            found = ab.all_reduce(found)
        return log_loss(found.sigmoid().numpy(), self.clicked), area_under_curve(found.numpy(), self.clicked)


class Meter:
    """What training costs, measuring and saving not counted: bytes between processes, rows found in the cache."""

    def __init__(self, executor: ab.Executor, part: Callable[[ab.Job], Batch]) -> None:
        self._executor, self._part = executor, part
        self.seconds = 0.0
        self.bytes = self.hits = self.misses = 0

    def run(self) -> float:
        """Do a step; returns its loss."""
        began, before = time.monotonic(), self._counted()
        value = self._executor.run("train", self._part)["loss"].item()
        self.seconds += time.monotonic() - began
        moved, hits, misses = (now - then for now, then in zip(self._counted(), before, strict=True))
        self.bytes, self.hits, self.misses = self.bytes + moved, self.hits + hits, self.misses + misses
        return value

    def _counted(self) -> tuple[int, int, int]:
        done = self._executor.statistics()
        tables = done.tables.values()
        return done.bytes, sum(table.hits for table in tables), sum(table.misses for table in tables)

    @property
    def hit_rate(self) -> float | None:
        return self.hits / (self.hits + self.misses) if self.hits else None  # nothing is counted without a cache


def train_on(executor: ab.Executor, lines: Clicks, team: Team, held_out: HeldOut, options: argparse.Namespace) -> Meter:
    """Trains to the last step, measuring and saving on the way."""

    def part(job: ab.Job) -> Batch:
        team = team_of(options.comm_mode, options.out, job)
        return lines.share(executor.step, team.rank, team.workers)

    meter, done = Meter(executor, part), executor.step
    evaluate_every = options.evaluate_every or max(1, options.steps // 5)
    while executor.step < options.steps:
        last = meter.run()
        step, team = executor.step, present(team, options)
        if step % evaluate_every == 0 and step < options.steps:
            nats, auc = held_out.measured(executor, team)
            rate = (step - done) * options.batch / max(1e-9, meter.seconds)
            say(
                team,
                f"step {step}/{options.steps}  {rate:,.0f} examples/s  loss {last:.4f}  held out: log loss "
                f"{nats:.4f}, AUC {auc:.4f}",
            )
        save_or_stop(executor, team, options)
    return meter


def say(team: Team, line: str) -> None:
    if team.rank == 0:
        print(line, flush=True)


# The run. -------------------------------------------------------------------------------------------------------------


def parse_options(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a model that predicts clicks.", allow_abbrev=False)
    add_usual(parser, steps=300, out="runs/click_through")
    add = parser.add_argument
    add("--model", choices=list(MODELS), default="wide-deep", help="(%(default)s)")
    add("--format", choices=list(FORMATS), default="criteo", help="of the lines (%(default)s)")
    add("--data", type=Path, help="a file of that format (generated clicks)")
    add("--held-out", type=Path, metavar="FILE", help="lines to measure on (the last twentieth of --data)")
    add("--lines", type=at_least_one, default=400_000, help="to generate without --data (%(default)s)")
    add("--held-out-lines", type=at_least_one, default=50_000, help="to measure on at most (%(default)s)")
    add("--ids", type=at_least_one, default=5_000, help="categories of the largest field generated (%(default)s)")
    add("--zipf", type=float, default=1.05, help="how much more frequent the frequent categories are (%(default)s)")
    add("--batch", type=at_least_one, default=2048, help="lines a step, of all workers together (%(default)s)")
    add("--rows", type=at_least_one, default=2**18, help="of each table, shared by ids hashed alike (%(default)s)")
    add("--rate", type=float, default=0.05, help="learning rate of the tables (%(default)s)")
    add("--cache-rows", type=from_zero, default=0, help="rows of each table that a worker caches (%(default)s: none)")
    add("--policy", choices=["LRU", "LFU", "LFUOpt"], default="LFU", help="who leaves the cache (%(default)s)")
    add("--pull-bound", type=from_zero, default=0, help="steps that a cached row may be behind (%(default)s)")
    add("--push-bound", type=from_zero, default=0, help="steps that own gradients may wait (%(default)s)")
    options = parser.parse_args(given)
    for path in (options.data, options.held_out):
        if path is not None and not path.is_file():
            parser.error(f"{path}: there is no such file")
    if options.held_out and not options.data:
        parser.error("--held-out belongs to --data; generated clicks have held-out lines of their own")
    return options


def text_of(options: argparse.Namespace, team: Team) -> tuple[Part, Part, Callable[[], Best] | None]:
    """Return what to train on, what to measure on, and, if it is known, a function of what can be reached there."""
    if options.data:
        if options.held_out:
            return Part(options.data), Part(options.held_out), None
        return *split_file(options.data, options.data.stat().st_size // 20), None
    planted = Planted(options.format, options.seed, options.ids, options.zipf)
    paths = [team.out / "data" / name for name in ("train.txt", "held_out.txt")]
    best = partial(planted.write, paths[1], options.held_out_lines, part=1)  # once: its result lies beside the file
    if team.rank == 0:  # the others open the files after the first step's batch was asked for, when these are there
        say(team, f"writing {options.lines:,} + {options.held_out_lines:,} lines to {paths[0].parent}")
        planted.write(paths[0], options.lines, part=0)
        best()
    return Part(paths[0]), Part(paths[1]), best


def run(options: argparse.Namespace, job: ab.Job) -> dict[str, object]:
    """Trains, measures and reports; returns what the last line says."""
    began = time.monotonic()
    team, form = team_of(options.comm_mode, options.out, job), FORMATS[options.format]
    settings = {name: getattr(options, name) for name in ("steps", "batch", "seed", "model", "format", "rows", "rate")}
    if options.data:
        settings["data"] = Part(options.data).fingerprint()
    else:
        settings.update(lines=options.lines, ids=options.ids, zipf=options.zipf)
    prepare(team, settings, fresh=options.fresh)
    train, measure, reachable = text_of(options, team)
    torch.manual_seed(options.seed)
    model = MODELS[options.model](options.rows, form.categories, 2 * form.numbers)
    size = sum(value.numel() for value in model.parameters())
    clicks = partial(Clicks, form=form, rows=options.rows)
    lines = clicks(train, batch=options.batch)
    cache = None
    if options.cache_rows and team.mode in ("PS", "Hybrid", "auto"):
        cache = ab.Cache(options.policy, options.cache_rows, options.pull_bound, options.push_bound)
    with ab.Executor(
        {"train": training_step(model, options.rate), "validate": ab.EvalStep(model, scores)},
        comm_mode=team.comm_mode,
        engine=options.engine,
        cache=cache,
        state={"lines": lines},
    ) as executor:
        held_out = HeldOut(clicks(measure, batch=4096), options.held_out_lines)
        done = 0
        if not options.fresh and executor.resume(team.out / "checkpoint"):
            done = executor.step
        say(team, f"{options.model}: {size / 1e6:.2f} million parameters; {job.world_size} workers, {team.mode}")
        if done:
            say(team, f"going on from the checkpoint after step {done}")
        with stopped_by_signals(executor):
            meter = train_on(executor, lines, team, held_out, options)
        nats, auc = held_out.measured(executor, present(team, options))
        engine = executor.engine("train")
    best = reachable() if reachable and ab.job().rank == 0 else None
    steps = max(1, options.steps - done)
    return {
        "steps": options.steps,
        "seed": options.seed,
        "model": options.model,
        "format": options.format,
        "comm_mode": executor.comm_mode or "None",
        "workers": ab.job().world_size,
        "servers": len(job.servers),
        "engine": engine,
        "log_loss": nats,
        "auc": auc,
        "best_auc": best.auc if best else None,
        "best_log_loss": best.log_loss if best else None,
        "held_out_lines": held_out.lines,
        "resumed_from": done,
        "bytes_per_step": meter.bytes // steps,
        "cache_hits": meter.hit_rate,
        "examples_per_second": round(steps * options.batch / max(1e-9, meter.seconds)),
        "seconds": round(time.monotonic() - began, 2),
        "out": str(team.out),
    }


def main(given: list[str] | None = None) -> int:
    # Adagrad's sparse update builds a tensor from slots that are in range already; torch asks to say so.
    torch.sparse.check_sparse_tensor_invariants.disable()
    options, job = parse_options(given), ab.job()
    return reported(lambda: run(options, job))


if __name__ == "__main__":
    sys.exit(main())
