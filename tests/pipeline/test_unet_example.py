"""The U-Net example learns, draws, and has one loss curve however many workers share it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.testing import LocalJob
from programs import start

SCRIPT = Path(__file__).parents[2] / "examples" / "unet.py"
UNDRAWN = f"""
import runpy, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
sys.modules["matplotlib"] = None  # drawing takes longer than three steps
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def alone(out: Path, steps: int) -> dict:
    with start(SCRIPT, "--steps", steps, "--out", out) as process:
        text, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    return json.loads(text.splitlines()[-1])


@pytest.mark.slow
def test_one_process_and_two_workers_have_the_same_loss_curve(tmp_path: Path):
    found = alone(tmp_path / "one", steps=3)
    results = LocalJob(2).run_source(UNDRAWN, "--steps", "3", "--out", str(tmp_path / "two")).check().results
    assert results[0] == {**found, "out": str(tmp_path / "two")}
    assert (tmp_path / "one/losses.json").read_text() == (tmp_path / "two/losses.json").read_text()
    for name in ("digits.png", "loss.png", "schedule.svg"):
        assert (tmp_path / "one" / name).stat().st_size > 0


@pytest.mark.slow
def test_it_learns_to_take_off_the_noise(tmp_path: Path):
    found = alone(tmp_path, steps=120)
    assert found["denoised_error"] < 0.25 * found["noisy_error"]
