"""What the files of this folder start: a table on the parameter servers, experts found in the directory, and workers.

::

    python train.py                                                      alone, without servers and experts
    anabranch run --workers 2 --servers 2 train.py                       on one machine
    torchrun --nnodes 2 ... train.py --experts 4 --out SHARED            on several, see job.sbatch and kubernetes/

::

    8 ids ── table, rows on the servers ── sum ── 32 ──┬───────────────── + ── 1 number
                                                       └── best 2 of N ───┘   with --experts

Each run goes on from the newest checkpoint in ``--out``, so whoever starts the workers again may do it at any time.
Prints one line of JSON last.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn

import anabranch as ab

IDS, SLOTS, WIDTH, ROWS = 20_000, 8, 32, 512


class Model(nn.Module):
    """(B, SLOTS) ids -> (B,) numbers."""

    def __init__(self, job: ab.Job, experts: int) -> None:
        super().__init__()
        here = nn.EmbeddingBag(IDS, WIDTH, mode="sum")
        self.table = ab.RemoteEmbedding("ids", IDS, WIDTH, mode="sum") if job.servers else here
        self.mixture: nn.Module | None = None
        if experts:
            if job.directory is None:
                raise SystemExit("--experts needs a directory: set ANABRANCH_DIRECTORY")
            # A row of which no expert answers goes on as it came: a lost pod costs quality for a while, not the run.
            self.mixture = ab.RemoteMixtureOfExperts(
                WIDTH, [experts], job.directory, "ffn", k_best=2, allow_zero_outputs=True, backward_k_min=0
            )
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        if self.mixture is not None:
            hidden = hidden + self.mixture(hidden)
        return self.out(hidden).squeeze(1)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    ids, wanted = batch
    return nn.functional.mse_loss(model(ids), wanted)


def part_of(step: int, job: ab.Job) -> tuple[Tensor, Tensor]:
    """Return a worker's part of a step's ids and of what they add up to.

    The step's are the same however often the job is started again, and for any number of workers.
    """
    generator = torch.Generator().manual_seed(step)
    ids = (torch.rand(ROWS, SLOTS, generator=generator) ** 4 * IDS).long()[job.rank :: job.world_size]
    return ids, (ids % 2 * 2 - 1).float().sum(dim=1)


def make_backends(index: int, count: int) -> list[ab.ExpertBackend]:
    """Return the experts of one server: ffn.0 and ffn.1 of the first, ffn.2 and ffn.3 of the second."""
    backends = []
    for number in (2 * index, 2 * index + 1):
        torch.manual_seed(number)
        module = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
        backends.append(ab.ExpertBackend(f"ffn.{number}", module, optimizer, args_schema=[ab.TensorSpec(WIDTH)]))
    return backends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--experts", type=int, default=0, help="how many ffn.0, ffn.1, ... there are to choose from")
    parser.add_argument("--out", type=Path, default=Path("runs/cluster"), help="a folder that all hosts see")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--comm-mode", choices=["AllReduce", "PS", "Hybrid"], help="by default what the job has")
    options = parser.parse_args()

    job = ab.job()
    torch.manual_seed(options.seed)
    model = Model(job, options.experts)
    step = ab.TrainStep(model, loss, torch.optim.Adagrad(model.parameters(), lr=0.1))
    suits = "Hybrid" if job.servers else "AllReduce" if job.world_size > 1 else None
    with ab.Executor(step, comm_mode=options.comm_mode or suits) as executor:
        executor.resume(options.out)
        first, last = executor.step, 0.0
        while executor.step < options.steps and not executor.stopping:
            last = float(executor.run(batch=lambda job: part_of(executor.step, job))["loss"])
            if executor.step % options.save_every == 0:
                executor.save(options.out)
        executor.save(options.out)
        if ab.job().rank == 0:
            print(json.dumps({"first": first, "steps": executor.step, "loss": round(last, 6)}), flush=True)


if __name__ == "__main__":
    main()
