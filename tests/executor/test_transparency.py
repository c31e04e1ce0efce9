"""W workers on shards of a batch end where one plain PyTorch loop on the whole batch ends."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from anabranch.testing import LocalJob

SCRIPT = Path(__file__).with_name("transparency_job.py")
OPTIMIZERS = ("sgd", "sgd_decay", "momentum", "nesterov", "adagrad", "adam", "adam_decay", "adamw", "adamw_fused")


MODES = ("AllReduce", "PS", "Hybrid")


def case(optimizer: str, **changes: object) -> dict[str, object]:
    plain = {"sparse": False, "unequal": True, "reduction": "mean", "clip": None, "accumulate": 1}
    return {"optimizer": optimizer, **plain, **changes}


CASES = [
    *(case(optimizer) for optimizer in OPTIMIZERS),
    *(case(optimizer, unequal=False) for optimizer in ("sgd", "adam")),
    *(
        case("adamw", sparse=True, **dict(zip(("reduction", "clip", "accumulate"), chosen, strict=True)))
        for chosen in product(("mean", "sum"), (None, 0.5), (1, 3))
    ),
    *(case("momentum", clip=0.5, accumulate=accumulate) for accumulate in (1, 2)),
    case("sgd", reduction="sum"),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("workers", "engine"),
    [
        (1, "tape"),
        (2, "tape"),
        pytest.param(4, "tape", marks=pytest.mark.slow),
        pytest.param(2, "graph", marks=pytest.mark.slow),
    ],
)
def test_workers_on_shards_equal_one_loop_on_the_whole_batch(workers: int, engine: str) -> None:
    cases = [{**case, "engine": engine} for case in CASES]
    if engine == "graph":  # the model looks at its batch to decide what to do, which no graph can represent
        cases = [{**case, "rare": False} for case in cases]
    result = LocalJob(workers, timeout=600).run(SCRIPT, json.dumps(cases)).check()
    for rank in range(workers):
        for tried, (parameters, loss, unused_is_none) in zip(cases, result.results[rank]["found"], strict=True):
            assert parameters <= 1e-12, (rank, tried)
            assert loss <= 1e-12, (rank, tried)
            assert unused_is_none, (rank, tried)


ON_CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize(
    ("workers", "mode", "engine", "device", "default"),
    [
        pytest.param(1, "Hybrid", "tape", "cpu", "meta"),
        *(pytest.param(2, mode, "tape", "cpu", "meta", marks=pytest.mark.slow) for mode in MODES),
        *(
            pytest.param(workers, mode, engine, "cuda", default, marks=ON_CUDA)
            for workers, mode, (engine, default) in product(
                (1, 2), MODES, (("tape", "cuda"), ("tape", "cpu"), ("graph", "cpu"))
            )
        ),
    ],
)
def test_a_job_on_a_device_is_the_plain_loop(workers: int, mode: str, engine: str, device: str, default: str) -> None:
    """Also where PyTorch's default device is another: nothing of the library's own belongs there."""
    cases = [case("adam_decay", clip=0.5, mode=mode, engine=engine, device=device, rare=engine == "tape")]
    job = LocalJob(workers, servers=int(mode != "AllReduce"))
    for result in job.run(SCRIPT, json.dumps(cases), default).check().results:
        assert max(result["found"][0][:2]) < 1e-9
