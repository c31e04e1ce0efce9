"""The training job that ``soak.py`` disturbs: tables, a dense part, and a mixture of experts if the job has some.

One of the tables counts. Each lookup of a row has a gradient of -1 / (rows of the global batch), and its optimizer the
learning rate that makes it 1, so after n steps a row holds how often it was looked up in them, to the bit: an update
that was lost, or applied twice, shows as a number. Each worker writes down what it saw, one JSON line an event.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.job import DirectoryLike

BATCH = 16  # rows of all workers together: a power of two, so that counting is exact
SAMPLES = 60 * BATCH
COUNTERS = 64
ROWS = 2_000
WIDTH = 16
EXPERTS_A_PROCESS = 2
STEP_SECONDS = 30.0
"""What a wait for workers, servers or experts may last."""

SAVE_EVERY = 200
CHECK_EVERY = 50


class Samples(torch.utils.data.Dataset):
    """Ids of rows, and of counters, by the number of the sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        ids = torch.tensor([index * (7 + 2 * k) % ROWS for k in range(4)])
        return {"id": index, "ids": ids, "counted": index * 5 % COUNTERS, "y": index % 7 / 7.0}


class Model(nn.Module):
    """Ids (B, 4) -> scores (B,), and the counts of the rows that were looked up."""

    def __init__(self, directory: DirectoryLike | None = None, experts: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.counts = nn.Embedding(COUNTERS, 1, sparse=True)
        nn.init.zeros_(self.counts.weight)
        self.features = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.double()
        self.mixture = None
        if directory is not None:
            self.mixture = ab.RemoteMixtureOfExperts(
                WIDTH,
                [experts * EXPERTS_A_PROCESS],
                directory,
                "soak",
                k_best=2,
                allow_zero_outputs=True,
                backward_k_min=0,
                forward_timeout=STEP_SECONDS / 3,
                backward_timeout=STEP_SECONDS / 3,
            )

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.features(ids).mean(1)
        if self.mixture is not None:
            hidden = hidden + self.mixture(hidden.float()).double()
        scores: Tensor = self.head(hidden).squeeze(1)
        return scores


def loss(model: Model, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["ids"]), batch["y"]) - model.counts(batch["counted"]).mean()


def optimizers_of(model: Model) -> list[torch.optim.Optimizer]:
    dense = [value for name, value in model.named_parameters() if not name.startswith(("counts", "features"))]
    return [
        torch.optim.SGD(model.counts.parameters(), lr=float(BATCH)),
        torch.optim.Adagrad(model.features.parameters(), lr=0.05),
        torch.optim.Adam(dense, lr=1e-3),
    ]


def loader_of() -> ab.loaders.GlobalBatches:
    return ab.loaders.GlobalBatches(Samples(), BATCH, seed=7)


def batches() -> Iterator[list[int]]:
    """Yield the samples of each step."""
    loader, epoch = loader_of(), 0
    while True:
        order = [int(one) for one in loader.order(epoch)]
        yield from (order[first : first + BATCH] for first in range(0, SAMPLES, BATCH))
        epoch += 1


def counts_after(step: int) -> Tensor:
    """Return what the counting table holds then: an epoch has each sample once."""
    counts = torch.zeros(COUNTERS, dtype=torch.int64)
    epochs, rest = divmod(step, SAMPLES // BATCH)
    order = loader_of().order(epochs)[: rest * BATCH]
    counted = torch.tensor([int(index) * 5 % COUNTERS for index in order], dtype=torch.int64)
    every = torch.tensor([index * 5 % COUNTERS for index in range(SAMPLES)])
    counts += epochs * torch.bincount(every, minlength=COUNTERS) + torch.bincount(counted, minlength=COUNTERS)
    return counts


def make_backends(index: int, count: int) -> list[ab.ExpertBackend]:
    """Two experts, which train themselves."""
    backends = []
    for uid in range(index * EXPERTS_A_PROCESS, (index + 1) * EXPERTS_A_PROCESS):
        torch.manual_seed(uid)
        module = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        adam = torch.optim.Adam(module.parameters(), lr=1e-3)
        backends.append(ab.ExpertBackend(f"soak.{uid}", module, adam, args_schema=[ab.TensorSpec(WIDTH)]))
    return backends


def train(out: Path, mode: str, job: ab.Job) -> None:
    # Line by line, so that a kill costs no line that was written.
    record = os.open(out / f"record-{os.environ['ANABRANCH_MEMBER']}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(event: str, **facts: object) -> None:
        os.write(record, json.dumps({"event": event, "time": time.monotonic(), **facts}).encode() + b"\n")

    directory = job.serve(make_backends) if job.experts else None
    model = Model(directory, job.experts)

    def recorded_loss(model: Model, batch: dict[str, Tensor]) -> Tensor:
        step, number = executor.step + 1, executor.statistics().memberships
        write("doing", step=step, number=number, ids=batch["id"].tolist())
        return loss(model, batch)

    def counted(model: Model, batch: Tensor) -> dict[str, Tensor]:
        return {"counts": model.counts(batch).squeeze(1)}

    steps = {
        "train": ab.TrainStep(model, recorded_loss, optimizers_of(model)),
        "count": ab.EvalStep(model, counted),
    }
    with ab.Executor(steps, mode, dataloaders={"train": loader_of()}, timeout=STEP_SECONDS) as executor:
        signal.signal(signal.SIGTERM, lambda *_: executor.request_stop())

        def check() -> None:
            seen = executor.run("count", torch.arange(COUNTERS))["counts"].long()
            wrong = seen - counts_after(executor.step)
            write("check", lost=int(-wrong.clamp(max=0).sum()), twice=int(wrong.clamp(min=0).sum()))

        while not executor.stopping:
            began = time.monotonic()
            executor.run("train")
            write("step", step=executor.step, seconds=time.monotonic() - began)
            if executor.step % CHECK_EVERY == 0:
                check()
            if executor.step % SAVE_EVERY == 0:
                executor.save(out / "checkpoint", wait=False)
        check()
        executor.export(out / "trained")
        statistics = executor.statistics()
        write("end", step=executor.step, again=statistics.repeated_steps, memberships=statistics.memberships)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="where records and checkpoints go")
    parser.add_argument("--mode", default="Hybrid")
    options = parser.parse_args()
    job = ab.job()
    if job.role == "expert":
        job.serve(make_backends, checkpoint_dir=options.out / "experts", checkpoint_seconds=5.0)
    train(options.out, options.mode, job)


if __name__ == "__main__":
    main()
