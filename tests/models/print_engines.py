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

from plain_loop import Build, Outcome, check, run


def engine_of(build: Build, engine: str, wanted: Outcome) -> str:
    """The engine of the last step, or why it is none."""
    try:
        outcome = check(build, engine, wanted)
    except AssertionError:
        return "differs"
    if outcome.refused_at is not None:
        return "refused"
    return outcome.engines[-1] if outcome.engines else "an error"


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    print("| model or optimizer | `auto` | `graph` |\n|---|---|---|")
    for name, build in (MODELS | OPTIMIZERS).items():
        if not names or name in names:
            wanted = run(build, None)
            row = [engine_of(build, engine, wanted) for engine in ("auto", "graph")]
            print(f"| {name.replace('_', ' ')} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
