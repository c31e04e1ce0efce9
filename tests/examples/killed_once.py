"""Run a script one of whose workers is killed, once, and note the loss of each step.

Its arguments are a folder for the notes, the worker, after how many steps it is killed, the script, and its arguments.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import anabranch as ab

MEMBER = os.environ.get("ANABRANCH_MEMBER", "0")
DONE = {"runs": 0, "steps of optimizers": 0}
run = ab.Executor.run


def die_behind_the_last(kind: str) -> None:
    begins = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if MEMBER == VICTIM and begins and DONE[kind] == STEPS:
        os.kill(os.getpid(), signal.SIGKILL)


def run_and_note(executor: ab.Executor, *arguments: Any, **options: Any) -> dict[str, Tensor]:
    die_behind_the_last("runs")
    before = executor.step
    result = run(executor, *arguments, **options)
    if executor.step != before:
        DONE["runs"] += 1
        with (FOLDER / MEMBER).open("a") as file:
            file.write(json.dumps([executor.step, result["loss"].item(), ab.job().joined]) + "\n")
    return result


def before_a_step_of_an_optimizer(*_: object) -> None:
    die_behind_the_last("steps of optimizers")
    DONE["steps of optimizers"] += 1


if __name__ == "__main__":
    FOLDER, VICTIM, STEPS, SCRIPT = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    ab.Executor.run = run_and_note  # type: ignore[method-assign, assignment]
    if "Executor" not in Path(SCRIPT).read_text():
        register_optimizer_step_pre_hook(before_a_step_of_an_optimizer)
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # pictures take longer than the steps
    torch.manual_seed(0)
    sys.argv = sys.argv[4:]
    sys.path[0] = str(Path(SCRIPT).parent)
    runpy.run_path(SCRIPT, run_name="__main__")
