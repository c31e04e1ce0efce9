"""all_reduce, send and recv on two workers; the checks and their references are in ``differentiable_job.py``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import anabranch as ab

JOB = Path(__file__).with_name("differentiable_job.py")
CHECKS = re.findall(r"^@check\ndef (\w+)", JOB.read_text(), flags=re.MULTILINE)


@pytest.fixture(scope="module")
def results() -> tuple[dict, ...]:
    return ab.testing.LocalJob(workers=2).run(JOB).results


@pytest.mark.parametrize("name", CHECKS)
def test_two_workers(results, name: str) -> None:
    for rank, result in enumerate(results):
        assert result is not None, f"rank {rank} said nothing"
        assert result.get(name, "not reached") == "", f"rank {rank}: {result.get(name)}"


def test_a_job_of_one_worker_sums_alone_and_sends_nothing() -> None:
    x = torch.ones(2, requires_grad=True)
    y = ab.all_reduce(x, "mean")
    y.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="init_process_group"):
        ab.send(x, 1)
