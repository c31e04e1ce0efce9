"""A U-Net that takes the noise off handwritten digits, its skips carried by stash and pop, in one process or in stages.

::

    python examples/unet.py                                 one process, two stages on the CPU
    anabranch run --workers 2 examples/unet.py              a stage a worker: the same loss curve

::

    stage 0   8x8 ── down ──────────────────── 4x4 ── down ───────── 2x2
                       └ stash "8x8"                    └ stash "4x4" │
    stage 1            ┌ pop "8x8"                      ┌ pop "4x4"   │
              8x8 ── up ──────────────────── 4x4 ── up ───────────── 2x2

Writes into ``--out``: ``digits.png`` (noisy, denoised, clean), ``loss.png``, ``schedule.svg``, ``losses.json`` and
``result.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _run import add_first, reported
from sklearn.datasets import load_digits
from torch import Tensor, nn

import anabranch as ab
from anabranch.pipeline import draw, isolate, make_schedule, save_picture

CHANNELS = 16
BALANCE = {1: [5], 2: [3, 2], 3: [1, 2, 2], 4: [1, 2, 1, 1]}


@ab.skippable(stash=["skip"])
class Down(nn.Module):
    """Keeps what it sees for the way back, and halves the picture."""

    def __init__(self, channels: int, wider: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, wider, 3, padding=1)
        self.norm = nn.GroupNorm(4, wider)

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        x = F.silu(self.norm(self.convolution(x)))
        yield ab.stash("skip", x)
        return F.avg_pool2d(x, 2)


@ab.skippable(pop=["skip"])
class Up(nn.Module):
    """Doubles the picture, and adds what was kept on the way down."""

    def __init__(self, channels: int, narrower: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, narrower, 3, padding=1)
        self.norm = nn.GroupNorm(4, narrower)
        self.mix = nn.Conv2d(2 * narrower, narrower, 3, padding=1)

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        x = F.silu(self.norm(self.convolution(F.interpolate(x, scale_factor=2.0))))
        kept = yield ab.pop("skip")
        return F.silu(self.mix(torch.cat([x, kept], dim=1)))


def unet() -> nn.Sequential:
    outer, inner = ab.Namespace(), ab.Namespace()
    return nn.Sequential(
        isolate(Down(1, CHANNELS), outer),
        isolate(Down(CHANNELS, 2 * CHANNELS), inner),
        nn.Sequential(nn.Conv2d(2 * CHANNELS, 2 * CHANNELS, 3, padding=1), nn.SiLU()),
        isolate(Up(2 * CHANNELS, 2 * CHANNELS), inner),
        nn.Sequential(isolate(Up(2 * CHANNELS, CHANNELS), outer), nn.Conv2d(CHANNELS, 1, 1)),
    )


def digits() -> tuple[Tensor, Tensor]:
    """1,697 pictures to learn from and 100 to show, 8x8, from 0 to 1."""
    found, _ = load_digits(return_X_y=True)
    pictures = torch.from_numpy(found).float().reshape(-1, 1, 8, 8) / 16.0
    return pictures[:-100], pictures[-100:]


def train(pipe: ab.Pipe, pictures: Tensor, steps: int, seed: int) -> list[float]:
    """Train; returns the loss of every step."""
    optimizer = torch.optim.Adam(pipe.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        clean = pictures[torch.randint(len(pictures), (64,), generator=generator)]
        noisy = clean + 0.4 * torch.randn(clean.shape, generator=generator)
        optimizer.zero_grad()
        result = pipe.step(noisy, clean, loss=F.mse_loss)
        pipe.clip_grad_norm(1.0)
        optimizer.step()
        losses.append(float(from_rank(pipe.output_rank, result.loss, torch.zeros(()))))
    return losses


def from_rank(rank: int, found: Tensor | None, empty: Tensor) -> Tensor:
    """Return what ``rank`` found, on every rank."""
    if not dist.is_initialized():
        assert found is not None
        return found
    values = found.clone() if found is not None and dist.get_rank() == rank else empty
    dist.broadcast(values, rank)
    return values


def show(out: Path, losses: list[float], rows: list[Tensor]) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no pictures: matplotlib is missing (pip install 'anabranch[examples]')")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 10, figsize=(10, 3.2), layout="constrained")
    for line, (name, pictures) in enumerate(zip(("noisy", "denoised", "clean"), rows, strict=True)):
        for axis, picture in zip(axes[line], pictures, strict=False):
            axis.imshow(picture[0].clamp(0, 1), cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
        axes[line][0].set_ylabel(name)
    figure.savefig(out / "digits.png", dpi=120)
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axis.plot(range(1, len(losses) + 1), losses)
    axis.set(xlabel="step", ylabel="mean squared error", yscale="log")
    figure.savefig(out / "loss.png", dpi=120)
    pyplot.close("all")
    print(f"pictures: {out / 'digits.png'}, {out / 'loss.png'}")


def run(options: argparse.Namespace) -> dict[str, object]:
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    job = ab.job()
    if job.world_size > max(BALANCE):
        raise SystemExit(f"this U-Net has at most {max(BALANCE)} stages, the job has {job.world_size} workers")
    balance = BALANCE[job.world_size if job.world_size > 1 else 2]
    group = None
    if job.world_size > 1:
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    pictures, shown = digits()
    options.out.mkdir(parents=True, exist_ok=True)
    with ab.Pipe(
        unet(), balance, chunks=options.chunks, schedule=options.schedule, process_group=group, seed=options.seed
    ) as pipe:
        losses = train(pipe, pictures, options.steps, options.seed)
        noisy = shown + 0.4 * torch.randn(shown.shape, generator=torch.Generator().manual_seed(options.seed + 1))
        with torch.no_grad():
            denoised = from_rank(pipe.output_rank, pipe(noisy), torch.zeros_like(noisy))
        print(pipe.describe())
    if job.rank == 0:
        schedule = make_schedule(options.schedule, len(balance), options.chunks)
        print(draw(schedule))
        save_picture(schedule, options.out / "schedule.svg")
        print(f"picture of the schedule: {options.out / 'schedule.svg'}")
        (options.out / "losses.json").write_text(json.dumps(losses))
        show(options.out, losses, [noisy, denoised, shown])
    before, after = (float(F.mse_loss(picture, shown)) for picture in (noisy, denoised))
    if group is not None:
        dist.destroy_process_group()
    result = {"loss": losses[-1], "noisy_error": before, "denoised_error": after}
    return {"steps": len(losses), **result, "out": str(options.out)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_first(parser, steps=200, out="runs/unet")
    parser.add_argument("--chunks", type=int, default=4, help="microbatches a batch")
    parser.add_argument("--schedule", default="1F1B", choices=["GPipe", "1F1B", "ZB1P"])
    options = parser.parse_args()
    return reported(lambda: run(options), resumes=False)


if __name__ == "__main__":
    sys.exit(main())
