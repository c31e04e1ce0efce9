"""Training whose tensors are on a device is the plain loop there, in each way of communicating.

Also where PyTorch's default device is another, which a graph refuses: nothing of the library's own belongs there.
"""

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
    for engine, clip in (("tape", "0.5"), ("graph", "0.5"), ("graph", ""))
    if workers == 1 or clip
]


@pytest.mark.parametrize(
    ("device", "default", "workers", "mode", "engine", "clip"),
    [
        pytest.param("cpu", "meta", 1, "Hybrid", "tape", "0.5"),
        *(
            pytest.param("cpu", "meta", workers, mode, "tape", clip, marks=pytest.mark.slow)
            for workers, mode, engine, clip in CASES
            if engine == "tape" and (workers, mode) != (1, "Hybrid")
        ),
        *(
            pytest.param("cuda", default, *case, marks=ON_CUDA)
            for case in CASES
            for default in ("cpu", "cuda")
            if default == "cpu" or "tape" in case
        ),
    ],
)
def test_a_job_on_a_device_is_the_plain_loop(
    device: str, default: str, workers: int, mode: str, engine: str, clip: str, tmp_path: Path
) -> None:
    job = LocalJob(workers, servers=int(mode in ("PS", "Hybrid")))
    for found in job.run(SCRIPT, device, mode, engine, clip, str(tmp_path / "saved"), default).check().results:
        assert found is not None
        assert float(str(found["apart"])) < 1e-9
