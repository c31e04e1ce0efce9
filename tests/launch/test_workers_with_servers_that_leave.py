"""A worker that is killed leaves a job with servers: its step is applied on all of them, or done again."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from jobs import launch, lines
from torch import Tensor, nn

import anabranch as ab
from anabranch.launch import RestartBudget

Script = Callable[[str], Path]
Deaths = dict[int, list[tuple[str, int]]]  # of processes: where, and in which run, counted from 0

SAMPLES, BATCH, STEPS, ROWS = 44, 12, 9, 30

TRAINING = """
import json, os, random, signal, sys, threading
from pathlib import Path

import torch
from torch import nn
import anabranch as ab
from anabranch.deadline import Deadline

folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
process, joined = int(os.environ["ANABRANCH_MEMBER"]), ab.job().joined
moments = [] if joined else plan["deaths"].get(str(process), [])  # [place, run]
delays = random.Random(plan["seed"] + process)


def die():
    os.kill(os.getpid(), signal.SIGSTOP if plan["freezes"] else signal.SIGKILL)


def dies_at(place):
    if [place, now] in moments:
        die()


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return plan["samples"]

    def __getitem__(self, index):
        ids = torch.tensor([index * 7 % plan["rows"], index * index % plan["rows"]])
        return {"id": index, "ids": ids, "y": index % 7 / 7.0}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(plan["rows"], 4) for _ in range(2))
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.double()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids):
        return self.layers(torch.cat([table(ids[:, k]) for k, table in enumerate(self.tables)], 1))[:, 0]


def write(name, **facts):
    with (folder / f"{name}-{process}").open("a") as file:
        file.write(json.dumps(facts) + "\\n")


def loss(model, batch):
    global now
    now = executor._runners["train"].runs
    write("doings", number=executor.statistics().memberships, run=now, ids=batch["id"].tolist())
    if ["at random", now] in moments:
        threading.Timer(delays.uniform(0.0, 0.02), die).start()
    dies_at("forward")
    model.calls.add_(1)
    output = model(batch["ids"])
    output.register_hook(lambda gradient: dies_at("backward"))
    if ["refused", now] in moments:
        output.register_hook(lambda gradient: gradient * float("nan"))
    return (output - batch["y"]).square().mean()


def score(model, batch):
    dies_at("in an evaluation")
    return {"loss": (model(batch["ids"]) - batch["y"]).square().mean()}


def around(owner, name, before, after):
    call = getattr(owner, name)

    def instead(*arguments, **options):
        before(*arguments)
        result = call(*arguments, **options)
        after(*arguments)
        return result

    setattr(owner, name, instead)


def nothing(*_):
    pass


def half(requests, *_):
    if requests and requests[0].verb == "push" and ["half pushed", now] in moments:
        client._client.call(requests[0], Deadline.after(30.0))
        die()


def told(scale):
    for place, shards in (("half told", [1]), ("told", [0, 1])):
        if [place, now] in moments:
            client.calls.post([client._word(at) for at in shards])
            client.steps()  # each shard takes a word before the request that follows it
            die()


now, model = -1, Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
step = ab.TrainStep(model, loss, optimizer, scheduler=scheduler, accumulate=plan["accumulate"],
                    clip_grad_norm=plan["clip"])
data = Data()
loaders = {"train": ab.loaders.GlobalBatches(data, plan["batch"], seed=3),
           "validate": ab.loaders.GlobalBatches(data, plan["batch"], shuffle=False)}
cache = ab.Cache(capacity=12) if plan["cache"] else None
with ab.Executor({"train": step, "validate": ab.EvalStep(model, score)}, plan["mode"], dataloaders=loaders,
                 cache=cache, heartbeat=0.5, timeout=60.0) as made:
    executor, part = made, made._remote
    client = part.client
    around(client, "pull_many", lambda *_: dies_at("pull"), nothing)
    around(client.calls, "outcomes", half, nothing)
    around(client, "push_many", nothing, lambda *_: dies_at("pushed"))
    around(part, "refuse", nothing, lambda *_: dies_at("refused"))
    around(part, "vote", lambda *_: dies_at("before the vote"), lambda *_: dies_at("voted"))
    around(part, "decide", nothing, told)
    while executor.step < plan["steps"]:
        result = executor.run("train")
        run = executor._runners["train"].runs - 1
        write("losses", run=run, loss=result["loss"].item(), number=executor.statistics().memberships)
        dies_at("between")
        if plan["evaluates"]:
            write("scores", run=run, loss=executor.evaluate("validate")["loss"].item())
    statistics, done = executor.statistics(), executor.step
write("end", parameters=[p.tolist() for p in model.parameters()], step=done, joined=joined,
      calls=model.calls.item())
"""


class Undisturbed(nn.Module):
    """The plain loop on whole batches."""

    def __init__(self, *, accumulate: int, clip: float | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(ROWS, 4) for _ in range(2))
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.double()
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        loader = ab.loaders.GlobalBatches(range(SAMPLES), BATCH, seed=3)
        self.batches = [
            [int(one) for one in loader.order(epoch)[first : first + BATCH]]
            for epoch in range(20)
            for first in range(0, SAMPLES, BATCH)
        ][: STEPS * accumulate]
        self.losses: list[float] = []
        self.scores: list[float] = []
        for step in range(STEPS):
            runs = self.batches[step * accumulate : (step + 1) * accumulate]
            optimizer.zero_grad()
            for ids in runs:
                errors = self.errors(ids)
                self.losses.append(errors.mean().item())
                (errors.sum() / sum(map(len, runs))).backward()
                with torch.no_grad():
                    self.scores.append(self.errors(list(range(SAMPLES))).mean().item())
            if clip is not None:
                nn.utils.clip_grad_norm_(self.parameters(), clip)
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                self.scores[-1] = self.errors(list(range(SAMPLES))).mean().item()

    def errors(self, numbers: list[int]) -> Tensor:
        ids = torch.tensor([[one * 7 % ROWS, one * one % ROWS] for one in numbers])
        y = torch.tensor([one % 7 / 7.0 for one in numbers], dtype=torch.float64)
        output = self.layers(torch.cat([table(ids[:, k]) for k, table in enumerate(self.tables)], 1))[:, 0]
        return (output - y).square()  # type: ignore[no-any-return]


def train(
    script: Script,
    folder: Path,
    mode: str,
    deaths: Deaths,
    *,
    workers: int = 3,
    accumulate: int = 1,
    clip: float | None = 0.3,
    cache: bool = False,
    evaluates: bool = False,
    freezes: bool = False,
    durability: str = "none",
    least: int | None = 1,
    restarts: int = 0,
    seed: int = 0,
) -> None:
    """Train on two shards, and check that the survivors have what the undisturbed run has."""
    plan = {"deaths": deaths, "mode": mode, "accumulate": accumulate, "clip": clip, "cache": cache, "seed": seed}
    plan |= {"steps": STEPS, "batch": BATCH, "samples": SAMPLES, "rows": ROWS}
    plan |= {"evaluates": evaluates, "freezes": freezes}
    records, logs, told = folder / "records", folder / "logs", list[str]()
    records.mkdir()
    logs.mkdir()
    outcome = launch(
        script(TRAINING), [str(records), json.dumps(plan)], workers=workers, servers=2, min_workers=least, log_dir=logs,
        durability=durability, worker_restarts=RestartBudget(restarts), tell=told.append, seconds=200.0,
    )  # fmt: skip
    assert outcome.exit_code == 0, "\n".join([*told, *(log.read_text() for log in sorted(logs.glob("*.log")))])
    assert [one.code for one in outcome.services] == [0, 0]
    expected = Undisturbed(accumulate=accumulate, clip=clip)
    ends, joined = lines(records, "end"), [one for one in lines(records, "end") if one["joined"]]
    killed = workers - (len(ends) - len(joined))
    assert killed == len(deaths) or seed
    assert len(joined) == (restarts if least is None else 0)
    for end in ends:
        assert (end["step"], end["calls"]) == (STEPS, STEPS * accumulate)  # buffers went back with the step
        for here, there in zip(end["parameters"], expected.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(here, dtype=torch.float64), there.detach(), rtol=0.0, atol=1e-12)
    # In the last doing of each run every sample counts once.
    doings = lines(records, "doings")
    for run in range(STEPS * accumulate):
        last = max(one["number"] for one in doings if one["run"] == run)
        ids = [sample for one in doings if (one["run"], one["number"]) == (run, last) for sample in one["ids"]]
        assert sorted(ids) == sorted(expected.batches[run]), run
    for one in lines(records, "losses"):
        assert one["loss"] == pytest.approx(expected.losses[one["run"]], abs=1e-12)
    for one in lines(records, "scores"):
        assert one["loss"] == pytest.approx(expected.scores[one["run"]], abs=1e-12)


def test_a_step_whose_worker_has_told_one_server_of_it_is_applied_on_both(script: Script, tmp_path: Path) -> None:
    train(script, tmp_path, "Hybrid", {0: [("half told", 3)]})


PLACES = ("forward", "pull", "backward", "half pushed", "pushed", "before the vote", "voted", "half told", "told")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["PS", "Hybrid"])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("place", [*PLACES, "between"])
def test_any_worker_may_die_anywhere(script: Script, tmp_path: Path, place: str, victim: int, mode: str) -> None:
    train(script, tmp_path, mode, {victim: [(place, 3 + victim)]}, clip=None if victim == 1 else 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["PS", "Hybrid"])
@pytest.mark.parametrize("place", PLACES)
def test_caches_and_windows_begin_again(script: Script, tmp_path: Path, place: str, mode: str) -> None:
    train(script, tmp_path, mode, {1: [(place, 7)]}, cache=True, accumulate=2, evaluates=True)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "clip"), [(0, 0.3), (1, None)])
def test_a_worker_whose_push_was_refused_may_die(
    script: Script, tmp_path: Path, victim: int, clip: float | None
) -> None:
    train(script, tmp_path, "PS", {victim: [("refused", 4)]}, clip=clip)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["PS", "Hybrid"])
@pytest.mark.parametrize("seed", range(1, 11))
def test_one_and_then_another_may_die_at_any_moment(script: Script, tmp_path: Path, seed: int, mode: str) -> None:
    deaths: Deaths = {seed % 4: [("at random", 2)], (seed + 1) % 4: [("at random", 2 + seed % 3)]}
    train(script, tmp_path, mode, deaths, workers=4, seed=seed, cache=seed % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["PS", "Hybrid"])
@pytest.mark.parametrize("deaths", [{0: [("between", 8)]}, {0: [("told", 8)]}, {2: [("voted", 8)]}], ids=str)
def test_the_last_step_is_applied_too(script: Script, tmp_path: Path, deaths: Deaths, mode: str) -> None:
    train(script, tmp_path, mode, deaths, durability="log")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["PS", "Hybrid"])
def test_a_frozen_worker_leaves(script: Script, tmp_path: Path, mode: str) -> None:
    train(script, tmp_path, mode, {1: [("pushed", 4)]}, freezes=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["PS", "Hybrid"])
@pytest.mark.parametrize("place", ["half pushed", "half told"])
@pytest.mark.parametrize(("victim", "cache"), [(0, False), (1, True)])
def test_a_replacement_takes_the_place_of_a_killed_worker(
    script: Script, tmp_path: Path, place: str, victim: int, cache: bool, mode: str
) -> None:
    train(script, tmp_path, mode, {victim: [(place, 4)]}, least=None, restarts=1, cache=cache, evaluates=cache)


FREEZES = """
    import json, os, signal, sys
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
            assert server() != first
"""


def test_a_frozen_server_is_killed_and_restarted_with_its_log(script: Script, tmp_path: Path) -> None:
    outcome = launch(
        script(FREEZES), [str(tmp_path)], workers=2, servers=1, durability="log", log_dir=tmp_path, seconds=120.0
    )
    assert outcome.exit_code == 0, [log.read_text() for log in tmp_path.glob("*.log")]


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
    first = executor.run()["loss"].item()
    while executor.step < 40:
        if executor.step == 6 and plan["apart"]:
            until = time.monotonic() + 60
            while not executor._workers.lost():
                assert time.monotonic() < until
            executor._remote._look_at = 0.0  # a heartbeat has passed
        last = executor.run()["loss"].item()
    executor.save(folder / "saved")
    statistics = executor.statistics()
(folder / str(process)).write_text(json.dumps([first, last, statistics.dropped_rows, statistics.memberships]))
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
    script: Script, tmp_path: Path, mode: str, consistency: str, push_bound: int, victim: int
) -> None:
    apart = mode == "PS" and consistency != "bsp"
    plan = {"mode": mode, "consistency": consistency, "push_bound": push_bound, "victim": victim, "apart": apart}
    told = list[str]()
    outcome = launch(
        script(APART), [str(tmp_path), json.dumps(plan)], workers=3, servers=2, min_workers=1, log_dir=tmp_path,
        worker_restarts=RestartBudget(3 if apart else 0), tell=told.append, seconds=120.0,
    )  # fmt: skip
    assert outcome.exit_code == 0, "\n".join([*told, *(log.read_text() for log in sorted(tmp_path.glob("*.log")))])
    assert not any("takes its place" in line for line in told), "a newcomer could not join workers that run apart"
    assert [one.code for one in outcome.exits] == [-signal.SIGKILL if rank == victim else 0 for rank in range(3)]
    for rank in {0, 1, 2} - {victim}:
        first, last, dropped, memberships = json.loads((tmp_path / str(rank)).read_text())
        assert last < first
        assert (dropped > 0, memberships) == (apart, 2)
    assert ab.checkpoint.read(tmp_path / "saved").state["workers"] == 2
