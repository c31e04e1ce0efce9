"""Prints the held-out bits per byte of finished runs of examples/language_model.py, one column a run.

python tools/compare_runs.py runs/demo runs/undisturbed runs/alone
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def table(folders: list[Path]) -> list[str]:
    """Return the lines: the evaluations while training, then that of all held-out bytes."""
    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    curves = [dict(json.loads((folder / "curve.json").read_text())["held_out"]) for folder in folders]
    steps = sorted(set.intersection(*map(set, curves)))
    rows = [("held-out bits per byte", list(map(kind, results)))]
    rows += [(f"after step {step}", [f"{curve[step]:.3f}" for curve in curves]) for step in steps]
    rows += [("all held-out bytes", [f"{result['bits_per_byte']:.3f}" for result in results])]
    rows += [("lzma -9e", [f"{result['lzma_bits_per_byte']:.3f}" for result in results])]
    lines = [f"{name:<24}" + "".join(f"{cell:>18}" for cell in cells) for name, cells in rows]
    for result in results:
        lines += [f"{who} was killed, and missed for {seconds} s" for who, seconds in result["missed_seconds"].items()]
    return lines


def kind(result: dict[str, int]) -> str:
    """Return what a run was, in two words."""
    processes = result["workers"] + result["servers"] + result["experts"]
    if processes == 1:
        return "one process"
    return f"{processes}, {len(killed)} killed" if (killed := result["missed_seconds"]) else f"{processes} processes"


if __name__ == "__main__":
    print("\n".join(table([Path(name) for name in sys.argv[1:]])))
