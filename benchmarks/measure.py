"""Timing that can be trusted on a noisy machine: the sides alternate in one run, medians and minima are compared.

A ratio counts, an absolute time does not. Every report says what machine it was, and how busy before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

Side = Callable[[], object]


def options_of(doc: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """The command line of a script that ``doc`` describes: ``--out``, and ``--rounds`` if there is a default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", type=Path, default=None, help="a directory for the figures")
    return parser


def waiting_for(device: str) -> Callable[[], object]:
    """A function that returns when all that was launched on ``device`` is done."""
    return torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None


def alternate(
    sides: Mapping[str, Side],
    *,
    rounds: int,
    calls: int,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds a call of every side, one figure a round; in each round every side has its turn, in turning order.

    ``before`` is not timed, ``after`` is: there a device finishes what the calls launched.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for index in range(rounds + 1):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            side = sides[name]
            before()
            started = time.perf_counter()
            for _ in range(calls):
                side()
            after()
            if index:  # the first round warms up
                seconds[name].append((time.perf_counter() - started) / calls)
    return seconds


def alternate_for(sides: Mapping[str, Side], seconds: float, runs: int = 2) -> dict[str, list[float]]:
    """Milliseconds of each side's runs, taking turns for so long.

    Of the runs of a turn the last counts: what the other side's threads still do after its answer, and what it has left
    in the caches, is nobody's cost.
    """
    times: dict[str, list[float]] = {side: [] for side in sides}
    for run in sides.values():
        run()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(next(iter(times.values()))) < 3:
        for side, run in sides.items():
            for _ in range(runs):
                start = time.perf_counter()
                run()
            times[side].append((time.perf_counter() - start) * 1e3)
    return times


def over_batches(
    sides: Mapping[str, Callable[[int], object]], rounds: int, batches: int
) -> dict[str, dict[str, float]]:
    """Median and minimum of each side's milliseconds, in turns, on the batch of a number; four rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(rounds + 4):
        for name, run in sides.items():
            start = time.perf_counter()
            run(index % batches)
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: {"median": statistics.median(some[4:]), "min": min(some[4:])} for name, some in times.items()}


def compare(seconds: Mapping[str, list[float]], reference: str) -> dict[str, dict[str, float]]:
    """Median, minimum, and their ratios to the reference side; the ratio of medians round by round, too."""
    found = {}
    for name, values in seconds.items():
        pairs = [mine / other for mine, other in zip(values, seconds[reference], strict=True)]
        found[name] = {
            "median_ms": statistics.median(values) * 1e3,
            "minimum_ms": min(values) * 1e3,
            "ratio_of_medians": statistics.median(values) / statistics.median(seconds[reference]),
            "ratio_of_minima": min(values) / min(seconds[reference]),
            "median_of_ratios": statistics.median(pairs),
        }
    return found


def machine() -> dict[str, object]:
    """What the figures were taken on."""
    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip(),
        "processor": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        **({"device": torch.cuda.get_device_name()} if torch.cuda.is_initialized() else {}),
    }


def report(name: str, before: Mapping[str, object], results: Mapping[str, object], out: Path | None) -> None:
    """Prints the sides of every case; keeps them in ``out``."""
    rows = [
        {"case": case, "side": side, **figures}
        for case, sides in results.items()
        for side, figures in sides.items()  # type: ignore[attr-defined]
    ]
    print(f"# {name}\n\n{table(rows)}\n\nmachine before: {dict(before)}\nload after: {os.getloadavg()}")
    keep(name, before, rows, out, bars="ratio_of_medians", by=("case", "side"))


def keep(
    name: str,
    before: Mapping[str, object],
    rows: Sequence[Mapping[str, object]],
    out: Path | None,
    *,
    bars: str = "",
    by: Sequence[str] = (),
) -> None:
    """Writes what was measured into the directory ``out``: as JSON, as a Markdown table, and as a picture.

    Args:
        name: of the files.
        before: the machine before it was measured.
        rows: flat, of the same columns or nearly.
        out: nothing is written without one.
        bars: the column to draw, a bar a row; none draws nothing.
        by: the columns that name a bar.
    """
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    facts = {**before, "load_after": [round(value, 2) for value in os.getloadavg()]}
    (out / f"{name}.json").write_text(json.dumps({"benchmark": name, "machine": facts, "rows": list(rows)}, indent=1))
    machine_line = ", ".join(f"{key}: {value}" for key, value in facts.items())
    (out / f"{name}.md").write_text(f"# {name}\n\n{table(rows)}\n\n{machine_line}\n")
    if bars:
        _draw(name, [row for row in rows if isinstance(row.get(bars), (int, float))], out, bars, by)


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as a Markdown table."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(_cell(row.get(column, '')) for column in columns)} |" for row in rows]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(each)}" for key, each in value.items())
    return str(value)


def _draw(name: str, rows: Sequence[Mapping[str, object]], out: Path, bars: str, by: Sequence[str]) -> None:
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [" ".join(str(row.get(column, "")) for column in by) for row in rows]
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.28 * len(rows)), layout="constrained")
    axes.barh(range(len(rows)), [row[bars] for row in rows], color="tab:blue")
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel=bars.replace("_", " "), title=name)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(out / f"{name}.png", dpi=120)
    pyplot.close(figure)
