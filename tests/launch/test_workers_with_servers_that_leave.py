"""A worker that is killed leaves a job with servers: its step is applied on all of them, or done again."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from elastic import Deaths, chosen, train
from jobs import Ends

import anabranch as ab
from anabranch.launch import RestartBudget
from anabranch.launch.supervision import members, supervisor


def test_a_step_whose_worker_has_told_one_server_of_it_is_applied_on_both(tmp_path: Path) -> None:
    train(tmp_path, {0: [("half told", 3)]}, mode="Hybrid")


PLACES = ("forward", "pull", "backward", "half pushed", "pushed", "before the vote", "voted", "half told", "told")


def cases() -> Iterator[tuple[str, Deaths, dict[str, Any]]]:
    """What may happen, who dies where, and the options of the job."""
    for place, victim, mode in chosen([*PLACES, "between"], range(3), ["PS", "Hybrid"]):
        options = {"mode": mode, "clip": None if victim == 1 else 0.3}
        yield "any worker may die anywhere", {victim: [(place, 3 + victim)]}, options
    for victim, clip in ((0, 0.3), (1, None)):
        refused: Deaths = {victim: [("refused", 4)]}
        yield "a worker whose push was refused may die", refused, {"mode": "PS", "clip": clip}
    for mode in ("PS", "Hybrid"):
        for place in PLACES:
            options = {"mode": mode, "cache": True, "accumulate": 2, "evaluates": True}
            yield "caches and windows begin again", {1: [(place, 7)]}, options
        last: list[Deaths] = [{0: [("between", 10)]}, {0: [("told", 9)]}, {2: [("voted", 9)]}]
        for deaths in last:
            yield "the last step is applied too", deaths, {"mode": mode, "durability": "log", "last": True}
        yield "a frozen worker leaves", {1: [("pushed", 4)]}, {"mode": mode, "freezes": True}
        for place, (victim, cache) in product(["half pushed", "half told"], [(0, False), (1, True)]):
            options = {"mode": mode, "least": None, "restarts": 1, "left": 3, "cache": cache, "evaluates": cache}
            yield "a replacement takes the place of a killed worker", {victim: [(place, 4)]}, options


@pytest.mark.slow
@pytest.mark.parametrize(("what", "deaths", "options"), [*cases()], ids=str)
def test_the_others_go_on(tmp_path: Path, what: str, deaths: Deaths, options: dict[str, Any]) -> None:
    train(tmp_path, deaths, **options)


FREEZES = """
    import json, os, signal, sys, time
    from pathlib import Path
    import anabranch as ab
    from anabranch.liveness.membership import own_place
    own_place().write_progress(1, 0)  # as a job whose training goes on does

    def server():
        roles = json.loads((Path(sys.argv[1]) / "job.json").read_text())["roles"]
        return next(one["pid"] for one in roles if one["role"] == "parameters")

    if os.environ["RANK"] == "0":
        with ab.ParameterClient() as client:
            client.init("p", (3,), init=2.0)
            first = server()
            os.kill(first, signal.SIGSTOP)
            assert client.pull("p").tolist() == [2.0] * 3
            while server() == first:  # noted once it has been started
                time.sleep(0.01)
"""


def test_a_frozen_server_is_killed_and_restarted_with_its_log(ended: Ends, tmp_path: Path) -> None:
    ended(FREEZES, tmp_path, workers=2, servers=1, durability="log")


SAVES = """
    import json, os, signal, sys, torch, anabranch as ab
    from pathlib import Path
    from anabranch.parameter_server.client.saved_tables import SavedTables

    read, folder = SavedTables._part, Path(sys.argv[1])

    def read_as_the_server_dies(self, shard, number):
        roles = json.loads((folder / "job.json").read_text())["roles"]
        os.kill(next(one["pid"] for one in roles if one["role"] == "parameters"), signal.SIGKILL)
        SavedTables._part = read
        return read(self, shard, number)

    model = torch.nn.Linear(4, 1)
    step = ab.TrainStep(model, lambda model, x: model(x).square().mean(), torch.optim.Adam(model.parameters(), lr=0.1))
    with ab.Executor(step, "PS") as executor:
        executor.run(batch=torch.ones(2, 4))
        before, SavedTables._part = executor.state_dict(), read_as_the_server_dies
        executor.save(folder / "saved")
        executor.run(batch=torch.ones(2, 4))
        executor.load(folder / "saved")
        assert executor.step == 1
        after = executor.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
"""


def test_a_save_begins_again_if_a_server_is_restarted_meanwhile(ended: Ends, tmp_path: Path) -> None:
    told = ended(SAVES, tmp_path, workers=1, servers=1, durability="log").told
    assert [line.partition("; ")[2] for line in told] == ["restarted (1 of 3)"]


@pytest.mark.slow
@pytest.mark.parametrize("strikes", ["SIGSTOP", "SIGKILL"])
@pytest.mark.parametrize(("mode", "place"), [("PS", "half pushed"), ("Hybrid", "voted"), ("Hybrid", "in the sum")])
def test_a_worker_and_a_server_may_go_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, place: str, strikes: str
) -> None:
    for module in (supervisor, members):  # a launcher that is late
        monkeypatch.setattr(module, "LOOK_SECONDS", 2.2)
    deaths: Deaths = {1: [(place, 4)]}
    _, told = train(tmp_path, deaths, mode=mode, restarts=1, left=3, waits=7, durability="log", strikes=strikes)
    assert any("parameters 0" in line and "restarted (1 of 3)" in line for line in told)


REFUSES = """
    import os, signal, torch, anabranch as ab
    model = torch.nn.Linear(4, 1)
    step = ab.TrainStep(model, lambda model, x: model(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.001))
    loader = ab.loaders.GlobalBatches([torch.full((4,), float(index)) for index in range(24)], 6)
    with ab.Executor(step, "PS", dataloaders={"default": loader}, timeout=60.0) as executor:
        def frozen(*_):
            raise ab.PeerLost("the server is frozen", peer="unix:/there")

        executor._remote.client.begin_again = frozen
        while executor.step < 6:
            executor.run()
            if executor.step == 3 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_that_is_lost_as_the_workers_meet_ends_the_job_and_is_named(ended: Ends) -> None:
    failure = ended(REFUSES, code=1, workers=2, servers=1, min_workers=1).outcome.first_failure
    assert failure is not None
    assert "PeerLost: the server is frozen" in failure.last_words().splitlines()[-1]


# Pushes that are applied as they come: the numbers are others, and nobody waits for the one that is gone.

APART = """
import json, os, signal, sys, time
from pathlib import Path

import torch
from torch import nn
import anabranch as ab

folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
process = int(os.environ["ANABRANCH_MEMBER"])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(44, 4), nn.Linear(4, 1)

    def forward(self, ids):
        return self.layer(self.table(ids))[:, 0]


def loss(model, ids):
    if process == plan["victim"] and executor.step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return (model(ids) - 1.0).square().mean()


model = Model()
step = ab.TrainStep(model, loss, torch.optim.Adam(model.parameters(), lr=0.05))
cache = ab.Cache(capacity=20, push_bound=plan["push_bound"]) if plan["push_bound"] else None
loader = ab.loaders.GlobalBatches(range(44), 12, seed=3)
with ab.Executor(step, plan["mode"], dataloaders={"default": loader}, consistency=plan["consistency"], cache=cache,
                 heartbeat=0.2, timeout=600.0) as executor:
    first, longest = executor.run()["loss"].item(), 0.0
    while executor.step < 40:
        if executor.step == 6 and plan["apart"]:
            until = time.monotonic() + 60
            while not executor._workers.lost():
                assert time.monotonic() < until
            executor._remote._look_at = 0.0  # a heartbeat has passed
        began = time.monotonic()
        last = executor.run()["loss"].item()
        longest = max(longest, time.monotonic() - began)
    executor.save(folder / "saved")
    statistics = executor.statistics()
(folder / str(process)).write_text(json.dumps([first, last, longest, statistics.dropped_rows, statistics.memberships]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("mode", "consistency", "push_bound"),
    [
        ("PS", "ssp:2", 0),
        ("PS", "asp", 0),
        ("Hybrid", "ssp:2", 0),
        ("Hybrid", "asp", 3),
        ("PS", "ssp:2", 3),
        ("PS", "bsp", 3),
        ("Hybrid", "bsp", 3),
    ],
)
def test_nobody_waits_for_a_killed_worker_where_pushes_are_applied_as_they_come(
    ended: Ends, tmp_path: Path, mode: str, consistency: str, push_bound: int, victim: int
) -> None:
    apart = mode == "PS" and consistency != "bsp"
    plan = {"mode": mode, "consistency": consistency, "push_bound": push_bound, "victim": victim, "apart": apart}
    options = {"servers": 2, "min_workers": 1, "worker_restarts": RestartBudget(3 if apart else 0)}
    job = ended(APART, tmp_path, json.dumps(plan), **options)
    assert not any("takes its place" in line for line in job.told), "a newcomer could not join workers that run apart"
    assert [one.code for one in job.outcome.exits] == [-signal.SIGKILL if rank == victim else 0 for rank in range(3)]
    for rank in {0, 1, 2} - {victim}:
        first, last, longest, dropped, memberships = json.loads((tmp_path / str(rank)).read_text())
        assert last < first
        assert longest < 10.0, "3 s on a machine with nothing else to do"
        assert (dropped > 0, memberships) == (apart, 2)
    assert ab.checkpoint.read(tmp_path / "saved").state["workers"] == 2
