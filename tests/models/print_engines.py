"""Print the guide's table: each model and optimizer of another library, and the engine that it trains on.

Run it with ``PYTHONPATH=src:tests .venv-models/bin/python tests/models/print_engines.py [NAME ...]``; a row that is not
as in the plain loop says so.
"""

from __future__ import annotations

import os
import sys

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from real_models import MODELS, OPTIMIZERS

from plain_loop import Build, check


def row_of(build: Build) -> list[str]:
    """What becomes of ``engine="graph"``, and why it is refused or not one whole."""
    try:
        outcome = check(build, "graph")
    except AssertionError:
        return ["differs", ""]
    engine = "refused" if outcome.refused_at is not None else (outcome.engines or ["an error"])[-1]
    return [engine, (outcome.refusal or outcome.by_itself).partition("; use ")[0]]


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    print('| model or optimizer | `engine="graph"` | why not |\n|---|---|---|')
    for name, build in (MODELS | OPTIMIZERS).items():
        if not names or name in names:
            print(f"| {name.replace('_', ' ')} | {' | '.join(row_of(build))} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
