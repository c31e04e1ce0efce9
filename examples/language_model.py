"""A byte-level language model of real text, trained by one process or by several.

    python examples/language_model.py                          # one process
    anabranch run --workers 2 examples/language_model.py       # two, their gradients averaged

It learns to predict the next byte of the Python standard library's sources (or of ``--text``), and is measured in bits
per byte on files it never saw, beside what ``lzma`` needs for the same bytes::

    bytes ──> byte embedding ───────────────(+)──> 4 causal blocks ──> norm ──┐
      └─────> n-gram memory ──> linear ──────┘                             (concat) ──> head ──> next byte
                    └──────────────────────── long skip ──────────────────────┘

The memory is one large table with a row for every hashed 2-, 3- and 4-gram. A step touches few of its rows, so its
gradient is sparse and Adagrad updates it; AdamW trains the rest. Killed at any point, the same command goes on from the
last checkpoint. Read from top to bottom: text, batches, model, training, what is shown, ``main``.

Shapes: B windows, T positions, D width, M what the memory gives a position.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import shutil
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import anabranch as ab

CONTEXT = 256
WIDTH = 128
HEADS = 2
BLOCKS = 4
MEMORY_WIDTH = 32
NGRAMS = (2, 3, 4)
BITS = 1 / math.log(2)  # in a nat


# Text. ----------------------------------------------------------------------------------------------------------------

NOT_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
HELD_OUT_FILES = 40


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to train on, bytes to be measured on, and where they come from."""

    train: bytes
    held_out: bytes
    source: str

    @property
    def fingerprint(self) -> int:
        return zlib.crc32(self.held_out, zlib.crc32(self.train))


def standard_library() -> Text:
    """Python's own sources without their tests; 40 files, chosen by a hash of their path, are held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in root.rglob("*.py") if not NOT_SOURCES & set(path.relative_to(root).parts)]
    return split_files({path.relative_to(root).as_posix(): path for path in paths}, HELD_OUT_FILES, f"{root}/**/*.py")


def text_of(given: list[Path]) -> Text:
    """Files, and all files under directories: one in twenty is held out, or the last twentieth of a lone file."""
    files: dict[str, Path] = {}
    for path in given:
        if not path.exists():
            raise ValueError(f"--text {path}: there is no such file or directory")
        found = [path] if path.is_file() else [inner for inner in path.rglob("*") if is_text(path, inner)]
        files.update(
            {(inner.relative_to(path) if inner != path else Path(path.name)).as_posix(): inner for inner in found}
        )
    source = " ".join(map(str, given))
    if len(files) != 1:
        return split_files(files, max(1, len(files) // 20), source)
    text = next(iter(files.values())).read_bytes()
    cut = len(text) - len(text) // 20
    return Text(text[:cut], text[cut:], source)


def is_text(root: Path, path: Path) -> bool:
    hidden = any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(root).parts)
    return path.is_file() and not hidden


def split_files(files: Mapping[str, Path], held_out: int, source: str) -> Text:
    """Holds out the files whose names have the lowest hashes: the same ones on every machine."""
    by_hash = sorted(files, key=lambda name: (zlib.crc32(name.encode()), name))

    def read(names: list[str]) -> bytes:
        return b"".join(files[name].read_bytes() for name in sorted(names))

    return Text(read(by_hash[held_out:]), read(by_hash[:held_out]), source)


def check_size(text: Text) -> Text:
    if len(text.train) <= CONTEXT or not text.held_out:
        raise ValueError(
            f"too little text in {text.source}: {len(text.train)} bytes to train on and {len(text.held_out)} held out; "
            f"training needs more than {CONTEXT}, and at least one must be held out: give more or longer files"
        )
    return text


# Batches. -------------------------------------------------------------------------------------------------------------


class Windows:
    """Endless batches of random windows of the text, (B, CONTEXT + 1) bytes: each predicts the next byte.

    The windows of a step depend on the seed and the step alone, and every worker takes its share of them: any number
    of workers sees the same batch.
    """

    def __init__(self, text: bytes, batch: int, seed: int, rank: int, workers: int) -> None:
        self.step = 0
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._batch = batch
        self._seed = seed
        self._rank = rank
        self._workers = workers

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            generator = torch.Generator().manual_seed(self._seed << 32 | self.step)
            starts = torch.randint(len(self._text) - CONTEXT, (self._batch, 1), generator=generator)
            self.step += 1
            yield self._text[starts[self._rank :: self._workers] + torch.arange(CONTEXT + 1)].long()

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.step = state["step"]


def windows_in_order(text: bytes, rows: int = 16) -> list[Tensor]:
    """Batches in which every byte of the text is predicted once; the first from a line feed."""
    padded = torch.frombuffer(bytearray(b"\n" + text), dtype=torch.uint8).long()
    whole = len(text) // CONTEXT
    batches = list(padded.unfold(0, CONTEXT + 1, CONTEXT)[:whole].split(rows)) if whole else []
    rest = padded[None, whole * CONTEXT :]
    return [*batches, rest] if rest.shape[1] > 1 else batches


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


class Block(nn.Module):
    """Causal attention, then a feed-forward layer, each added to what came in: (B, T, D) -> (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attended = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed_forward_norm = nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.query_key_value(self.attention_norm(hidden_BTD)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden_BTD = hidden_BTD + self.attended(attended.transpose(1, 2).flatten(2))
        return hidden_BTD + self.feed_forward(self.feed_forward_norm(hidden_BTD))


class LanguageModel(nn.Module):
    """Bytes (B, T) -> scores of the 256 bytes that may come next, (B, T, 256)."""

    def __init__(self, memory_rows: int) -> None:
        super().__init__()
        memory_width = MEMORY_WIDTH * len(NGRAMS)
        self.memory = NgramMemory(memory_rows)
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.read_memory = nn.Linear(memory_width, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH + memory_width, 256)
        nn.init.normal_(self.bytes.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, text_BT: Tensor) -> Tensor:
        memory_BTM = self.memory(text_BT)
        hidden_BTD = self.bytes(text_BT) + self.positions.weight[: text_BT.shape[1]] + self.read_memory(memory_BTM)
        hidden_BTD = self.norm(self.blocks(hidden_BTD))
        return self.head(torch.cat([hidden_BTD, memory_BTM], -1))


# Training. ------------------------------------------------------------------------------------------------------------


def loss(model: nn.Module, text: Tensor) -> Tensor:
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def predicted(model: nn.Module, text: Tensor) -> dict[str, Tensor]:
    scores, target = model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()
    return {"nats": F.cross_entropy(scores, target, reduction="sum").double()}


def warm_up_and_cool_down(steps: int, warm_up: int = 50) -> Callable[[int], float]:
    """The share of the learning rate at a step: a straight rise, then half a cosine down to nearly nothing."""

    def share(step: int) -> float:
        return min(1.0, (step + 1) / warm_up) * (0.02 + 0.98 * (1 + math.cos(math.pi * min(1.0, step / steps))) / 2)

    return share


def cool_down(steps: int) -> Callable[[int], float]:
    """Adagrad slows down by itself; only the last third of the way it is slowed down further."""
    return lambda step: min(1.0, max(0.02, 3 * (1 - step / steps)))


def training_step(model: LanguageModel, steps: int) -> ab.TrainStep:
    memory = list(model.memory.parameters())
    others = [value for name, value in model.named_parameters() if not name.startswith("memory.")]
    adagrad = torch.optim.Adagrad(memory, lr=0.2)
    adamw = torch.optim.AdamW(
        [
            {"params": [value for value in others if value.ndim > 1], "weight_decay": 0.1},
            {"params": [value for value in others if value.ndim == 1], "weight_decay": 0.0},
        ],
        lr=3e-3,
        betas=(0.9, 0.98),
        fused=True,
    )
    schedulers = [LambdaLR(adagrad, cool_down(steps)), LambdaLR(adamw, warm_up_and_cool_down(steps))]
    return ab.TrainStep(model, loss, [adagrad, adamw], scheduler=schedulers)


def bits_per_byte(executor: ab.Executor, batches: list[Tensor], rank: int, workers: int) -> float:
    """What the model needs for the bytes of all batches; every worker measures its share of them."""
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches[rank::workers]:
        total += executor.run("validate", batch)["nats"]
    if workers > 1:
        dist.all_reduce(total)
    return total.item() * BITS / sum(batch[:, 1:].numel() for batch in batches)


# What is shown and kept. ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Curve:
    """How training went so far, kept in a file beside the checkpoint together with the settings that led there."""

    settings: dict[str, int]
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"settings": self.settings, "losses": self.losses, "held_out": self.held_out}))
        temporary.replace(path)

    def continue_from(self, path: Path, step: int) -> None:
        """Takes up what the file says of the steps before ``step``."""
        saved = json.loads(path.read_text())
        self.losses = saved["losses"][:step]
        self.held_out = [(at, bits) for at, bits in saved["held_out"] if at <= step]

    def draw(self, path: Path, lzma_bits: float) -> str:
        """Draws the curve if matplotlib is there; says what came of it."""
        try:
            import matplotlib
        except ImportError:
            return "no picture of the loss curve: matplotlib is missing (pip install 'anabranch[examples]')"
        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        bits = [value * BITS for value in self.losses]
        span = max(1, len(bits) // 50)
        smooth = [sum(part) / len(part) for part in (bits[max(0, i - span) : i + 1] for i in range(len(bits)))]
        steps = range(1, len(bits) + 1)
        axes.plot(steps, bits, color="tab:blue", alpha=0.2, linewidth=0.8)
        axes.plot(steps, smooth, color="tab:blue", label="training batches")
        axes.plot(*zip(*self.held_out, strict=True), "o-", color="tab:orange", label="held-out text")
        axes.axhline(lzma_bits, color="tab:gray", linestyle="--", label=f"lzma -9e: {lzma_bits:.2f}")
        axes.set(xlabel="step", ylabel="bits per byte", ylim=(min(1.0, *smooth), min(8.0, max(bits))))
        axes.legend()
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        return f"loss curve: {path}"


class Screen:
    """What rank 0 shows: a bar on a terminal, a line an evaluation everywhere. Other ranks show nothing."""

    def __init__(self, steps: int, done: int, bytes_per_step: int, *, shown: bool) -> None:
        self.console = Console(highlight=False, soft_wrap=True, quiet=not shown)
        self._steps = steps
        self._bytes_per_step = bytes_per_step
        self._rate = 0.0
        self._loss = self._held_out = math.nan
        self._last = time.monotonic()
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self.console,
            expand=True,
            disable=not (shown and self.console.is_terminal),
        )
        self._task = self._bar.add_task("training", total=steps, completed=done, figures="")

    def __enter__(self) -> Screen:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def trained(self, step: int, loss_of_batch: float) -> None:
        now = time.monotonic()
        rate = 1 / max(1e-9, now - self._last)
        self._rate = rate if not self._rate else 0.95 * self._rate + 0.05 * rate
        self._last = now
        self._loss = loss_of_batch
        self._bar.update(self._task, completed=step, figures=self._figures())

    def evaluated(self, step: int, held_out: float) -> None:
        self._held_out = held_out
        self._bar.update(self._task, figures=self._figures())
        left = (self._steps - step) / self._rate if self._rate else 0.0
        self.console.print(f"step {step}/{self._steps}  {self._figures()}  {left:.0f} s left")
        self._last = time.monotonic()

    def _figures(self) -> str:
        speed = f"{self._rate:.1f} steps/s  {self._rate * self._bytes_per_step / 1e3:.0f} kB/s"
        held_out = "" if math.isnan(self._held_out) else f", held out {self._held_out:.3f}"
        return f"{speed}  loss {self._loss:.3f}  bits/byte {self._loss * BITS:.3f}{held_out}"


# The run. -------------------------------------------------------------------------------------------------------------


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    def at_least_one(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"a whole number of at least 1, not {text!r}")
        return int(text)

    def seed(text: str) -> int:
        if not text.isdecimal() or int(text) >= 2**31:
            raise argparse.ArgumentTypeError(f"a whole number from 0 to 2**31 - 1, not {text!r}")
        return int(text)

    def comm_mode(text: str) -> str:
        modes = {"none": "None", "allreduce": "AllReduce"}
        if text.lower() not in modes:
            raise argparse.ArgumentTypeError(f"one of {', '.join(modes.values())}, not {text!r}")
        return modes[text.lower()]

    parser = argparse.ArgumentParser(description="Trains a byte-level language model on real text.", allow_abbrev=False)
    add = parser.add_argument
    add("--steps", type=at_least_one, default=1000, help="optimizer steps (%(default)s)")
    add("--batch", type=at_least_one, default=8, help=f"windows of {CONTEXT} bytes a step, all workers' (%(default)s)")
    add("--seed", type=seed, default=0, help="of the initial model and the batches (%(default)s)")
    add("--out", type=Path, default=Path("runs/language_model"), help="checkpoint and picture go there (%(default)s)")
    add("--text", type=Path, nargs="+", metavar="PATH", help="files or directories (Python's own sources)")
    add("--comm-mode", type=comm_mode, help="None or AllReduce (AllReduce if there are several workers)")
    add("--memory-rows", type=at_least_one, default=2**20, help="rows of the n-gram memory (%(default)s)")
    add("--evaluate-every", type=at_least_one, metavar="STEPS", help="(a tenth of all steps)")
    add("--save-every", type=at_least_one, metavar="STEPS", help="(a quarter of all steps)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, if any (the default)")
    how.add_argument("--fresh", action="store_true", help="delete the checkpoint in --out and start anew")
    arguments = parser.parse_args(given)
    try:
        arguments.text = check_size(text_of(arguments.text) if arguments.text else standard_library())
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return arguments


def refuse_other_run(arguments: argparse.Namespace, out: Path, settings: dict[str, int]) -> None:
    """A checkpoint goes on exactly as it began, or not at all."""
    if not (out / "checkpoint").exists():
        return
    try:
        saved = json.loads((out / "curve.json").read_text())["settings"]
    except (OSError, ValueError, KeyError):
        saved = {}
    changed = [name for name in settings if saved.get(name) != settings[name]]
    if changed:
        sys.exit(
            f"{out} holds another run: {', '.join(f'{name} was {saved.get(name)}' for name in changed)}, now "
            f"{', '.join(str(settings[name]) for name in changed)}. Give the same arguments to go on with it, another "
            "--out to keep it, or --fresh to start anew"
        )


def run(arguments: argparse.Namespace, job: ab.Job) -> dict[str, object]:
    began = time.monotonic()
    steps, text = arguments.steps, arguments.text
    mode = arguments.comm_mode or ("AllReduce" if job.world_size > 1 else "None")
    together = mode != "None" and job.world_size > 1
    rank, workers = (job.rank, job.world_size) if together else (0, 1)
    out = arguments.out if together or job.world_size == 1 else arguments.out / f"worker-{job.rank}"
    curve = Curve(
        {"steps": steps, "batch": arguments.batch, "seed": arguments.seed, "memory rows": arguments.memory_rows}
        | {"text": text.fingerprint}
    )
    if arguments.fresh:
        if rank == 0:
            shutil.rmtree(out / "checkpoint", ignore_errors=True)
    else:
        refuse_other_run(arguments, out, curve.settings)
    out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(arguments.seed)
    model = LanguageModel(arguments.memory_rows)
    train = training_step(model, steps)
    with ab.Executor(
        {"train": train, "validate": ab.EvalStep(model, predicted)},
        comm_mode=None if mode == "None" else mode,
        dataloaders={"train": Windows(text.train, arguments.batch, arguments.seed, rank, workers)},
    ) as executor:
        done = 0
        if not arguments.fresh and executor.resume(out / "checkpoint"):
            done = train.schedulers[0].last_epoch
            curve.continue_from(out / "curve.json", done)
        everything = windows_in_order(text.held_out)
        a_part = everything[:: max(1, len(everything) // 8)]
        evaluate_every = arguments.evaluate_every or max(1, steps // 10)
        save_every = arguments.save_every or max(1, steps // 4)

        with Screen(steps, done, arguments.batch * CONTEXT, shown=job.rank == 0) as screen:
            parameters = sum(value.numel() for value in model.parameters())
            screen.console.print(
                f"{parameters / 1e6:.1f} million parameters, {len(text.train) / 1e6:.2f} MB of text from {text.source}, "
                f"{len(text.held_out) / 1e6:.2f} MB more held out, {workers} worker(s), {mode}"
            )
            if done:
                screen.console.print(f"going on from the checkpoint after step {done}")
            training_began = time.monotonic()
            for step in range(done + 1, steps + 1):
                curve.losses.append(executor.run("train")["loss"].item())
                screen.trained(step, curve.losses[-1])
                if step % evaluate_every == 0 or step == steps:
                    curve.held_out.append((step, bits_per_byte(executor, a_part, rank, workers)))
                    screen.evaluated(step, curve.held_out[-1][1])
                if step % save_every == 0 or step == steps:
                    if rank == 0:
                        curve.save(out / "curve.json")
                    executor.save(out / "checkpoint")
            training_seconds = time.monotonic() - training_began
        screen.console.print(f"measuring all {len(text.held_out):,} held-out bytes")
        bits = bits_per_byte(executor, everything, rank, workers)
    lzma_bits = 8 * len(lzma.compress(text.held_out, preset=9 | lzma.PRESET_EXTREME)) / len(text.held_out)
    if job.rank == 0:
        screen.console.print(
            f"\nbits per byte of held-out text\n  lzma -9e    {lzma_bits:.3f}\n  this model  {bits:.3f}\n"
        )
        screen.console.print(curve.draw(out / "loss.png", lzma_bits))
    return {
        "steps": steps,
        "seed": arguments.seed,
        "comm_mode": mode,
        "workers": job.world_size,
        "loss": curve.losses[-1],
        "bits_per_byte": bits,
        "lzma_bits_per_byte": lzma_bits,
        "held_out_bytes": len(text.held_out),
        "resumed_from": done,
        "seconds": round(time.monotonic() - began, 2),
        "steps_per_second": round((steps - done) / max(1e-9, training_seconds), 2),
        "out": str(out),
    }


def main() -> int:
    arguments, job = parse_arguments(), ab.job()
    try:
        result = run(arguments, job)
    except KeyboardInterrupt:
        if job.rank == 0:
            print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    if job.rank == 0:
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
