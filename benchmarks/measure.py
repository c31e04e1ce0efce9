"""Timing that can be trusted on a noisy machine: the sides alternate in one run, medians and minima are compared.

A ratio counts, an absolute time does not. Every report says what machine it was, and how busy before and after.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

Side = Callable[[], object]


def alternate(
    sides: Mapping[str, Side], *, rounds: int, calls: int, before: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Seconds a call of every side, one figure a round; in each round every side has its turn, in turning order."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for index in range(rounds + 1):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            side = sides[name]
            before()
            started = time.perf_counter()
            for _ in range(calls):
                side()
            if index:  # the first round warms up
                seconds[name].append((time.perf_counter() - started) / calls)
    return seconds


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
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def table(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Results by case and side as a Markdown table."""
    lines = [
        "| case | side | median ms | minimum ms | ratio of medians | median of ratios |",
        "|---|---|---|---|---|---|",
    ]
    for case, sides in results.items():
        lines += [
            f"| {case} | {side} | {figures['median_ms']:.3f} | {figures['minimum_ms']:.3f} "
            f"| {figures['ratio_of_medians']:.3f} | {figures['median_of_ratios']:.3f} |"
            for side, figures in sides.items()
        ]
    return "\n".join(lines)


def report(name: str, before: Mapping[str, object], results: Mapping[str, object], out: Path | None) -> None:
    """Prints the table; writes it and the figures as JSON into ``out``."""
    text = table(results)  # type: ignore[arg-type]
    print(f"# {name}\n\n{text}\n\nmachine before: {dict(before)}\nload after: {os.getloadavg()}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        record = {"benchmark": name, "machine": before, "load_after": os.getloadavg(), "results": results}
        (out / f"{name}.json").write_text(json.dumps(record, indent=1))
        (out / f"{name}.md").write_text(f"# {name}\n\n{text}\n")
