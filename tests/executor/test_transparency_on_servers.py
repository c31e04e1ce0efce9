"""W workers whose parameters live on servers end where one plain PyTorch loop on the whole batch ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from anabranch.parameter_server import ParameterServer
from anabranch.testing import LocalJob

SCRIPT = Path(__file__).with_name("transparency_job.py")
SHARDS = 2


@pytest.fixture
def servers() -> Iterator[dict[str, str]]:
    """The environment that names two shards."""
    with ExitStack() as stack:
        endpoints = [stack.enter_context(ParameterServer(shard, SHARDS)).endpoint for shard in range(SHARDS)]
        yield {"ANABRANCH_SERVERS": ",".join(endpoints)}


def case(optimizer: str, mode: str, **changes: object) -> dict[str, object]:
    return {
        "optimizer": optimizer, "mode": mode, "sparse": False, "unequal": True, "reduction": "mean", "clip": None,
        "accumulate": 1, **changes,
    }  # fmt: skip


OPTIMIZERS = ("sgd", "sgd_decay", "momentum", "nesterov", "adagrad", "adam", "adam_decay", "adamw", "row_wise_adagrad")
SPARSE_OPTIMIZERS = ("adagrad", "sparse_adam", "sgd", "row_wise_adagrad")
MODES = ("PS", "Hybrid")
WINDOWS = ((1, "mean"), (3, "mean"), (3, "sum"))
CASES = [
    *(case(optimizer, mode) for optimizer in OPTIMIZERS for mode in MODES),
    *(case("adamw", mode, sparse=sparse) for sparse in SPARSE_OPTIMIZERS for mode in MODES),
    *(
        case("adamw", mode, clip=0.5, accumulate=accumulate, reduction=reduction)
        for mode in MODES
        for accumulate, reduction in WINDOWS
    ),
    *(case("momentum", mode, unequal=False) for mode in MODES),
    *(case("adam", mode, cache={"capacity": 20}) for mode in MODES),
    *(case("adam", mode, sparse_pull=False) for mode in MODES),
    case("adamw", "PS", sparse="adagrad", sparse_pull=False),
    case("adam", "PS", routes={"head.weight": "AllReduce"}),
    case("adam", "AllReduce", routes={"table.weight": "PS", "shared.weight": "PS"}),
]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_with_servers_equal_one_loop_on_the_whole_batch(workers: int, servers: dict[str, str]) -> None:
    result = LocalJob(workers, timeout=110, environment=servers).run(SCRIPT, json.dumps(CASES)).check()
    for rank in range(workers):
        for tried, (parameters, loss, unused_is_none) in zip(CASES, result.results[rank]["found"], strict=True):
            assert parameters <= 1e-12, (rank, tried)
            assert loss <= 1e-12, (rank, tried)
            assert unused_is_none, (rank, tried)
