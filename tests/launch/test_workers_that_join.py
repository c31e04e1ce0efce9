"""A worker that is killed is replaced: the newcomer takes the state from the others, and nothing shows."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic import Deaths, train
from jobs import HURRIED, PATIENT, Ends, lines
from torch import nn

import anabranch as ab
from anabranch.launch import RestartBudget
from anabranch.launch.supervision import members as members_module
from anabranch.launch.supervision import supervisor
from anabranch.launch.supervision.members import Members
from anabranch.launch.supervision.worker import RoleProcess
from toys import plain_step


def test_the_others_wait_for_the_replacement_of_rank_0(tmp_path: Path) -> None:
    outcome, told = train(tmp_path, {0: [("in the sum", 6)]}, least=None, restarts=1, left=3)
    assert [one.code for one in outcome.exits] == [0, 0, 0]
    assert any("the job waits, with 2 workers" in line and "another takes its place (1 of 1)" in line for line in told)
    records = lines(tmp_path / "records", "memberships")
    assert sorted((one["left"], one["joined"], one["size"]) for one in records) == [
        ([], [2], 3), ([], [2], 3), ([], [2], 3), ([0], [], 2), ([0], [], 2),
    ]  # fmt: skip
    ends = lines(tmp_path / "records", "end")
    assert [end["joined"] for end in sorted(ends, key=lambda end: end["rank"])] == [False, False, True]
    files = {(one["process"], one["size"]): one["files"] for one in records}
    for process in (1, 2):
        assert files[process, 3] - files[process, 2] < 6, "a connection in each of two groups, whose former are closed"


@pytest.mark.slow
@pytest.mark.parametrize("gloo", [False, True])
def test_the_others_go_on_until_the_newcomer_is_there(tmp_path: Path, gloo: bool) -> None:
    train(tmp_path, {1: [("backward", 4)]}, least=2, restarts=1, left=3, waits=7, gloo=gloo)
    joined = [one for one in lines(tmp_path / "records", "memberships") if one["joined"]]
    assert [(one["left"], one["joined"], one["size"]) for one in joined] == [([], [2], 3)] * 3
    runs = [one["run"] for one in lines(tmp_path / "records", "losses") if one["number"] == 3]
    assert 4 < min(runs) <= 8, "the header of run 7, or of an earlier one, says that it waits"


@pytest.mark.slow
def test_a_group_whose_sum_a_death_has_interrupted_is_freed_once_that_has_failed(tmp_path: Path) -> None:
    deaths: Deaths = {1: [("in the sum", 3)], 2: [("in the sum", 6)]}
    joiners: Deaths = {1: [("in the sum", 9)], 2: [("in the sum", 12)]}
    train(tmp_path, deaths, least=None, restarts=4, left=3, joiners=joiners, gloo=True, steps=16)
    records = [one for one in lines(tmp_path / "records", "memberships") if one["process"] == 0]
    files = [one["files"] for one in records]
    assert max(files[2:]) <= max(files[:2]) + 2, files


def cases() -> Iterator[tuple[str, Deaths, dict[str, Any]]]:
    """What may happen, who dies where, and the options of the job."""
    for least in (None, 2):
        host: Deaths = {0: [("in the sum", 4)], 2: [("in the sum", 4)]}
        yield "the workers of a whole host are replaced", host, {"least": least, "restarts": 1, "hosts": True}
    for place in ("forward", "backward", "in the sum"):
        yield "a sum in the loss is part of the step", {1: [(place, 4)]}, {"reduces": True}
    for place, (accumulate, function) in product(
        ["in an evaluation", "behind an evaluation", "between", "forward"], [(1, True), (2, False), (2, True)]
    ):
        options = {"evaluates": True, "accumulate": accumulate, "function": function}
        yield "a newcomer joins between windows and calls", {1: [(place, 5)]}, options
    died: Deaths = {1: [("forward", 4)]}
    joiners = ["before it joins", "before a meeting", "behind a meeting", "before it takes the state"]
    late: list[tuple[Deaths, Deaths]] = [
        *[(died, {1: [(place, 0)]}) for place in [*joiners, "behind the state"]],
        (died, {1: [("forward", 4)]}),
        (died, {1: [("between", 7)]}),
        (died | {0: [("before it sends the state", 4)]}, {}),
        ({0: [("forward", 4)], 3: [("before it sends the state", 4)]}, {}),  # rank 0 by then
        (died | {2: [("in the sum", 4)]}, {}),
        ({3: [("forward", 4)], 0: [("between", 6)]}, {3: [("forward", 6)]}),
    ]
    for (deaths, joiner), least in product(late, [None, 2]):
        yield "whoever dies as a newcomer joins", deaths, {"joiners": joiner, "least": least, "restarts": 3}
    options = {"joiners": {1: [("in a meeting", 0)]}, "restarts": 2, "hosts": True}
    yield "a newcomer of another host dies before it is heard there", died, options


@pytest.mark.slow
@pytest.mark.parametrize(("what", "deaths", "options"), [*cases()], ids=str)
def test_lost_workers_are_replaced(tmp_path: Path, what: str, deaths: Deaths, options: dict[str, Any]) -> None:
    several = {"workers": 4, "left": 4, "waits": 8, "steps": 16} if "least" in options else {}
    train(tmp_path, deaths, **{"left": 3, "least": None, "restarts": 1, **several, **options})


TRAINS = """
    import json, os, signal, sys, time, torch, anabranch as ab
    from pathlib import Path
    from torch import nn
    member, joined = os.environ["ANABRANCH_MEMBER"], ab.job().joined
    data = [{"x": torch.full((4,), float(index))} for index in range(24)]

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    def share(job):
        return {"x": torch.ones(12 // job.world_size, 4)}

    def loss(model, batch):
        return model(batch["x"]).square().mean()

    def executor(batch_size=6, loss=loss, **options):
        model = nn.Linear(4, 1)
        steps = {"train": ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.001))}
        steps["validate"] = ab.EvalStep(model, lambda model, batch: {"loss": loss(model, batch)})
        loader = ab.loaders.GlobalBatches(data, batch_size)
        options = {"dataloaders": {"train": loader, "validate": loader}, "timeout": 60.0} | options
        return ab.Executor(steps, **options)

    def train(executor, n, dies_at=None, victim="1", batch=None):
        while executor.step < n:
            executor.run("train", batch)
            if executor.step == dies_at and member == victim and not joined:
                kill()
"""


COUNTS = """
    with executor() as one:
        for number in range(10):
            train(one, one.step + 1, 4)
            if number == {evaluates_at}:
                one.evaluate("validate")
                one.save(sys.argv[1] + "/saved")
        print("ended at", one.step)
"""
OTHER_BATCHES = """
    with executor(4 if joined else 6) as one:
        train(one, 10, 3)
        print("ended at", one.step)
"""
NOT_LET_IN = """
    with executor(timeout=2.0 if joined else 60.0) as one:
        train(one, 4, 3)
        until = time.monotonic() + 60.0
        while not joined and "it leaves" not in open(f"{sys.argv[1]}/worker-1.log").read():
            assert time.monotonic() < until
            time.sleep(0.1)
        train(one, 10)
        print("ended at", one.step)
"""
LATER_EXECUTOR = """
    with executor() as one:
        train(one, 5)
    with executor() as one:
        train(one, 10, 3)
        print("ended at", one.step)
"""


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("source", "why", "least"),
    [
        # Its evaluation comes in the middle of the others' training, or its training behind their end.
        *[
            (COUNTS.format(evaluates_at=at), "begin the loop where the job is: while executor.step < n", 3)
            for at in (6, 99)
        ],
        (OTHER_BATCHES, "cannot join the others, and leaves: its loaders are not theirs", 3),
        (NOT_LET_IN, "the others have not let this worker join them for 2 s: it leaves", 1),
        (LATER_EXECUTOR, "they train in another Executor of the script", 3),
    ],
)
def test_a_newcomer_that_cannot_join_leaves(ended: Ends, tmp_path: Path, source: str, why: str, least: int) -> None:
    texts = ended(TRAINS + source, tmp_path, min_workers=least).texts
    assert why in texts[1]
    assert ["ended at 10" in text for text in texts] == [True, False, True], texts


def test_a_newcomer_is_alone_until_its_first_run(ended: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = """
    with executor(state={"best": None}) as one:
        resumed = one.resume("checkpoints")
        if joined:
            assert resumed
            assert ab.job().rank == 1 and ab.job().world_size == 2
            one.save("elsewhere")
            one.export("elsewhere")
            one.finish_saves()
            assert one.state_dict() == {}
            assert one.evaluate("validate")["loss"].item() >= 0
            assert not Path("elsewhere").exists()
            print("began in", one.epoch, one.step)
        for epoch in range(one.epoch, 3):
            while one.epoch == epoch:
                train(one, one.step + 1, 5)
                if one.step == 3:
                    one.state["best"] = 3
                    one.save("background", wait=False)
            one.save("checkpoints")
        print("best", one.state["best"], len(one.state_dict()))
        one.finish_saves()
    """
    texts = ended(TRAINS + source, workers=2).texts
    assert "began in 1 5" in texts[1]
    assert ["best 3 2" in texts[0], "best 3 0" in texts[1]] == [True, True]


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("given", "run('train', ...) was given a batch, and not a function that returns each worker's share"),
        ("sends", "step 'train' calls ab.send or ab.recv"),
    ],
)
def test_a_job_that_is_not_elastic_ends_with_a_killed_worker(ended: Ends, way: str, why: str) -> None:
    source = """
    def sends(model, batch):
        if ab.job().rank < 2:
            ab.send(batch["x"][0], 0) if ab.job().rank else ab.recv(1)
        return loss(model, batch)

    with executor(loss=sends if sys.argv[1] == "sends" else loss, dataloaders=None) as one:
        train(one, 10**9, 3, batch=share(ab.job()) if sys.argv[1] == "given" else share)
    """
    job = ended(TRAINS + source, way, code=1, patience=PATIENT)
    assert not any("takes its place" in line for line in job.told)
    texts = [job.texts[0], job.texts[2]]
    says = f"the job ends with the first worker that is killed or freezes: {why}"
    assert [text.count(says) for text in texts] == [1, 0]
    assert all("PeerLost: rank 1 is lost" in text for text in texts)
    those = texts[:1] if way == "sends" else texts  # rank 2 does not send, and could go on
    assert all(f"the job does not go on without it: {why}" in text for text in those)


@pytest.mark.slow
def test_a_newcomer_joins_those_that_have_begun_to_send_meanwhile(ended: Ends) -> None:
    """Rank 2 does not send, and does not know that the others do."""
    source = """
    def sends(model, batch):
        if one.step > 5 and ab.job().rank < 2:
            ab.send(batch["x"][0], 1) if ab.job().rank == 0 else ab.recv(0)
        return loss(model, batch)

    with executor(loss=sends, dataloaders=None) as one:
        while True:  # a newcomer, too, begins with a run: its job is of four already
            train(one, one.step + 1, 5, "3", share)
            if one.step > 9 and ab.job().world_size == 4:
                break
    """
    texts = ended(TRAINS + source, workers=4, min_workers=2, patience=PATIENT).texts
    assert "calls ab.send or ab.recv" in texts[0]


@pytest.mark.slow
@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize(("mode", "cache"), [(None, False), ("PS", False), ("Hybrid", True)])
def test_ten_random_kills(tmp_path: Path, mode: str | None, cache: bool, freezes: bool) -> None:
    """One or two of four workers at a time, sometimes a newcomer before it has joined."""
    seed = random.randrange(10**6)
    print("seed", seed)
    draw, over, failures = random.Random(seed), threading.Event(), list[str]()
    records, logs = tmp_path / "records", tmp_path / "logs"

    def wait_until(holds: Callable[[], bool]) -> None:
        until = time.monotonic() + 280  # behind 300 the job is over
        while not over.wait(0.02):
            if holds():
                return
            if time.monotonic() > until:
                failures.append("nothing happens any more")
                return

    def workers() -> dict[int, int]:
        roles = json.loads((logs / "job.json").read_text())["roles"]
        return {one["rank"]: one["pid"] for one in roles if one["role"] == "worker" and one["pid"] is not None}

    def kill() -> None:
        try:
            strike()
        except Exception as error:
            failures.append(f"the killer has failed: {error!r}")
            raise
        finally:
            (records / "stop").touch()

    def numbers() -> list[int]:
        """The membership that each process was the last in, and for a new one that which its predecessor was in."""
        last = {one["process"]: one["number"] for one in lines(records, "memberships")}
        return [last.get(process, 1) for process in range(4)]

    def strike() -> None:
        wait_until(lambda: records.exists() and len(lines(records, "losses")) > 8)
        kills = 0
        while kills < 10 and not over.wait(draw.uniform(0.0, 1.0)):
            for process in draw.sample(range(4), draw.choice([1, 2])):
                os.kill(workers()[process], signal.SIGSTOP if freezes else signal.SIGKILL)
                kills += 1
                first = process
                if draw.random() < 0.5:
                    over.wait(draw.uniform(0.0, 0.3))
            if draw.random() < 0.3:  # the newcomer, once there is one
                wait_until(lambda first=first: first in workers())
                over.wait(draw.uniform(0.0, 1.0))
                with suppress(KeyError, ProcessLookupError):
                    os.kill(workers()[first], signal.SIGKILL)
            # Until all four are members again, those that have replaced what was struck last, too.
            last = max(numbers())
            wait_until(lambda last=last: min(numbers()) == max(numbers()) > last)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        train(tmp_path, {}, mode=mode, cache=cache, workers=4, least=None, restarts=20, left=4, steps=10**6)
    finally:
        over.set()
        killer.join()
    assert not failures


@pytest.mark.slow
def test_a_newcomer_goes_on_without_a_worker_with_rows_of_its_own(ended: Ends) -> None:
    source = """
    def dies(job):
        if member == "1" and not joined and one.step == 2:
            kill()
        return share(job)

    with executor(dataloaders=None) as one:
        given = 0
        while given < 6:
            own = one.statistics().memberships >= 3  # the replacement is there
            given += own
            if member == "2" and given == 4:
                kill()
            one.run("train", {"x": torch.ones(2, 4)} if own else dies)
        print("dropped", one.statistics().dropped_rows)
    """
    texts = ended(TRAINS + source, min_workers=2, worker_restarts=RestartBudget(1)).texts
    assert all(text.endswith("dropped 6.0\n") for text in texts[:2]), texts


def test_a_step_of_a_pipe_in_one_process_is_done_again(ended: Ends) -> None:
    source = """
    torch.manual_seed(0)
    x, y = torch.randn(44, 4, dtype=torch.float64), torch.randn(44, 1, dtype=torch.float64)
    pipe = ab.Pipe(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double(), [2, 1], chunks=2)

    def error(output, target):
        if pipe.calls == 5 and member == "1" and not joined:
            kill()
        return nn.functional.mse_loss(output, target)

    step = ab.TrainStep(pipe, error, torch.optim.Adam(pipe.parameters(), lr=0.02))
    loader = ab.loaders.GlobalBatches(torch.utils.data.TensorDataset(x, y), 12)
    with pipe, ab.Executor({"train": step}, dataloaders={"train": loader}, seed=100) as one:
        train(one, 9)
        repeated = one.statistics().repeated_steps
    seeds = [torch.initial_seed(), pipe.seed]
    print(json.dumps([repeated, pipe.calls, seeds, [value.tolist() for value in pipe.parameters()]]))
    """
    texts = ended(TRAINS + source).texts
    torch.manual_seed(0)
    x, y = torch.randn(44, 4, dtype=torch.float64), torch.randn(44, 1, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer, loader = torch.optim.Adam(model.parameters(), lr=0.02), ab.loaders.GlobalBatches(range(44), 12)
    orders = [order for epoch in range(3) for order in torch.as_tensor(loader.order(epoch)).split(12)]
    for chosen in orders[:9]:
        plain_step(model, lambda model, ids: nn.functional.mse_loss(model(x[ids]), y[ids]), optimizer, chosen)
    for process, text in enumerate(texts):
        repeated, calls, seeds, parameters = json.loads(
            next(line for line in text.splitlines() if line.startswith("["))
        )
        assert (repeated, calls) == (1, 9)
        assert seeds == [100 + process] * 2, "no two of those that live draw the same"
        for here, there in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(here, dtype=torch.float64), there.detach(), rtol=0.0, atol=1e-12)


# What a newcomer cannot join, and what no other does for a lost worker.


def test_a_newcomer_trains_in_one_executor_after_the_other(ended: Ends) -> None:
    source = """
    with executor() as one:
        train(one, 5, 3)
    with executor() as one:
        train(one, 5)
        print("ended as", ab.job().rank, "of", ab.job().world_size)
    """
    texts = ended(TRAINS + source).texts
    assert [f"ended as {rank} of 3" in text for rank, text in zip((0, 2, 1), texts, strict=True)] == [True] * 3


def test_a_newcomer_is_told_the_epoch_exactly(ended: Ends, tmp_path: Path) -> None:
    """It starts while the others are behind the last batch of an epoch, and begins with the next, as they do."""
    source = """
    with executor() as one:
        if joined:
            open(sys.argv[1], "w").close()
        began = one.epoch
        for epoch in range(began, 2):
            while one.epoch == epoch:
                train(one, one.step + 1, 4)
            while epoch == 0 and not os.path.exists(sys.argv[1]):
                time.sleep(0.01)
        print("began in", began, "ended at", one.step)
    """
    assert "began in 1 ended at 8" in ended(TRAINS + source, tmp_path / "there").texts[1]


def test_no_epoch_ends_between_a_newcomer_s_look_at_it_and_its_joining(ended: Ends) -> None:
    source = """
    from anabranch.collectives import Workers
    start, gathers = Workers.start_all_gather, []

    def counted(self, *arguments, operation="all_gather", **options):
        gathers.append(operation)
        return start(self, *arguments, operation=operation, **options)

    Workers.start_all_gather = counted
    with executor() as one:
        fewer, epoch = joined, one.epoch
        until = time.monotonic() + 1.0
        while joined and time.monotonic() < until:  # the others would pass many epochs
            time.sleep(0.01)
        over = False
        while not over:
            while one.epoch == epoch:
                train(one, one.step + 1, 6)
                fewer |= ab.job().world_size == 2
            one.state_dict()
            epoch, over = epoch + 1, fewer and ab.job().world_size == 3
        print("compared calls over gloo", gathers.count("comparison of calls"), "times")
    """
    texts = ended(TRAINS + source, min_workers=2).texts
    assert all("compared calls over gloo 0 times" in text for text in texts), texts


def test_the_work_behind_the_training_of_a_killed_worker_is_missed(ended: Ends) -> None:
    source = """
    with executor() as one:
        train(one, 3)
    if member == "1":
        kill()
    time.sleep(600.0)
    """
    failure = ended(TRAINS + source, code=1, workers=2, min_workers=1, patience=HURRIED).outcome.first_failure
    assert failure is not None
    assert (failure.rank, failure.code) == (1, -signal.SIGKILL)


def test_a_newcomer_that_has_become_rank_0_saves_where_the_job_has_resumed(ended: Ends, tmp_path: Path) -> None:
    """The folder's newest checkpoint is of another run, and neither of those that have loaded it is there."""
    source = """
    with executor() as one:
        one.resume(sys.argv[1])
        train(one, 3)
        if sys.argv[2] == "goes on":
            train(one, 6, 5, "0")
            train(one, 9, 8, "1")
        one.save(sys.argv[1])
        print("rank", ab.job().rank, "saved", one.step)
    """
    for what, step in (("begins", 3), ("goes on", 9)):
        texts = ended(TRAINS + source, tmp_path / "saved", what, workers=2).texts
        assert f"rank 0 saved {step}" in texts[0]


def test_a_newcomer_does_not_wait_for_the_save_of_a_worker_that_died_as_it_joined(ended: Ends) -> None:
    source = """
    from anabranch import checkpoint
    from anabranch.executor.running.redo import Redo
    settle, meetings = Redo._settle, []

    def dies_as_the_newcomer_comes(redo, *arguments, **options):
        meetings.append(1)
        if len(meetings) == 2:
            kill()
        return settle(redo, *arguments, **options)

    def seen(record):
        if record.joined:
            one.request_stop()

    if member == "0" and not joined:
        Redo._settle = dies_as_the_newcomer_comes
        checkpoint.write = lambda *args, **options: signal.pause()  # in the background
    with executor(dataloaders=None, timeout=300.0) as one:
        one.on("membership", seen)
        while not one.stopping:
            train(one, one.step + 1, 3, "2", share)
            if one.step == 2:
                one.save("checkpoints", wait=False)
        one.finish_saves()
        print("ends", ab.job().world_size)
    """
    job = ended(TRAINS + source, min_workers=1, worker_restarts=RestartBudget(1), patience=PATIENT)
    assert not job.outcome.timed_out
    assert "rank 0 was lost, and may not have written the save of step 2" in job.texts[1]
    assert all("ends" in text for text in job.texts[1:]), job.texts


def test_a_stop_ends_the_wait_for_a_replacement(ended: Ends, tmp_path: Path) -> None:
    source = """
    if joined:
        os.kill(int(sys.argv[1]), signal.SIGTERM)
        signal.pause()
    with executor() as one:
        signal.signal(signal.SIGTERM, lambda *_: one.request_stop())
        while not one.stopping:
            train(one, one.step + 1, 3)
        one.save(sys.argv[2])
        print("stopped at", one.step)
    """
    job = ended(TRAINS + source, os.getpid(), tmp_path / "saved")
    assert job.outcome.interrupted == signal.SIGTERM
    assert not any("did not stop in time" in line for line in job.told), job.told
    # The launcher lets them go on without the newcomer a moment before the signal reaches them.
    assert any(all(f"stopped at {step}\n" in job.texts[rank] for rank in (0, 2)) for step in (4, 5)), job.texts


def test_a_meeting_takes_place_for_all_or_for_none(ended: Ends, tmp_path: Path) -> None:
    """One has seen all come, as another sees the next membership: none of the members has died in between."""
    source = """
    import msgspec
    from anabranch.collectives import workers
    from anabranch.liveness import meeting
    published, meet, looks, folder = meeting.published, workers.meet_members, [], Path(sys.argv[1])

    def wait_for(name):
        while not (folder / name).exists():
            time.sleep(0.01)

    def look(place):
        now = published(place)
        looks.extend([now.number] * (now.number == 1))
        if member == "0" and len(looks) == 1:
            wait_for("the other is there")
        if member == "2" and len(looks) == 2:
            (folder / "the other is there").touch()
            wait_for("met")
            now = msgspec.structs.replace(now, number=2)
        return now

    def then_note(*arguments):
        met = meet(*arguments)
        (folder / "met").touch()
        return met

    meeting.published, workers.meet_members = look, then_note
    with executor() as one:
        train(one, 6, 3)
        print("ended as", ab.job().rank, "of", ab.job().world_size, "of membership", one._workers.membership)
    """
    texts = ended(TRAINS + source, tmp_path, min_workers=1, worker_restarts=RestartBudget(0)).texts
    assert [f"ended as {rank} of 2 of membership 1" in texts[2 * rank] for rank in range(2)] == [True, True], texts


def test_the_end_of_the_budget_is_told(ended: Ends) -> None:
    source = """
    if joined:
        kill()
    with executor() as one:
        train(one, 9, 3)
    """
    told = ended(TRAINS + source, code=1, workers=2, worker_restarts=RestartBudget(1)).told
    assert any("rank 1 is not replaced again: --worker-restarts 1/600s" in line for line in told), told


def tell_who_is_frozen(monkeypatch: pytest.MonkeyPatch, pid: Path) -> None:
    """Write to ``pid`` who is, once the launcher has seen that at many looks."""
    looks = list[RoleProcess]()

    def frozen(members: Members, services: object) -> list[RoleProcess]:
        processes = look(members, services)  # type: ignore[arg-type]
        looks.extend(one for one in members._workers if one.running and one.frozen)
        if len(looks) >= 5 and not pid.exists():
            pid.with_suffix(".part").write_text(f"{looks[-1].pid}")
            pid.with_suffix(".part").rename(pid)
        return processes

    look = Members.frozen
    monkeypatch.setattr(Members, "frozen", frozen)
    for module in (supervisor, members_module):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.1)


WAKES = """
    import os, signal, sys, time
    from pathlib import Path

    def wake():
        while not (pid := Path(sys.argv[1])).exists():
            time.sleep(0.01)
        os.kill(int(pid.read_text()), signal.SIGCONT)
"""


def test_a_stopped_worker_of_a_job_that_is_not_elastic_may_be_woken(
    ended: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
        sys.exit()
    wake()
    """
    tell_who_is_frozen(monkeypatch, tmp_path / "pid")
    ended(WAKES + source, tmp_path / "pid", workers=2)


def test_the_only_member_may_be_woken_while_a_newcomer_starts(
    ended: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed, and all steps since the last checkpoint were lost with it."""
    source = """
    if joined:
        wake()
    with executor(heartbeat=0.1) as one:
        train(one, 4, 3)
        if member == "0":
            while ab.job().world_size > 1:
                one.run("train")
            os.kill(os.getpid(), signal.SIGSTOP)
        train(one, 40)
    """
    tell_who_is_frozen(monkeypatch, tmp_path / "pid")
    ended(WAKES + TRAINS + source, tmp_path / "pid", workers=2, min_workers=1)
