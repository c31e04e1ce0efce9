"""Run by every worker of a job: trains on a device, in each way of communicating, beside the plain loop.

PyTorch's default device may be another, where nothing of the library's own belongs.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab

ROWS, STEPS = 24, 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4)
        self.bag = nn.EmbeddingBag(ROWS, 4, mode="sum")
        self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).mean(1) + self.bag(ids))[:, 0]  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["ids"]), batch["y"])


def new_training(device: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = Model().double()
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def batch_of(step: int, rank: int, world: int, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    batch = {
        "ids": torch.randint(0, ROWS, (8, 3), generator=generator, device="cpu"),
        "y": torch.randn(8, generator=generator, dtype=torch.float64, device="cpu"),
    }
    part = slice(8 * rank // world, 8 * (rank + 1) // world)
    return {name: value[part].to(device) for name, value in batch.items()}


def predictions(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    return {"y": model(ids)}


def all_rows(device: str) -> Tensor:
    return torch.arange(ROWS, device=device)[:, None]


def plain_loop(device: str, clip: float | None) -> tuple[list[Tensor], Tensor]:
    """The losses, and what the trained model says."""
    model, optimizer, scheduler = new_training(device)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss(model, batch_of(step, 0, 1, device))
        value.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        losses.append(value.detach())
    with torch.no_grad():
        return losses, model(all_rows(device))


def with_workers(
    device: str, mode: str | None, engine: Any, clip: float | None, folder: Path
) -> tuple[list[Tensor], Tensor]:
    """Half of the steps, a checkpoint, and the rest by a new executor that loads it."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    losses: list[Tensor] = []
    said = torch.empty(0)
    for part in range(2):
        model, optimizer, scheduler = new_training(device)
        steps = {
            "train": ab.TrainStep(model, loss, optimizer, scheduler=scheduler, clip_grad_norm=clip),
            "predict": ab.EvalStep(model, predictions),
        }
        with ab.Executor(steps, mode, engine=engine, timeout=120.0) as executor:
            if part:
                executor.load(folder)
            for step in range(STEPS * part // 2, STEPS * (part + 1) // 2):
                losses.append(executor.run("train", batch_of(step, rank, world, device))["loss"])
                assert losses[-1].device.type == torch.device(device).type
            assert executor.engine("train") == engine
            said = executor.run("predict", all_rows(device))["y"]
            if not part:
                executor.save(folder)
    return losses, said


def main() -> None:
    device, mode, engine, clip, folder, default = sys.argv[1:]
    if default != "cpu":
        torch.set_default_device(default)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")  # which also sums CUDA tensors, even of ranks that share a GPU
    norm = float(clip) if clip else None
    wanted = plain_loop(device, norm)
    found = with_workers(device, mode or None, engine, norm, Path(folder))
    pairs = zip([*found[0], found[1]], [*wanted[0], wanted[1]], strict=True)
    apart = [float((one - other).abs().max()) for one, other in pairs]
    assert all(map(math.isfinite, apart)), apart
    print(json.dumps({"apart": max(apart)}))


if __name__ == "__main__":
    main()
