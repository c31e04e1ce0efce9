"""What every worker of a job with servers runs: the failures there, and how the job continues."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab

ROWS = 24


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).mean(1))[:, 0]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["ids"]), batch["y"])


def batch_of(step: int, rank: int, world: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, ROWS, (7, 3), generator=generator)
    y = torch.randn(7, generator=generator, dtype=torch.float64)
    part = slice(7 * rank // world, 7 * (rank + 1) // world)
    return {"ids": ids[part], "y": y[part]}


def new_model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def executor_of(model: Model, mode: str | None, **options: object) -> ab.Executor:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.01)
    look = ab.EvalStep(model, lambda model, ids: {"rows": model.table(ids)})
    return ab.Executor({"train": ab.TrainStep(model, loss, optimizer), "look": look}, mode, **options)


def numbers(executor: ab.Executor, model: Model) -> list[float]:
    rows = executor.run("look", torch.arange(ROWS))["rows"]
    return [*rows.flatten().tolist(), *model.head.weight.flatten().tolist(), *model.head.bias.tolist()]


def stop_one(path: str, bound: int, cached: bool) -> dict[str, object]:
    """Rank 1 makes three steps and stops, until rank 0 was halted; then both go on to the tenth."""
    model, folder, rank = new_model(), Path(path), ab.job().rank
    halted = folder / "halted"
    alone = {"done": 0, "error": ""}
    options: dict[str, object] = {}
    if cached:  # all that a step reads is here from the first on
        model.head.requires_grad_(False)
        options = {"cache": ab.Cache(capacity=ROWS, pull_bound=100, push_bound=100)}
    with executor_of(model, "PS", consistency=f"ssp:{bound}", **options) as executor:
        for step in range(10):
            # A new machine compiles its kernels in the first steps.
            executor._remote.client._calls.timeout = 400.0 if halted.exists() or step < 3 or rank == 1 else 30.0
            if step == 3:
                (folder / f"stopped-{rank}").touch()
                wait_for(halted if rank == 1 else folder / "stopped-1")
            while executor.statistics().steps == step:
                try:
                    executor.run("train", batch_of(0 if cached else step, rank, 2))
                except ab.DeadlineExceeded as error:
                    if not halted.exists():
                        alone = {"done": step, "error": str(error)}
                        halted.touch()
    return alone


def wait_for(path: Path) -> None:
    until = time.monotonic() + 400.0
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.01)


def die(grad: Tensor) -> None:
    time.sleep(0.3)  # so that the others have this worker's share of the totals
    os.kill(os.getpid(), signal.SIGKILL)


def lose_one(mode: str) -> None:
    """Rank 1 is killed in its fourth step, once it has said how many rows it has and before its gradients left."""
    model, rank, world = new_model(), ab.job().rank, ab.job().world_size

    def fatal(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        value = loss(model, batch)
        if rank == 1 and executor.statistics().steps == 3:
            value.register_hook(die)
        return value

    step = ab.TrainStep(model, fatal, torch.optim.Adam(model.parameters(), lr=0.05))
    with ab.Executor(step, mode, engine="tape", heartbeat=1.0, timeout=50.0) as executor:
        for number in range(3):
            executor.run(batch=batch_of(number, rank, world))
        began = time.monotonic()
        try:
            for number in range(3, 6):
                executor.run(batch=batch_of(number, rank, world))
        except ab.PeerLost as error:
            print(json.dumps({"peer": error.peer, "seconds": time.monotonic() - began}), flush=True)
            raise


def go_on(folder: str, mode: str, last: int, at_end: str) -> dict[str, object]:
    """Trains from the newest checkpoint to step ``last``, then saves, or stops because rank 1 asks for it."""
    model, rank, world = new_model(), ab.job().rank, ab.job().world_size
    with executor_of(model, mode, cache=ab.Cache(capacity=10)) as executor:
        executor.resume(folder)
        while (step := executor.statistics().steps) < last and not executor.stopping:
            if at_end == "stop" and step == 3 and rank == 1:
                executor.request_stop()
            executor.run("train", batch_of(step, rank, world))
        executor.save(folder)
        return {"steps": executor.statistics().steps, "numbers": numbers(executor, model)}


def killed(folder: str, mode: str) -> dict[str, object]:
    """Trains to step 6 and saves every second step; the first time rank 1 is killed in the fifth."""
    model, rank, world = new_model(), ab.job().rank, ab.job().world_size
    with executor_of(model, mode, timeout=50.0) as executor:
        resumed = executor.resume(folder)
        while (step := executor.statistics().steps) < 6:
            if rank == 1 and step == 5 and not resumed:
                os.kill(os.getpid(), signal.SIGKILL)
            executor.run("train", batch_of(step, rank, world))
            if step % 2 == 1:
                executor.save(folder)
        return {"resumed": resumed, "numbers": numbers(executor, model)}
