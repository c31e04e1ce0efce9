"""W workers on shards of a batch end where one plain PyTorch loop on the whole batch ends, servers or none."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small_parts import in_job, plain_step
from torch import Tensor, nn

import anabranch as ab
from anabranch.testing import LocalJob

SCRIPT = Path(__file__).with_name("transparency_job.py")
sys.path.insert(0, str(SCRIPT.parent))

from transparency_job import distance, plain_loop, with_workers  # noqa: E402

MODES = ("AllReduce", "PS", "Hybrid")


def case(optimizer: str, mode: str = "AllReduce", **changes: object) -> dict[str, object]:
    plain = {"sparse": False, "unequal": True, "reduction": "mean", "clip": None, "accumulate": 1, "engine": "tape"}
    return {"optimizer": optimizer, "mode": mode, **plain, **changes}


REDUCED = [
    *map(case, ("sgd", "sgd_decay", "momentum", "nesterov", "adagrad", "adam", "adam_decay", "adamw", "adamw_fused")),
    case("adam", unequal=False),
    *(
        case("adamw", sparse=True, reduction=reduction, clip=clip, accumulate=accumulate)
        for reduction, clip, accumulate in product(("mean", "sum"), (None, 0.5), (1, 3))
    ),
    case("momentum", clip=0.5, accumulate=2),
    case("sgd", reduction="sum"),
]
QUICK = [
    # What servers do for an optimizer depends on its states and on whether it moves rows that nobody has looked up.
    case("adagrad", "PS"),
    case("adam_decay", "Hybrid"),
    case("row_wise_adagrad", "PS"),
    case("adamw", "Hybrid", sparse="sparse_adam"),
    case("adamw", "PS", sparse="adagrad", clip=0.5),
    case("adamw", "PS", clip=0.5, accumulate=3),
    case("adamw", "Hybrid", clip=0.5, accumulate=3, reduction="sum"),
    case("momentum", "PS", unequal=False),
    case("adam", "Hybrid", cache={"capacity": 20}),
    case("adam", "PS", sparse_pull=False),
    case("adamw", "Hybrid", engine="graph", rare=False, clip=0.5),
    case("adam", "PS", engine="graph", rare=False, cache={"capacity": 20}, accumulate=2),
    case("adamw", engine="graph", rare=False, sparse=True, clip=0.5, accumulate=2),
    case("adam", "PS", routes={"head.weight": "AllReduce"}),
    case("adam", "AllReduce", routes={"table.weight": "PS", "shared.weight": "PS"}),
]
RULES = ("sgd", "sgd_decay", "momentum", "nesterov", "adam", "adamw", "rmsprop", "adamax", "amsgrad", "ftrl")
OTHERS = [
    *(case(optimizer, mode) for optimizer, mode in product(RULES, ("PS", "Hybrid"))),
    *(case("adamw", mode, sparse=sparse) for sparse, mode in product(("sgd", "row_wise_adagrad"), ("PS", "Hybrid"))),
    *(case("adam", mode, cache={"capacity": 20}) for mode in ("PS", "Hybrid")),
    case("adamw", "PS", sparse="adagrad", sparse_pull=False),
    case("adamw", "PS", engine="graph", rare=False),
]
LOSSES = ("contrastive", "normalised", "balanced")
BETWEEN_WORKERS = [
    *(case("adam", loss=loss) for loss in LOSSES),
    case("sgd", "Hybrid", loss="normalised", accumulate=2, clip=0.5),
    case("adam", "PS", loss="balanced"),
    case("sgd", loss="normalised", precision="float16", rare=False),
]
BETWEEN_MORE = [
    *(case("adam", "Hybrid", loss=loss) for loss in LOSSES),
    *(case("sgd", mode, loss="contrastive", accumulate=2, clip=0.5) for mode in ("AllReduce", "PS")),
    *(case("adam", loss=loss, engine="graph", unequal=False, rare=False) for loss in LOSSES),
    case("adam", "Hybrid", loss="normalised", engine="graph", accumulate=2, unequal=False, rare=False),
]
"""The row weight was applied behind backward, so that gradients from another worker had the wrong one."""


@pytest.mark.parametrize(
    ("workers", "servers", "cases"),
    [
        (2, 0, REDUCED),
        (2, 2, [*QUICK, *BETWEEN_WORKERS]),
        pytest.param(4, 0, REDUCED, marks=pytest.mark.slow),
        # The model looks at its batch to decide what to do, which no graph can represent.
        pytest.param(2, 0, [{**one, "engine": "graph", "rare": False} for one in REDUCED], marks=pytest.mark.slow),
        pytest.param(2, 2, [*OTHERS, *BETWEEN_MORE], marks=pytest.mark.slow),
        pytest.param(3, 2, [*QUICK, *BETWEEN_WORKERS], marks=pytest.mark.slow),
    ],
    ids=["2", "2 and servers", "4", "2 as graphs", "2 and servers, others", "3 and servers"],
)
def test_workers_on_shards_equal_one_loop_on_the_whole_batch(
    workers: int, servers: int, cases: list[dict[str, object]]
) -> None:
    result = LocalJob(workers, servers=servers, timeout=600).run(SCRIPT, json.dumps(cases)).check()
    for rank in range(workers):
        for tried, (parameters, loss, unused_is_none) in zip(cases, result.results[rank]["found"], strict=True):
            assert max(parameters, loss) <= 1e-12, (rank, tried)
            assert unused_is_none, (rank, tried)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("cases", [OTHERS[::5], pytest.param([*QUICK, *OTHERS], marks=pytest.mark.slow)])
def test_a_worker_alone_has_its_servers_in_memory(cases: list[dict[str, object]]) -> None:
    for tried in cases:
        expected, expected_losses = plain_loop(tried, rows=11)
        found, losses = with_workers(tried, 11, 0, 1)
        for name, value in expected.named_parameters():
            assert distance(found[name], value) <= 1e-12, (tried, name)
        assert losses == pytest.approx(expected_losses, rel=1e-12), tried


def pipe_of_workers(stages: int) -> float:
    """Train a pipe whose loss sums over the rows of a grid; return its parameters' distance from the plain loop's."""
    torch.distributed.init_process_group("gloo")
    grid = ab.job().grid(data=2, pipeline=stages)
    row, sizes = torch.distributed.get_rank() // stages, (7, 4)
    part = slice(sum(sizes[:row]), sum(sizes[: row + 1]))

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def balanced(output: Tensor, target: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        return F.mse_loss(output, target) + 3 * (total(output.softmax(1).sum(0)) / 11).square().sum()

    def of_all(output: Tensor, target: Tensor) -> Tensor:
        return balanced(output, target, lambda tensor: ab.all_reduce(tensor, group=grid.data_group))

    def of_one(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return balanced(model(batch[0]), batch[1], lambda tensor: tensor)

    plain = layers()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    pipe = ab.Pipe(layers(), [2, 1], chunks=1, process_group=grid.pipeline_group if stages > 1 else None)
    step = ab.TrainStep(pipe, of_all, torch.optim.SGD(pipe.parameters(), lr=0.5))
    with ab.Executor(step, "AllReduce", process_group=grid.data_group, timeout=60) as executor:
        for number in range(4):
            torch.manual_seed(number)
            x, y = torch.randn(11, 3).double(), torch.randn(11, 2).double()
            plain_step(plain, of_one, optimizer, (x, y))
            executor.run(batch=(x[part], y[part]))
    expected = dict(plain.named_parameters())
    return max((value - expected[name]).abs().max().item() for name, value in pipe.named_parameters())


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_loss_of_a_pipe_may_sum_over_the_workers_too(stages: int) -> None:
    assert max(in_job(pipe_of_workers, 2 * stages, stages)) <= 1e-13


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
    cases = [case("adam_decay", mode, clip=0.5, engine=engine, device=device, rare=engine == "tape")]
    job = LocalJob(workers, servers=int(mode != "AllReduce"))
    for result in job.run(SCRIPT, json.dumps(cases), default).check().results:
        assert max(result["found"][0][:2]) < 1e-9
