"""Workers of a Ray job that are lost, replaced, and joined by others, with the result of the undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import lines
from test_ray_cluster import (
    _kill_node_of_rank,
    _nothing_is_left,
    _started,
    _wait_for_end_of_rank,
    _wait_for_workers,
    pytestmark,
)

import anabranch as ab
from toys import plain_step

__all__ = ["pytestmark"]
STEPS, SAMPLES, BATCH = 12, 20, 8
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}

TRAIN = """
import json, os, pathlib, sys, time
import torch
import anabranch as ab

folder, size, mode = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
process, joined = os.environ["ANABRANCH_MEMBER"], ab.job().joined
steps, samples, batch_size = json.loads(sys.argv[4])


def write(name, **facts):
    with (folder / f"{name}-{process}").open("a") as file:
        file.write(json.dumps(facts) + "\\n")


def loss(model, batch):
    number = executor.statistics().memberships
    write("doings", step=executor.step, number=number, ids=batch["id"].tolist())
    if executor.step == 4 and not (folder / "goes-on").exists():  # in the middle of a step
        where = folder / f"waits-{process}.part"
        where.write_text(json.dumps([os.getpid(), os.getppid()]))
        where.rename(folder / f"waits-{process}.json")
        while not (folder / "goes-on").exists():
            time.sleep(0.01)
    return (model(batch["x"])[:, 0] - batch["y"]).square().mean()


data = [
    {"id": index, "x": torch.sin(torch.arange(6, dtype=torch.float64) * (index + 1)), "y": index % 7 / 7.0}
    for index in range(samples)
]
torch.manual_seed(0)
model = torch.nn.Linear(6, 1).double()
step = ab.TrainStep(model, loss, torch.optim.Adam(model.parameters(), lr=0.02))
loader = ab.loaders.GlobalBatches(data, batch_size, seed=3)
with ab.Executor({"train": step}, mode, dataloaders={"train": loader}, timeout=120.0) as executor:
    began = executor.step
    while executor.step < steps:
        executor.run("train")
        while executor.step == 8 and ab.job().world_size < size and not executor._redo._place.newcomers_wait():
            time.sleep(0.01)
    parameters = [one.tolist() for one in model.parameters()]
    write("ends", pid=os.getpid(), parameters=parameters, joined=joined, began=began)
"""


@pytest.fixture(scope="module", autouse=True)
def _nodes(cluster: Any) -> None:
    """Two, and one that may be lost."""
    while len(cluster.worker_nodes) < 3:
        cluster.add_node(**NODE)


def _undisturbed() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for ids in _batches():
        x = torch.stack([torch.sin(torch.arange(6, dtype=torch.float64) * (one + 1)) for one in ids])
        y = torch.tensor([one % 7 / 7.0 for one in ids], dtype=torch.float64)
        plain_step(model, lambda model, b: (model(b[0])[:, 0] - b[1]).square().mean(), optimizer, (x, y))
    return [one.detach() for one in model.parameters()]


def _batches() -> list[list[int]]:
    loader = ab.loaders.GlobalBatches(range(SAMPLES), BATCH, seed=3)
    orders = [loader.order(epoch).tolist() for epoch in range(STEPS)]
    return [order[first : first + BATCH] for order in orders for first in range(0, SAMPLES, BATCH)][:STEPS]


RUN = """
import json, sys
from anabranch.launch.ray import run

options = json.loads(sys.argv[1])
workers = options.pop("workers")
sys.exit(run("train.py", sys.argv[2:], workers=tuple(workers) if isinstance(workers, list) else workers, **options))
"""


def _train(
    cluster: Any, folder: Path, disturb: Callable[[], object], mode: str = "AllReduce", size: int = 2, **options: Any
) -> tuple[list[dict[str, Any]], str]:
    """Train, with a disturbance while all are in a step; return each worker's end, and what was told."""
    (folder / "train.py").write_text(TRAIN)
    options = {"address": cluster.address, "workers": 2} | options
    words = [str(folder), f"{size}", mode, json.dumps([STEPS, SAMPLES, BATCH])]
    command = [sys.executable, "-c", RUN, json.dumps(options), *words]
    with _started(command, folder, 0) as (_, said):
        _wait_for_workers(folder)
        disturb()
        (folder / "goes-on").touch()
    ends = lines(folder, "ends")
    for end in ends:
        for here, there in zip(end["parameters"], _undisturbed(), strict=True):
            torch.testing.assert_close(torch.tensor(here, dtype=torch.float64), there, rtol=0.0, atol=1e-12)
    doings: dict[int, dict[int, list[int]]] = {}
    for one in lines(folder, "doings"):
        doings.setdefault(one["step"], {}).setdefault(one["number"], []).extend(one["ids"])
    for step, ids in enumerate(_batches()):
        assert sorted(doings[step][max(doings[step])]) == sorted(ids), "in its last doing every sample counts once"
    return ends, said[1]


def _pids(folder: Path, rank: int) -> list[int]:
    pids: list[int] = json.loads((folder / f"waits-{rank}.json").read_text())
    return pids  # the worker's, and its actor's


def _survived(folder: Path, ends: list[dict[str, Any]]) -> None:
    assert [(end["joined"], end["began"]) for end in ends] == [(False, 0), (True, 4)]
    assert ends[0]["pid"] == _pids(folder, 0)[0]


@pytest.mark.parametrize("mode", ["AllReduce", "PS"])
def test_a_killed_worker_is_replaced_by_its_actor(cluster: Any, tmp_path: Path, mode: str) -> None:
    kill = lambda: os.kill(_pids(tmp_path, 1)[0], signal.SIGKILL)  # noqa: E731
    ends, err = _train(cluster, tmp_path, kill, mode, servers=int(mode == "PS"))
    _survived(tmp_path, ends)
    assert "was killed by SIGKILL" in err
    assert "the job waits, with 1 worker; another takes its place (1 of 3)" in err


@pytest.mark.parametrize("lost", ["actor", "node"])
def test_a_worker_whose_actor_or_node_is_lost_is_replaced_in_another(cluster: Any, tmp_path: Path, lost: str) -> None:
    def lose() -> None:
        if lost == "actor":
            os.kill(_pids(tmp_path, 1)[1], signal.SIGKILL)
        else:
            _kill_node_of_rank(cluster, tmp_path, 1)
        _wait_for_end_of_rank(tmp_path, 1)

    ends, err = _train(cluster, tmp_path, lose)
    _survived(tmp_path, ends)
    assert "rank 1 was lost with its Ray node; the job waits, with 1 worker; another takes its place (1 of 3)" in err


def test_a_frozen_worker_is_killed_and_the_other_goes_on_alone(cluster: Any, tmp_path: Path) -> None:
    freeze = lambda: os.kill(_pids(tmp_path, 1)[0], signal.SIGSTOP)  # noqa: E731
    ends, err = _train(cluster, tmp_path, freeze, size=1, min_workers=1, worker_restarts="0/1s")
    assert [end["pid"] for end in ends] == _pids(tmp_path, 0)[:1]
    assert "is frozen; killing it" in err
    assert "the job goes on with 1 worker" in err


@pytest.mark.parametrize("mode", ["AllReduce", "PS"])
def test_another_joins_when_a_node_comes(cluster: Any, tmp_path: Path, mode: str) -> None:
    nodes: list[Any] = []
    count = len(cluster.worker_nodes)

    def grow() -> None:
        nodes.append(cluster.add_node(**NODE))

    try:
        options = {"workers": (count, count + 1), "resources": {"worker": {"CPU": 1.5}}, "servers": int(mode == "PS")}
        ends, _ = _train(cluster, tmp_path, grow, mode, size=count + 1, **options)
    finally:
        for node in nodes:
            cluster.remove_node(node)
    assert [end["joined"] for end in ends] == [False] * count + [True]
    assert ends[count]["began"] >= 4
    assert [end["pid"] for end in ends][:2] == [_pids(tmp_path, rank)[0] for rank in range(2)]


def test_a_job_for_which_no_more_room_comes_ends_without(cluster: Any, tmp_path: Path) -> None:
    count = len(cluster.worker_nodes)
    workers = (count, count + 1)
    ends, _ = _train(cluster, tmp_path, lambda: None, workers=workers, resources={"worker": {"CPU": 2}})
    assert [end["joined"] for end in ends] == [False] * count
    _nothing_is_left(cluster)
