"""W workers whose parameters live on servers end where one plain PyTorch loop on the whole batch ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from anabranch.testing import LocalJob

SCRIPT = Path(__file__).with_name("transparency_job.py")
sys.path.insert(0, str(SCRIPT.parent))

from transparency_job import distance, plain_loop, with_workers  # noqa: E402


def case(optimizer: str, mode: str, **changes: object) -> dict[str, object]:
    return {
        "optimizer": optimizer, "mode": mode, "sparse": False, "unequal": True, "reduction": "mean", "clip": None,
        "accumulate": 1, "engine": "tape", **changes,
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
    *(case("adamw", mode, engine="graph", rare=False, clip=clip) for mode in MODES for clip in (None, 0.5)),
    case("adam", "PS", routes={"head.weight": "AllReduce"}),
    case("adam", "AllReduce", routes={"table.weight": "PS", "shared.weight": "PS"}),
]
LATER = [case(optimizer, mode) for optimizer in ("rmsprop", "adamax", "amsgrad", "ftrl") for mode in MODES]
"""Rules that run as PyTorch's operations."""


FROM_BOTH = 7  # the last ones of CASES do not come in pairs of one for each mode
FIRST = [CASES[2 * pair + pair % 2] for pair in range((len(CASES) - FROM_BOTH) // 2)]
"""Each with servers for all or for tables alone in turn."""
ONE_OF_A_KIND = ("adagrad", "adam_decay", "row_wise_adagrad")
"""What servers do for an optimizer depends on its states and on whether it moves rows that nobody has looked up."""
OF_SPARSE, OF_WINDOWS = len(OPTIMIZERS), len(OPTIMIZERS) + len(SPARSE_OPTIMIZERS)
QUICK = [
    *(tried for tried in FIRST[:OF_SPARSE] if tried["optimizer"] in ONE_OF_A_KIND),
    *FIRST[OF_SPARSE : OF_SPARSE + 2],
    *FIRST[OF_WINDOWS + 2 :],  # windows of three, and what comes after them: adam and momentum too
    CASES[-3],
    *CASES[-2:],
]
OTHERS = [tried for tried in CASES if tried not in QUICK]


@pytest.mark.parametrize(
    ("workers", "cases"),
    [
        (2, QUICK),
        pytest.param(2, OTHERS, marks=pytest.mark.slow),
        pytest.param(2, LATER, marks=pytest.mark.slow),
        pytest.param(4, CASES, marks=pytest.mark.slow),
    ],
    ids=["2", "2, the others", "2, without kernels", "4"],
)
def test_workers_with_servers_equal_one_loop_on_the_whole_batch(workers: int, cases: list[dict[str, object]]) -> None:
    result = LocalJob(workers, servers=2, timeout=600).run(SCRIPT, json.dumps(cases)).check()
    for rank in range(workers):
        for tried, (parameters, loss, unused_is_none) in zip(cases, result.results[rank]["found"], strict=True):
            assert parameters <= 1e-12, (rank, tried)
            assert loss <= 1e-12, (rank, tried)
            assert unused_is_none, (rank, tried)


# Graphs on servers are quick tests of a file of their own.
ALONE = [tried for tried in OTHERS if tried["engine"] == "tape"]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    "cases",
    [[*ALONE[::4], *LATER[:2]], pytest.param([*CASES, *LATER], marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_a_worker_alone_has_its_servers_in_memory(cases: list[dict[str, object]]) -> None:
    for tried in cases:
        expected, expected_losses = plain_loop(tried, rows=11)
        found, losses = with_workers(tried, 11, 0, 1)
        for name, value in expected.named_parameters():
            assert distance(found[name], value) <= 1e-12, (tried, name)
        assert losses == pytest.approx(expected_losses, rel=1e-12), tried
