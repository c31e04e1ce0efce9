"""Plans in a job of two workers and a server: their bytes are those that are counted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from anabranch.testing import LocalJob
from launched import run

SCRIPT = Path(__file__).with_name("plan_job.py")
sys.path.insert(0, str(SCRIPT.parent))

from plan_job import KINDS  # noqa: E402


def results(*what: str, servers: int = 1) -> list[dict[str, Any]]:
    found = LocalJob(2, servers=servers, timeout=300.0).run(SCRIPT, *what).check().results
    assert all(result is not None for result in found)
    return [result for result in found if result is not None]


@pytest.mark.slow
def test_the_bytes_planned_are_the_bytes_counted() -> None:
    everyone = [*results(*KINDS, servers=2), *results("pipe", servers=0)]
    for found in everyone:
        for kind, bytes_ in found.items():
            assert bytes_["planned"] == bytes_["counted"], kind


SHOWN = """
import torch, anabranch as ab
model = torch.nn.Sequential(torch.nn.Embedding(100, 4), torch.nn.Flatten(), torch.nn.Linear(8, 1))
step = ab.TrainStep(model, lambda model, ids: model(ids).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
print("before")
with ab.Executor(step, "Hybrid") as executor:
    executor.run(batch=torch.tensor([[1, 2], [2, 3]]))
print("trained")
"""


def test_the_command_prints_the_plan_and_ends_before_the_first_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SHOWN)
    ended = run("--workers", "2", "--servers", "1", script, command="plan")
    assert ended.returncode == 0, ended.stderr
    assert "trained" not in ended.stdout
    lines = ended.stdout.splitlines()
    assert lines[:2] == ["before", "step 'default', comm_mode='Hybrid': 2 workers, 1 server"]
    (table,) = [line for line in lines if line.startswith("0.weight")]
    assert "servers, by row" in table
    assert "120" in table  # three rows of 16 bytes and their ids, there and back
    assert all(len(line) <= 80 for line in lines)


def test_the_command_reports_a_script_without_a_step_to_plan(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("print('done')")
    ended = run(script, command="plan")
    assert ended.returncode == 1
    assert "nothing.py ended before it ran a training step" in ended.stderr
