"""The U-Net example learns, draws, and has one loss curve however many workers share it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.testing import LocalJob

SCRIPT = Path(__file__).parents[2] / "examples" / "unet.py"


def alone(out: Path, steps: int) -> dict:
    arguments = [sys.executable, str(SCRIPT), "--steps", str(steps), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    text = subprocess.run(arguments, env=environment, timeout=200, check=True, capture_output=True, text=True).stdout
    return json.loads(text.splitlines()[-1])


def test_one_process_and_two_workers_have_the_same_loss_curve(tmp_path: Path):
    found = alone(tmp_path / "one", steps=3)
    results = LocalJob(2, timeout=100).run(SCRIPT, "--steps", "3", "--out", str(tmp_path / "two")).check().results
    assert results[0] == found
    assert (tmp_path / "one/losses.json").read_text() == (tmp_path / "two/losses.json").read_text()
    for name in ("digits.png", "loss.png", "schedule.svg"):
        assert (tmp_path / "one" / name).stat().st_size > 0


@pytest.mark.slow
def test_it_learns_to_take_off_the_noise(tmp_path: Path):
    found = alone(tmp_path, steps=120)
    assert found["denoised_error"] < 0.25 * found["noisy_error"]
