"""A byte-level language model of real text, trained by one process or by several.

    python examples/language_model.py                          # one process
    anabranch run --workers 2 examples/language_model.py       # two, their gradients averaged
    anabranch run --workers 4 examples/language_model.py --stages 2                 # two pipelines of two stages
    anabranch run --workers 2 --servers 1 --experts 2 examples/language_model.py    # and more processes, see below
    anabranch run --workers 4 --servers 1 --experts 2 examples/language_model.py --stages 2     # all of it in one job

It learns to predict the next byte of the Python standard library's sources (or of ``--text``), and is measured in bits
per byte on files it never saw, beside what ``lzma`` needs for the same bytes::

    bytes ──> byte embedding ───────────────(+)──> 4 causal blocks ──> norm ──┐
      └─────> n-gram memory ──> linear ──────┘                             (concat) ──> head ──> next byte
                    └──────────────────────── long skip ──────────────────────┘

The memory is one large table with a row for every hashed 2-, 3- and 4-gram. A step touches few of its rows, so its
gradient is sparse and Adagrad updates it; AdamW trains the rest. Killed at any point, the same command goes on from the
last checkpoint.

Where the job has servers, the memory's table lives on them; nothing else changes. Where it has expert processes, the
feed-forward layer of one block is a mixture of experts that train themselves there. With ``--stages`` the layers lie in
a pipeline across workers (or on threads of a lone process), and the long skip goes straight from its first stage to its
last.

``_text.py`` has the text and its batches, ``_experts.py`` the mixture, ``_report.py`` what is shown and kept. Shapes:
B windows, T positions, D width, M what the memory gives a position.
"""

from __future__ import annotations

import argparse
import lzma
import math
import os
import shutil
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _experts import Experts, uids_of
from _kills import Kills, leave_pid, plan_of_kills
from _report import BITS, Curve, Screen
from _run import Team, add_usual, at_least_one, prepare, present, reported, save_or_stop, stopped_by_signals, team_of
from _text import CONTEXT, Windows, standard_library, text_of, windows_in_order
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import anabranch as ab
from anabranch.job import DirectoryLike, Grid
from anabranch.pipeline import make_schedule, save_picture

WIDTH = 128
HEADS = 2
BLOCKS = 4
BLOCK_OF_EXPERTS = 2  # counted from 0
MEMORY_WIDTH = 32
NGRAMS = (2, 3, 4)
MEMORY = "read.memory."
MICROBATCHES = 4


# The model. -----------------------------------------------------------------------------------------------------------


class NgramMemory(nn.Module):
    """A learned row for every hashed n-gram that ends at a position, (B, T) -> (B, T, M); unlucky ones share a row."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, MEMORY_WIDTH, sparse=True)
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, text_BT: Tensor) -> Tensor:
        positions = text_BT.shape[1]
        padded = F.pad(text_BT, (max(NGRAMS) - 1, 0))
        gram = text_BT
        slots = []
        for n in NGRAMS:
            start = max(NGRAMS) - n
            gram = gram << 8 | padded[:, start : start + positions]
            mixed = (gram + (n << 32)) * 0x2545F4914F6CDD1D  # wraps around; its high bits depend on all bytes
            slots.append((mixed >> 32) % self.table.num_embeddings)
        return self.table(torch.stack(slots, -1)).flatten(2)


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


class Block(nn.Module):
    """Causal attention, then a feed-forward layer, each added to what came in: (B, T, D) -> (B, T, D)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, experts: Experts | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attended = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed_forward_norm = nn.LayerNorm(WIDTH)
        self.feed_forward = experts or feed_forward()
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.01)  # a block adds little at first
        half = WIDTH // HEADS // 2
        angles = torch.arange(CONTEXT)[:, None] * 1000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.query_key_value(self.attention_norm(hidden_BTD)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(self.turned(query), self.turned(key), value, is_causal=True)
        hidden_BTD = hidden_BTD + self.attended(attended.transpose(1, 2).flatten(2))
        return hidden_BTD + self.feed_forward(self.feed_forward_norm(hidden_BTD))

    def turned(self, heads: Tensor) -> Tensor:
        """Each pair of numbers turned by an angle that grows with the position: products then depend on distances."""
        cos, sin = self.cos[: heads.shape[-2]], self.sin[: heads.shape[-2]]
        first, second = heads.chunk(2, -1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


@ab.skippable(stash=["memory"])
class Read(nn.Module):
    """Bytes (B, T) -> hidden (B, T, D); what the memory gives also jumps over the blocks, to the head."""

    def __init__(self, memory_rows: int) -> None:
        super().__init__()
        self.memory = NgramMemory(memory_rows)
        self.bytes = nn.Embedding(256, WIDTH)
        self.read_memory = nn.Linear(2 * MEMORY_WIDTH * len(NGRAMS), WIDTH)
        nn.init.normal_(self.bytes.weight, std=0.02)

    def forward(self, text_BT: Tensor) -> Generator[Any, Any, Tensor]:
        memory_BTM = self.memory(text_BT)
        yield ab.stash("memory", memory_BTM)
        # The n-grams that end one byte earlier, too: attention can look for them, and finds what followed them there.
        earlier_BTM = F.pad(memory_BTM, (0, 0, 1, 0))[:, :-1]
        return self.bytes(text_BT) + self.read_memory(torch.cat([memory_BTM, earlier_BTM], -1))


@ab.skippable(pop=["memory"])
class Write(nn.Module):
    """Hidden (B, T, D) -> scores of the 256 bytes that may come next, (B, T, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH + MEMORY_WIDTH * len(NGRAMS), 256)

    def forward(self, hidden_BTD: Tensor) -> Generator[Any, Any, Tensor]:
        memory_BTM = yield ab.pop("memory")
        return self.head(torch.cat([self.norm(hidden_BTD), memory_BTM], -1))


def language_model(memory_rows: int, experts: Experts | None = None) -> nn.Sequential:
    """Bytes (B, T) -> scores of the bytes that may come next, (B, T, 256)."""
    read = Read(memory_rows)
    blocks = nn.Sequential(*(Block(experts if i == BLOCK_OF_EXPERTS else None) for i in range(BLOCKS)))
    return nn.Sequential(OrderedDict(read=read, blocks=blocks, write=Write()))


# Training. ------------------------------------------------------------------------------------------------------------


def loss(model: nn.Module, text: Tensor) -> Tensor:
    return loss_of_output(model(text[:, :-1]), text[:, 1:])


def pair(windows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return what a pipeline takes: its input and its target."""
    text = torch.stack(windows)
    return text[:, :-1], text[:, 1:]


def loss_of_output(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def predicted(model: nn.Module, text: Tensor) -> dict[str, Tensor]:
    scores, target = model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()
    return {"nats": F.cross_entropy(scores, target).double()}


def predicted_bytes(text: Tensor) -> int:
    return text[:, 1:].numel()


def warm_up_and_cool_down(steps: int, warm_up: int = 50) -> Callable[[int], float]:
    """Return the share of the learning rate at a step: a straight rise, then half a cosine down to nearly nothing."""

    def share(step: int) -> float:
        return min(1.0, (step + 1) / warm_up) * (0.02 + 0.98 * (1 + math.cos(math.pi * min(1.0, step / steps))) / 2)

    return share


def cool_down(steps: int) -> Callable[[int], float]:
    """Adagrad slows down by itself; it is slowed down further at the very end only."""
    return lambda step: min(1.0, max(0.2, (1 - step / steps) / 0.15))


def training_step(model: nn.Module, steps: int) -> ab.TrainStep:
    memory = [value for name, value in model.named_parameters() if name.startswith(MEMORY)]
    others = [value for name, value in model.named_parameters() if not name.startswith(MEMORY)]
    adagrad = torch.optim.Adagrad([{"params": memory}], lr=0.2)  # a stage without the memory has none to give
    adamw = torch.optim.AdamW(
        [
            {"params": [value for value in others if value.ndim > 1], "weight_decay": 0.1},
            {"params": [value for value in others if value.ndim == 1], "weight_decay": 0.0},
        ],
        lr=5e-3,
        betas=(0.9, 0.98),
        fused=True,
    )
    schedulers = [LambdaLR(adagrad, cool_down(steps)), LambdaLR(adamw, warm_up_and_cool_down(steps))]
    chosen = loss_of_output if isinstance(model, ab.Pipe) else loss
    return ab.TrainStep(model, chosen, [adagrad, adamw], scheduler=schedulers)


def serve_experts(options: argparse.Namespace, job: ab.Job) -> DirectoryLike:
    """In an expert process: serves two of them until the job ends. In a worker: the directory of all of them."""
    checkpoint = options.out / "experts"

    def make_backends(index: int, count: int) -> list[ab.ExpertBackend]:
        # Experts go on where their last state was saved, but for the first time in a run that begins anew.
        begins = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if begins and (options.fresh or not (options.out / "checkpoint").exists()):
            for uid in uids_of(index):
                shutil.rmtree(checkpoint / uid, ignore_errors=True)
        # An update for each worker's share of a batch; a pipeline's comes in microbatches.
        shares = job.workers if options.stages == 1 else max(1, job.workers // options.stages) * MICROBATCHES
        leave_pid(options.out, f"expert {index}")
        return [expert(uid, options.steps * shares) for uid in uids_of(index)]

    torch.manual_seed(options.seed * 2**10 + job.rank)
    return job.serve(make_backends, checkpoint_dir=checkpoint, checkpoint_seconds=10.0)


def expert(uid: str, updates: int) -> ab.ExpertBackend:
    """Return a feed-forward layer that trains itself; every call's gradients are an update of their own."""
    module = feed_forward()
    for weight in module.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.01)
    adamw = torch.optim.AdamW(module.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.1, fused=True)
    schedule = LambdaLR(adamw, warm_up_and_cool_down(updates, warm_up=100))
    # What a forward has computed is kept for its backward: the inputs cross once, and nothing is computed twice.
    return ab.ExpertBackend(
        uid, module, adamw, args_schema=[ab.TensorSpec(WIDTH)], scheduler=schedule, keep_activations=2**14
    )


class Parts:
    """A worker's part of some batches, which is another if a worker is lost and the evaluation begins again."""

    def __init__(self, batches: list[Tensor], team: Callable[[], Team]) -> None:
        self._batches, self._team = batches, team

    def __iter__(self) -> Iterator[Tensor]:
        team = self._team()
        return iter(self._batches[team.rank :: team.workers])


def bits_per_byte(executor: ab.Executor, batches: list[Tensor], team: Callable[[], Team]) -> float:
    """Return what the model needs for the bytes of all batches; every worker measures its part of them."""
    return executor.evaluate("validate", Parts(batches, team))["nats"].item() * BITS


def train_on(
    executor: ab.Executor,
    team: Team,
    curve: Curve,
    screen: Screen,
    held_out: list[Tensor],
    kills: Kills | None,
    options: argparse.Namespace,
) -> float:
    """Trains to the last step, measuring and saving on the way; returns the seconds that the steps alone took."""
    seconds = 0.0
    evaluate_every = options.evaluate_every or max(1, options.steps // 10)
    while executor.step < options.steps:
        began = time.monotonic()
        curve.losses.append(executor.run("train")["loss"].item())
        step, team = executor.step, present(team, options)
        step_seconds = time.monotonic() - began
        seconds += step_seconds
        screen.trained(step, curve.losses[-1], step_seconds)
        if step % evaluate_every == 0 or step == options.steps:
            curve.held_out.append((step, bits_per_byte(executor, held_out, partial(present, team, options))))
            screen.evaluated(step, curve.held_out[-1][1])
        beside = [partial(curve.save, team.out / "curve.json")] if team.leads else []
        save_or_stop(executor, team, options, *beside)
        if kills:
            kills.after(step)
    return seconds


# The run. -------------------------------------------------------------------------------------------------------------


def parse_options(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a byte-level language model on real text.", allow_abbrev=False)
    add_usual(parser, steps=800, out="runs/language_model", evaluations="a tenth")
    add = parser.add_argument
    add("--batch", type=at_least_one, help=f"windows of {CONTEXT} bytes a step, of all workers together (8 or so)")
    add("--text", type=Path, nargs="+", metavar="PATH", help="files or directories (Python's own sources)")
    add("--memory-rows", type=at_least_one, default=2**20, help="rows of the n-gram memory (%(default)s)")
    add("--stages", type=at_least_one, default=1, help="of each pipeline that the workers make (%(default)s)")
    add("--kill", action="store_true", help="kill an expert process and a worker while training")
    options = parser.parse_args(given)
    if ab.job().role == "expert":  # never sees the text
        return options
    try:
        options.text = text_of(options.text) if options.text else standard_library()
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return options


def batch_of(options: argparse.Namespace, team: Team) -> int:
    """How many windows a step has, the same for a worker that joins when others are gone."""
    if team.grid:
        return team.share(options.batch or -(-8 // team.workers) * team.workers, "--batch") * team.workers
    if (batch := options.batch or max(8, team.workers)) < team.workers:
        sys.exit(f"--batch {batch} leaves some of {team.workers} workers without a window")
    return batch


def grid_of(options: argparse.Namespace, job: ab.Job) -> Grid | None:
    """Return the workers as pipelines; a lone process has its stages on threads."""
    if options.stages == 1:
        return None
    if options.stages > BLOCKS + 2:
        sys.exit(f"--stages {options.stages}: this model has {BLOCKS + 2} layers, so at most as many stages")
    if job.world_size == 1:
        return None
    if job.world_size % options.stages:
        sys.exit(f"{job.world_size} workers make no pipelines of --stages {options.stages}; start a multiple of it")
    return job.grid(data=job.world_size // options.stages, pipeline=options.stages)


def split(model: nn.Sequential, options: argparse.Namespace, team: Team) -> nn.Module:
    """Return the model in stages of as many layers each, if there are to be any."""
    if options.stages == 1:
        return model
    layers = BLOCKS + 2
    balance = [layers // options.stages + (j < layers % options.stages) for j in range(options.stages)]
    group = team.grid.pipeline_group if team.grid else None
    return ab.Pipe(model, balance, chunks=MICROBATCHES, checkpoint="never", schedule="1F1B", process_group=group)


def picture_of_schedule(options: argparse.Namespace, team: Team) -> list[str]:
    if options.stages == 1:
        return []
    path = team.out / "schedule.svg"
    if team.leads:
        save_picture(make_schedule("1F1B", options.stages, MICROBATCHES), path)
    return [f"stages: {options.stages} a pipeline; who does what when is drawn in {path}"]


def where_else(job: ab.Job) -> str:
    servers = f"servers: {len(job.servers)}, " if job.servers else ""
    return servers + (f"processes of experts: {job.experts}, " if job.experts else "")


def run(options: argparse.Namespace, job: ab.Job) -> dict[str, object]:
    """Trains, measures and reports; returns what the last line says."""
    began = time.monotonic()
    text, team = options.text, team_of(options.comm_mode, options.out, job, grid_of(options, job))
    batch = batch_of(options, team)
    settings = {"steps": options.steps, "batch": batch, "seed": options.seed, "memory_rows": options.memory_rows}
    prepare(team, settings | {"text": text.fingerprint, "experts": job.experts}, fresh=options.fresh)
    leave_pid(options.out, f"worker {job.rank}")
    curve = Curve()
    experts = Experts(WIDTH, serve_experts(options, job), job.experts) if job.experts else None
    torch.manual_seed(options.seed)
    whole = language_model(options.memory_rows, experts)
    parameters = sum(value.numel() for value in whole.parameters())  # before some move to servers and other stages
    if experts:
        parameters += experts.count * sum(value.numel() for value in feed_forward().parameters())
    model = split(whole, options, team)
    train = training_step(model, options.steps)
    collate = pair if isinstance(model, ab.Pipe) else None
    windows = Windows(text.train, options.steps * batch, options.seed)
    held_out = windows_in_order(text.held_out)
    with (
        ab.Executor(
            {"train": train, "validate": ab.EvalStep(model, predicted, rows=predicted_bytes)},
            comm_mode=team.comm_mode,
            engine=options.engine,
            dataloaders={"train": ab.loaders.GlobalBatches(windows, batch, shuffle=False, collate_fn=collate)},
            process_group=team.grid.data_group if team.grid else None,
        ) as executor,
        model if isinstance(model, ab.Pipe) else nullcontext(),
    ):
        done = 0
        if not options.fresh and executor.resume(team.out / "checkpoint"):
            done = train.schedulers[0].last_epoch
            curve.continue_from(team.out / "curve.json", done)
        also = experts.in_use if experts else None
        with (
            Screen(options.steps, done, batch * CONTEXT, shown=job.rank == 0, also=also) as screen,
            stopped_by_signals(executor),
        ):
            at = plan_of_kills(job, options.steps) if options.kill else {}
            missing = experts.missing if experts else lambda: 0
            kills = Kills(options.out, at, missing, screen.say, fresh=options.fresh) if job.rank == 0 else None
            screen.say(
                f"{parameters / 1e6:.1f} million parameters, "
                f"{len(text.train) / 1e6:.2f} MB of text to train on: {text.source}",
                f"workers: {job.world_size}, {where_else(job)}communication: {team.mode}",
                "bits/byte are those of held-out text",
                *picture_of_schedule(options, team),
                *([f"going on from the checkpoint after step {done}"] if 0 < done < options.steps else []),
                *(["training has ended before; --fresh starts anew"] if done == options.steps else []),
            )
            some = held_out[:: max(1, len(held_out) // 8)]
            seconds = train_on(executor, team, curve, screen, some, kills, options)
        screen.say(f"measuring all {len(text.held_out):,} held-out bytes")
        bits, job = bits_per_byte(executor, held_out, partial(present, team, options)), ab.job()
    lzma_bits = 8 * len(lzma.compress(text.held_out, preset=9 | lzma.PRESET_EXTREME)) / len(text.held_out)
    if job.rank == 0:
        screen.say("", f"lzma -9e    {lzma_bits:.3f} bits/byte", f"this model  {bits:.3f} bits/byte", "")
        screen.say(curve.draw(team.out / "loss.png", lzma_bits))
    return {
        "steps": options.steps,
        "seed": options.seed,
        "comm_mode": executor.comm_mode or "None",
        "workers": job.world_size,
        "servers": len(job.servers),
        "experts": job.experts,
        "stages": options.stages,
        "loss": curve.losses[-1],
        "bits_per_byte": bits,
        "lzma_bits_per_byte": lzma_bits,
        "held_out_bytes": len(text.held_out),
        "resumed_from": done,
        "missed_seconds": kills.missed if kills else {},
        "seconds": round(time.monotonic() - began, 2),
        "steps_per_second": round((options.steps - done) / max(1e-9, seconds), 2),
        "out": str(team.out),
    }


def main(given: list[str] | None = None) -> int:
    # Adagrad's sparse update builds a tensor from slots that are in range already; torch asks to say so.
    torch.sparse.check_sparse_tensor_invariants.disable()
    options, job = parse_options(given), ab.job()
    if job.role == "expert":
        serve_experts(options, job)
    return reported(lambda: run(options, job))


if __name__ == "__main__":
    sys.exit(main())
