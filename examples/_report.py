"""How a run of an example went: the curve it keeps and draws, and what rank 0 shows meanwhile."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from _run import write_whole
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

BITS = 1 / math.log(2)  # in a nat
_WIDE = 100  # columns of a terminal that has room for everything beside the bar


@dataclass(slots=True)
class Curve:
    """How training went so far, kept in a file beside the checkpoint."""

    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps({"losses": self.losses, "held_out": self.held_out}))

    def continue_from(self, path: Path, step: int) -> None:
        """Take up what the file says of the steps before ``step``."""
        if not path.exists():  # a worker that has joined before the first save
            return
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
        widths = [1 + min(step // 4, len(bits) // 50) for step in range(len(bits))]
        smooth = [sum(bits[step + 1 - width : step + 1]) / width for step, width in enumerate(widths)]
        steps = range(1, len(bits) + 1)
        axes.plot(steps, bits, color="tab:blue", alpha=0.2, linewidth=0.8)
        axes.plot(steps, smooth, color="tab:blue", label="training batches")
        axes.plot(*zip(*self.held_out, strict=True), "o-", color="tab:orange", label="part of the held-out text")
        axes.axhline(lzma_bits, color="tab:gray", linestyle="--", label=f"lzma -9e: {lzma_bits:.2f}")
        axes.set(xlabel="step", ylabel="bits per byte", yscale="log")
        ticks = [1, 1.5, 2, 3, 4, 6, 8]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axes.set_yticks([], minor=True)
        axes.legend()
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        return f"loss curve: {path}"


class Screen:
    """What rank 0 shows: a bar on a terminal, a line an evaluation everywhere. Other ranks show nothing."""

    def __init__(
        self, steps: int, done: int, bytes_per_step: int, *, shown: bool, also: Callable[[], str] | None = None
    ) -> None:
        self.console = Console(highlight=False, markup=False, soft_wrap=True, quiet=not shown)
        self._steps = steps
        self._also = also if shown else None  # asked each time something is shown
        self._bytes_per_step = bytes_per_step
        self._recent: deque[float] = deque(maxlen=20)  # the seconds of steps
        self._loss = self._held_out = math.nan
        self._bar = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(table_column=Column(min_width=2 * len(str(steps)) + 1)),
            TextColumn("{task.fields[figures]}", markup=False),
            TextColumn(""),  # the terminal's last column stays free: some begin a new line behind it
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

    def say(self, *lines: str) -> None:
        for line in lines:
            self.console.print(line)

    def trained(self, step: int, loss_of_batch: float, seconds: float) -> None:
        self._recent.append(seconds)
        self._loss = loss_of_batch
        self._bar.update(self._task, completed=step, figures=self._figures(step))

    def evaluated(self, step: int, held_out: float) -> None:
        self._held_out = held_out
        self._bar.update(self._task, figures=self._figures(step))
        self.say(f"step {step}/{self._steps}  {self._figures(step)}")

    def _figures(self, step: int) -> str:
        each = sum(self._recent) / max(1, len(self._recent))  # of late
        rate = 1 / max(1e-9, each)
        figures = [f"loss {self._loss:.3f}"]
        if self.console.width >= _WIDE or not self.console.is_terminal:
            figures = [f"{rate:.1f} steps/s", f"{rate * self._bytes_per_step / 1e3:.0f} kB/s", *figures]
        if not math.isnan(self._held_out):
            figures.append(f"{self._held_out:.3f} bits/byte")
        if self._also:
            figures.append(self._also())
        return "  ".join([*figures, f"{(self._steps - step) * each:.0f} s left"])
