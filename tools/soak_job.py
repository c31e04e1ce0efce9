"""The training job that ``soak.py`` disturbs: tables on servers, a dense part all-reduced, a mixture of experts.

One of the tables counts. Each lookup of a row has a gradient of -1 / (rows of all workers' batches), and its optimizer
the learning rate that makes it 1, so after n steps a row holds how often it was looked up in them, to the bit: an
update that was lost, or applied twice, shows as a number. Each worker writes down what it saw, one JSON line an event.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import anabranch as ab
from anabranch.job import DirectoryLike

BATCH = 8  # rows of each worker's batch: a power of two, so that counting is exact
COUNTERS = 64
ROWS = 10_000
WIDTH = 16
EXPERTS_A_PROCESS = 2
STEP_SECONDS = 30.0
"""The deadline of a step: what a wait for workers, servers or experts may last."""

SAVE_EVERY = 50
CHECK_EVERY = 25


class Record:
    """What one worker saw, appended to its file line by line, so that a kill costs no line that was written."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, event: str, step: int, **facts: float) -> None:
        line = json.dumps({"event": event, "step": step, "time": time.monotonic(), **facts})
        os.write(self._file, line.encode() + b"\n")


class Model(nn.Module):
    """Ids (B, 4) -> scores (B,), and the counts of the rows that were looked up."""

    def __init__(self, directory: DirectoryLike | None, experts: int) -> None:
        super().__init__()
        self.counts = nn.Embedding(COUNTERS, 1, sparse=True)
        nn.init.zeros_(self.counts.weight)
        self.features = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.mixture = (
            None
            if directory is None
            else ab.RemoteMixtureOfExperts(
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
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.features(ids).mean(1)
        if self.mixture is not None:
            hidden = hidden + self.mixture(hidden)
        scores: Tensor = self.head(hidden).squeeze(1)
        return scores


def batch_of(step: int, rank: int, workers: int) -> dict[str, Tensor]:
    """Return the batch, the same whenever the step is done, and done again."""
    generator = torch.Generator().manual_seed(step * workers + rank)
    return {
        "counted": torch.randint(COUNTERS, (BATCH,), generator=generator),
        "ids": torch.randint(ROWS, (BATCH, 4), generator=generator),
    }


def loss(model: Model, batch: dict[str, Tensor]) -> Tensor:
    wanted = (batch["ids"].sum(1) % 2).float()
    return nn.functional.mse_loss(model(batch["ids"]), wanted) - model.counts(batch["counted"]).mean()


def counted(model: Model, batch: Tensor) -> dict[str, Tensor]:
    return {"counts": model.counts(batch).squeeze(1)}


def make_backends(index: int, count: int) -> list[ab.ExpertBackend]:
    """Two experts, which train themselves."""
    backends = []
    for uid in range(index * EXPERTS_A_PROCESS, (index + 1) * EXPERTS_A_PROCESS):
        torch.manual_seed(uid)
        module = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        adam = torch.optim.Adam(module.parameters(), lr=1e-3)
        backends.append(ab.ExpertBackend(f"soak.{uid}", module, adam, args_schema=[ab.TensorSpec(WIDTH)]))
    return backends


class Counting:
    """What the counting table must hold, kept beside it."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._step = 0
        self._counts = torch.zeros(COUNTERS, dtype=torch.int64)

    def at(self, step: int) -> Tensor:
        for done in range(self._step, step):
            for rank in range(self._workers):
                self._counts += torch.bincount(batch_of(done, rank, self._workers)["counted"], minlength=COUNTERS)
        self._step = step
        return self._counts


def train(out: Path, job: ab.Job) -> None:
    record = Record(out / f"record-{job.rank}.jsonl")
    directory = job.serve(make_backends) if job.experts else None
    torch.manual_seed(0)
    model = Model(directory, job.experts)
    rest = [*model.features.parameters()]
    dense = [value for name, value in model.named_parameters() if not name.startswith(("counts", "features"))]
    optimizers = [
        torch.optim.SGD(model.counts.parameters(), lr=float(BATCH * job.world_size)),
        torch.optim.Adagrad(rest, lr=0.05),
        torch.optim.Adam(dense, lr=1e-3),
    ]
    schedulers = [LambdaLR(optimizer, lambda step: 1.0) for optimizer in optimizers]
    steps = {
        "train": ab.TrainStep(model, loss, optimizers, scheduler=schedulers),
        "count": ab.EvalStep(model, counted),
    }
    counting = Counting(job.world_size)
    with ab.Executor(steps, comm_mode="Hybrid", timeout=STEP_SECONDS) as executor:
        signal.signal(signal.SIGTERM, lambda *_: executor.request_stop())

        def check(step: int) -> None:
            seen = executor.run("count", torch.arange(COUNTERS))["counts"].long()
            wrong = seen - counting.at(step)
            record.write("check", step, lost=int(-wrong.clamp(max=0).sum()), doubled=int(wrong.clamp(min=0).sum()))

        executor.resume(out / "checkpoint")
        step = schedulers[0].last_epoch
        record.write("resume", step)
        check(step)
        while not executor.stopping:
            began = time.monotonic()
            executor.run("train", batch_of(step, job.rank, job.world_size))
            step += 1
            record.write("step", step, seconds=time.monotonic() - began)
            if step % CHECK_EVERY == 0:
                check(step)
            if step % SAVE_EVERY == 0:
                executor.save(out / "checkpoint")
                record.write("save", step)
        check(step)
        record.write("end", step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="where records and checkpoints go")
    options = parser.parse_args()
    job = ab.job()
    if job.role == "expert":
        job.serve(make_backends, checkpoint_dir=options.out / "experts", checkpoint_seconds=5.0)
    train(options.out, job)


if __name__ == "__main__":
    main()
