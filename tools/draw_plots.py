"""Draws the pictures of docs/performance.md and of the schedules; called by `make plots`.

The figures are those of the tables in docs/benchmarks.md, which the benchmarks print. A line above a table says which
plot shows it, and where it was measured:

    % plot NAME: commit HASH, MACHINE

Words are drawn in the colour of the text around them, and nothing depends on a clock or a library's version: the
tests compare the files byte by byte.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from anabranch.pipeline import draw, make_schedule

DOCS = Path(__file__).parents[1] / "docs"
WIDTH = 460
COLOURS = ("#3b82c4", "#c96a1b", "#2c9a6a", "#8a63c9")
_MARK = re.compile(r"^% plot (?P<name>[\w-]+): (?P<where>.+)\n(?P<table>(?:\|.*\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Plot:
    """Bars of some columns of a table, a group of them for each row.

    Args:
        title: what a bar's length means.
        columns: of the table, by their heads, and what the legend calls them.
        unit: behind each number.
    """

    title: str
    columns: dict[str, str]
    unit: str = ""


PLOTS = {
    "step-graph": Plot(
        "a training step, the plain PyTorch loop = 1; shorter is better",
        {"graph": "graph", "by `Executor`": "Executor", "`torch.compile(module)`": "torch.compile"},
    ),
    "first-steps": Plot(
        "seconds until a new process has made its first step",
        {"loop": "plain loop", '`"tape"`': "Executor", "`torch.compile(module)`": "torch.compile"},
        " s",
    ),
    "tables": Plot(
        "a step of 26 tables, milliseconds; shorter is better",
        {"Anabranch": "Anabranch", "FBGEMM 1.8.0": "FBGEMM", "torch's `EmbeddingBag`": "torch"},
        " ms",
    ),
    "cached-tables": Plot("steps a second over 200 Mbit/s; longer is better", {"steps/s": "two workers, two shards"}),
    "pipelines": Plot(
        "two stages, 4 or 8 microbatches: times faster than one thread",
        {"nothing shared": "two that share nothing", "best `Pipe`": "Pipe", "best peer": "best peer"},
        "x",
    ),
    "experts-peers": Plot("times faster than hivemind 1.1.12; longer is better", {"times faster": "Anabranch"}, "x"),
}


@dataclass
class Canvas:
    """Lines of an SVG from top to bottom."""

    title: str
    lines: list[str] = field(default_factory=list)
    height: float = 0.0

    def text(
        self, x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", faint: bool = False
    ) -> None:
        opacity = ' fill-opacity="0.8"' if faint else ""
        self.lines.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="currentColor"{opacity}>'
            f"{escape(words)}</text>"
        )

    def bar(self, x: float, y: float, width: float, height: float, colour: str, opacity: float = 0.75) -> None:
        self.lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{round(width, 1):g}" height="{height:g}" rx="2" fill="{colour}" '
            f'fill-opacity="{opacity:g}"/>'
        )

    def done(self) -> str:
        body = "\n".join(f"  {line}" for line in self.lines)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:g}" role="img" '
            f'font-family="sans-serif">\n  <title>{escape(self.title)}</title>\n{body}\n</svg>\n'
        )


def number(cell: str) -> float | None:
    """Return the figure of a cell, the median where it has several; ``None`` for a cell of another kind.

    >>> number("4.0 (2.6)"), number("1.76, 1.73, 1.66 (ZBV)"), number("1,886"), number("10.7, 2.1x"), number("")
    (4.0, 1.73, 1886.0, 10.7, None)
    """
    plain = re.sub(r"\(.*?\)|ms|%", "", cell)
    parts = [part.strip().replace(",", "") for part in plain.split(", ")]
    found = [float(part) for part in parts if re.fullmatch(r"\d+(\.\d+)?", part)]
    return statistics.median(found) if found else None


def rows_of(table: str) -> list[dict[str, str]]:
    """Return a Markdown table's rows, by the heads of its columns."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    head, _, *rows = cells
    return [dict(zip(head, row, strict=True)) for row in rows]


def folded(words: str, length: int) -> list[str]:
    """Break words into lines of at most so many characters."""
    lines = [""]
    for word in words.split():
        if len(lines[-1]) + 1 + len(word) > length:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def bars(plot: Plot, rows: Sequence[dict[str, str]], where: str) -> str:
    """Draw a plot of a table."""
    canvas, first = Canvas(plot.title), next(iter(rows[0]))
    values = [[number(row[head]) for head in plot.columns] for row in rows]
    scale = (WIDTH - 85) / max(value for group in values for value in group if value is not None)
    canvas.text(8, 18, plot.title, size=13)
    x = 8.0
    for name, colour in zip(plot.columns.values(), COLOURS, strict=False):
        canvas.bar(x, 30, 12, 12, colour)
        canvas.text(x + 17, 40, name)
        x += 34 + 7 * len(name)
    y = 56.0
    for row, group in zip(rows, values, strict=True):
        if all(value is None for value in group):
            continue
        canvas.text(8, y + 10, re.sub("`", "", row[first]))
        y += 16
        for value, colour in zip(group, COLOURS, strict=False):
            if value is not None:
                canvas.bar(8, y, value * scale, 12, colour)
                canvas.text(13 + value * scale, y + 10, f"{value:.3g}{plot.unit}", size=11)
                y += 15
        y += 9
    for line in folded(f"Measured with {where}.", 72):
        y += 14
        canvas.text(8, y, line, size=11, faint=True)
    canvas.height = y + 10
    return canvas.done()


def schedules() -> str:
    """Draw the five schedules on three ranks with six microbatches, on one time axis."""
    canvas, y = Canvas("Five pipeline schedules on three ranks with six microbatches"), 0.0
    for name in ("GPipe", "1F1B", "Interleaved1F1B", "ZB1P", "ZBV"):
        stages = 6 if name in ("Interleaved1F1B", "ZBV") else 3
        unit = 17.0 * 3 / stages
        grid = [line.split()[2:] for line in draw(make_schedule(name, stages=stages, microbatches=6)).splitlines()[1:]]
        ranks = [[cell for cell in line if re.fullmatch(r"\d?[FBW]\d|\.+", cell)] for line in grid]
        canvas.text(8, y + 16, name, size=13)
        y += 22
        for cells in ranks:
            for place, cell in enumerate(cells):
                _cell(canvas, 40 + place * unit, y, unit, cell, again=place > 0 and cells[place - 1] == cell)
            y += 19
        for rank in range(len(ranks)):
            canvas.text(8, y - 19 * (len(ranks) - rank) + 12, f"r{rank}", size=11, faint=True)
        y += 8
    for x, kind, words in ((8, "F", "forward"), (100, "B", "backward"), (200, "W", "weights’ gradients")):
        canvas.bar(x, y + 6, 12, 12, _KINDS[kind], 0.55)
        canvas.text(x + 17, y + 16, words)
    canvas.height = y + 28
    return canvas.done()


_KINDS = {"F": COLOURS[0], "B": COLOURS[1], "W": COLOURS[2]}


def _cell(canvas: Canvas, x: float, y: float, unit: float, cell: str, again: bool) -> None:
    if cell[0] == ".":
        return
    kind, microbatch = cell[-2], cell[-1]
    canvas.bar(x, y, unit - (0.6 if unit > 10 else 0.4), 16, _KINDS[kind], 0.55)
    if unit > 10 and not again:
        canvas.text(x + unit / 2, y + 12, microbatch, size=11, anchor="middle")


def drawn() -> dict[str, str]:
    """Return the text of each picture, by the name of its file."""
    found = {match["name"]: match for match in _MARK.finditer((DOCS / "benchmarks.md").read_text())}
    pictures = {
        f"plot-{name}.svg": bars(plot, rows_of(found[name]["table"]), found[name]["where"])
        for name, plot in PLOTS.items()
    }
    return pictures | {"schedules.svg": schedules()}


def main() -> None:
    """Write them all."""
    for name, text in drawn().items():
        (DOCS / "pictures" / name).write_text(text)
        print(f"docs/pictures/{name}")


if __name__ == "__main__":
    main()
