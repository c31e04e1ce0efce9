"""Training whose tensors are on a device is the plain loop there, in each way of communicating."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anabranch.testing import LocalJob

SCRIPT = Path(__file__).with_name("device_job.py")
ON_CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CASES = [
    (workers, mode, engine, clip)
    for workers, modes in ((1, ("", "PS", "Hybrid", "AllReduce")), (2, ("AllReduce", "PS", "Hybrid")))
    for mode in modes
    for engine, clip in (("tape", ""), ("graph", "0.5"))
]


@pytest.mark.parametrize(
    ("device", "workers", "mode", "engine", "clip"),
    [
        pytest.param("cpu", 2, "Hybrid", "graph", "0.5", marks=pytest.mark.slow),
        *(pytest.param("cuda", *case, marks=ON_CUDA) for case in CASES),
    ],
)
def test_a_job_on_a_device_is_the_plain_loop(
    device: str, workers: int, mode: str, engine: str, clip: str, tmp_path: Path
) -> None:
    job = LocalJob(workers, servers=int(mode in ("PS", "Hybrid")), timeout=200.0)
    for found in job.run(SCRIPT, device, mode, engine, clip, str(tmp_path / "saved")).check().results:
        assert found is not None
        assert float(str(found["apart"])) < 1e-9
