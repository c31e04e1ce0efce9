"""The uses of ``model_uses.py`` in a job of two workers, with another program beside it on the job's servers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from model_uses import MODES

from anabranch.testing import LocalJob
from programs import start

SCRIPT = Path(__file__).with_name("model_uses_job.py")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "None"])
def test_each_use_by_two_workers_and_beside_them_is_the_plain_programs_or_refused(mode: str, tmp_path: Path) -> None:
    """Every mode has one job, which names the cases that went wrong."""
    with start(SCRIPT, tmp_path, "beside", stdout=sys.stdout.fileno(), stderr=sys.stderr.fileno()):
        result = LocalJob(2, servers=2, timeout=600.0).run(SCRIPT, str(tmp_path), mode)
    wrong = [found and found["wrong"] for found in result.results]
    assert wrong == [{}, {}], f"{result.exit_codes}\n{result.logs[0][-5000:]}\n{result.logs[1][-5000:]}"
