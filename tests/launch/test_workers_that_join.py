"""A worker that is killed is replaced: the newcomer takes the state from the others, and nothing shows."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from elastic import Deaths, train
from jobs import HURRIED, PATIENT, launch, lines
from torch import nn

import anabranch as ab
from anabranch.launch import RestartBudget
from anabranch.launch.supervision import members as members_module
from anabranch.launch.supervision import supervisor
from anabranch.launch.supervision.members import Members
from anabranch.launch.supervision.worker import RoleProcess

Script = Callable[[str], Path]


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


@pytest.mark.slow
@pytest.mark.parametrize("least", [None, 2])
def test_the_workers_of_a_whole_host_are_replaced(tmp_path: Path, least: int | None) -> None:
    deaths: Deaths = {0: [("in the sum", 4)], 2: [("in the sum", 4)]}
    train(tmp_path, deaths, workers=4, least=least, restarts=1, left=4, waits=8, steps=16, hosts=True)


@pytest.mark.slow
def test_a_newcomer_of_another_host_may_die_before_it_is_heard_there(tmp_path: Path) -> None:
    joiners: Deaths = {1: [("in a meeting", 0)]}
    train(tmp_path, {1: [("forward", 4)]}, least=None, restarts=2, left=3, joiners=joiners, hosts=True)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "backward", "in the sum"])
def test_a_sum_in_the_loss_is_part_of_the_step(tmp_path: Path, place: str) -> None:
    train(tmp_path, {1: [(place, 4)]}, least=None, restarts=1, left=3, reduces=True)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["in an evaluation", "behind an evaluation", "between", "forward"])
@pytest.mark.parametrize(("accumulate", "function"), [(1, True), (2, False), (2, True)])
def test_a_newcomer_joins_between_windows_and_calls(
    tmp_path: Path, place: str, accumulate: int, function: bool
) -> None:
    options = {"evaluates": True, "accumulate": accumulate, "function": function}
    train(tmp_path, {1: [(place, 5)]}, least=None, restarts=1, left=3, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deaths", "joiners"),
    [
        ({1: [("forward", 4)]}, {1: [("before it joins", 0)]}),
        ({1: [("forward", 4)]}, {1: [("before a meeting", 0)]}),
        ({1: [("forward", 4)]}, {1: [("behind a meeting", 0)]}),
        ({1: [("forward", 4)]}, {1: [("before it takes the state", 0)]}),
        ({1: [("forward", 4)]}, {1: [("behind the state", 0)]}),
        ({1: [("forward", 4)]}, {1: [("forward", 4)]}),
        ({1: [("forward", 4)]}, {1: [("between", 7)]}),
        ({1: [("forward", 4)], 0: [("before it sends the state", 4)]}, {}),
        ({0: [("forward", 4)], 3: [("before it sends the state", 4)]}, {}),  # rank 0 by then
        ({1: [("forward", 4)], 2: [("in the sum", 4)]}, {}),
        ({3: [("forward", 4)], 0: [("between", 6)]}, {3: [("forward", 6)]}),
    ],
    ids=str,
)
@pytest.mark.parametrize("least", [None, 2])
def test_whoever_dies_as_a_newcomer_joins(tmp_path: Path, deaths: Deaths, joiners: Deaths, least: int | None) -> None:
    train(tmp_path, deaths, workers=4, least=least, restarts=3, left=4, joiners=joiners, waits=8, steps=16)


COUNTS = """
    import os, signal, sys, torch, anabranch as ab
    data = [{"x": torch.full((4,), float(index))} for index in range(24)]
    model = torch.nn.Linear(4, 1)
    loss = lambda model, batch: model(batch["x"]).square().mean()
    steps = {"train": ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.001))}
    steps["validate"] = ab.EvalStep(model, lambda model, batch: {"loss": loss(model, batch)})
    loader = ab.loaders.GlobalBatches(data, 6)
    with ab.Executor(steps, dataloaders={"train": loader, "validate": loader}, timeout=60.0) as executor:
        for number in range(10):
            executor.run("train")
            if number == 3 and os.environ["ANABRANCH_MEMBER"] == "1" and not ab.job().joined:
                os.kill(os.getpid(), signal.SIGKILL)
            if number == int(sys.argv[1]):
                executor.evaluate("validate")
                executor.save(sys.argv[2])
    print("ended at", executor.step)
"""


@pytest.mark.parametrize("evaluates_at", [6, 99])
def test_a_newcomer_whose_loop_counts_from_its_start_leaves(script: Script, tmp_path: Path, evaluates_at: int) -> None:
    """Its evaluation comes in the middle of the others' training, or its training behind their end."""
    told: list[str] = []
    arguments = [str(evaluates_at), str(tmp_path / "saved")]
    outcome = launch(script(COUNTS), arguments, workers=3, log_dir=tmp_path, tell=told.append, seconds=120.0)
    text = (tmp_path / "worker-1.log").read_text()
    assert outcome.exit_code == 0, (told, [log.read_text() for log in tmp_path.glob("*.log")])
    assert "begin the loop where the job is: while executor.step < n" in text
    assert "ended at" not in text
    for survivor in (0, 2):
        assert "ended at 10" in (tmp_path / f"worker-{survivor}.log").read_text()


ALONE = """
    import os, signal, torch, anabranch as ab
    from pathlib import Path
    data = [{"x": torch.full((4,), float(index))} for index in range(24)]
    model = torch.nn.Linear(4, 1)
    loss = lambda model, batch: model(batch["x"]).square().mean()
    steps = {"train": ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.001))}
    steps["validate"] = ab.EvalStep(model, lambda model, batch: {"loss": loss(model, batch)})
    loader = ab.loaders.GlobalBatches(data, 6)
    state = {"best": None}
    with ab.Executor(steps, dataloaders={"train": loader, "validate": loader}, timeout=60.0, state=state) as executor:
        resumed = executor.resume("checkpoints")
        if ab.job().joined:
            assert resumed
            assert ab.job().rank == 1 and ab.job().world_size == 2
            executor.save("elsewhere")
            executor.export("elsewhere")
            executor.finish_saves()
            assert executor.state_dict() == {}
            assert executor.evaluate("validate")["loss"].item() >= 0
            assert not Path("elsewhere").exists()
            print("began in", executor.epoch, executor.step)
        for epoch in range(executor.epoch, 3):
            while executor.epoch == epoch:
                executor.run("train")
                if executor.step == 3:
                    executor.state["best"] = 3
                    executor.save("background", wait=False)
                if executor.step == 5 and ab.job().rank == 1 and not ab.job().joined:
                    os.kill(os.getpid(), signal.SIGKILL)
            executor.save("checkpoints")
        print("best", executor.state["best"], len(executor.state_dict()))
        executor.finish_saves()
"""


def test_a_newcomer_is_alone_until_its_first_run(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    logs = tmp_path / "logs"
    logs.mkdir()
    outcome = launch(script(ALONE), workers=2, log_dir=logs, seconds=120.0)
    texts = [log.read_text() for log in sorted(logs.glob("worker-*.log"))]
    assert outcome.exit_code == 0, texts
    assert "began in 1 5" in texts[1]
    assert ["best 3 2" in texts[0], "best 3 0" in texts[1]] == [True, True]


NOT_ELASTIC = """
    import os, signal, sys, torch, anabranch as ab
    given, model = sys.argv[1] == "given", torch.nn.Linear(4, 1)

    def loss(model, batch):
        if not given and ab.job().rank == 1:
            ab.send(batch[0], 0)
        elif not given and ab.job().rank == 0:
            ab.recv(1)
        return model(batch).square().mean()

    def share(job):
        return torch.full((8, 4), 1.0 + job.rank)

    with ab.Executor(ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.001))) as executor:
        for number in range(10**9):
            executor.run(batch=share(ab.job()) if given else share)
            if number == 2 and ab.job().rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("given", "run('default', ...) was given a batch, and not a function that returns each worker's share"),
        ("sends", "step 'default' calls ab.send or ab.recv"),
    ],
)
def test_a_job_that_is_not_elastic_ends_with_a_killed_worker(
    script: Script, tmp_path: Path, way: str, why: str
) -> None:
    told: list[str] = []
    outcome = launch(script(NOT_ELASTIC), [way], workers=3, log_dir=tmp_path, tell=told.append, patience=PATIENT)
    assert outcome.exit_code == 1
    assert not any("takes its place" in line for line in told)
    texts = [(tmp_path / f"worker-{rank}.log").read_text() for rank in (0, 2)]
    says = f"the job ends with the first worker that is killed or freezes: {why}"
    assert [text.count(says) for text in texts] == [1, 0]
    assert all("PeerLost: rank 1 is lost" in text for text in texts)
    those = texts[:1] if way == "sends" else texts  # rank 2 does not send, and could go on
    assert all(f"the job does not go on without it: {why}" in text for text in those)


SENDS_LATER = """
    import os, signal, torch, anabranch as ab
    model = torch.nn.Linear(4, 1)

    def loss(model, batch):
        if executor.step > 5 and ab.job().rank < 2:
            ab.send(batch[0], 1) if ab.job().rank == 0 else ab.recv(0)
        return model(batch).square().mean()

    def share(job):
        return torch.full((8, 4), 1.0 + job.rank)

    step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.001))
    with ab.Executor(step, timeout=30) as executor:
        while True:
            executor.run(batch=share)
            if executor.step == 5 and os.environ["ANABRANCH_MEMBER"] == "3" and not ab.job().joined:
                os.kill(os.getpid(), signal.SIGKILL)
            if executor.step > 9 and ab.job().world_size == 4:
                break
"""


@pytest.mark.slow
def test_a_newcomer_joins_those_that_have_begun_to_send_meanwhile(script: Script, tmp_path: Path) -> None:
    """Rank 2 does not send, and does not know that the others do."""
    told: list[str] = []
    outcome = launch(
        script(SENDS_LATER), workers=4, min_workers=2, log_dir=tmp_path, tell=told.append, patience=PATIENT
    )
    assert outcome.exit_code == 0, told
    assert "calls ab.send or ab.recv" in (tmp_path / "worker-0.log").read_text()


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


THEN_GIVEN = """
    import os, signal, torch, anabranch as ab
    me, joined, rows = os.environ["ANABRANCH_MEMBER"], ab.job().joined, torch.ones(12, 4)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    step = ab.TrainStep(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.001))

    def share(job):
        if me == "1" and not joined and executor.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return rows[job.rank :: job.world_size]

    with ab.Executor(step, timeout=60.0) as executor:
        given = 0
        while given < 6:
            own = executor.statistics().memberships >= 3  # the replacement is there
            given += own
            if me == "2" and given == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            executor.run(batch=rows[:2] if own else share)
        print("dropped", executor.statistics().dropped_rows)
"""


@pytest.mark.slow
def test_a_newcomer_goes_on_without_a_worker_with_rows_of_its_own(script: Script, tmp_path: Path) -> None:
    options = {"min_workers": 2, "worker_restarts": RestartBudget(1)}
    outcome = launch(script(THEN_GIVEN), workers=3, log_dir=tmp_path, seconds=120.0, **options)
    texts = [(tmp_path / f"worker-{rank}.log").read_text() for rank in (0, 1)]
    assert outcome.exit_code == 0, texts
    assert all(text.endswith("dropped 6.0\n") for text in texts), texts


PIPED = """
    import json, os, signal, torch, anabranch as ab
    from torch import nn

    torch.manual_seed(0)
    x, y = torch.randn(44, 4, dtype=torch.float64), torch.randn(44, 1, dtype=torch.float64)
    pipe = ab.Pipe(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double(), [2, 1], chunks=2)

    def loss(output, target):
        if pipe.calls == 5 and os.environ["ANABRANCH_MEMBER"] == "1" and not ab.job().joined:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.mse_loss(output, target)

    step = ab.TrainStep(pipe, loss, torch.optim.Adam(pipe.parameters(), lr=0.02))
    loader = ab.loaders.GlobalBatches(torch.utils.data.TensorDataset(x, y), 12)
    with pipe, ab.Executor(step, dataloaders={"default": loader}, seed=100) as executor:
        while executor.step < 9:
            executor.run()
        repeated = executor.statistics().repeated_steps
    seeds = [torch.initial_seed(), pipe.seed]
    print(json.dumps([repeated, pipe.calls, seeds, [value.tolist() for value in pipe.parameters()]]))
"""


def test_a_step_of_a_pipe_in_one_process_is_done_again(script: Script, tmp_path: Path) -> None:
    outcome = launch(script(PIPED), workers=3, log_dir=tmp_path, seconds=120.0)
    texts = [log.read_text() for log in sorted(tmp_path.glob("worker-*.log"))]
    assert outcome.exit_code == 0, texts
    torch.manual_seed(0)
    x, y = torch.randn(44, 4, dtype=torch.float64), torch.randn(44, 1, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer, loader = torch.optim.Adam(model.parameters(), lr=0.02), ab.loaders.GlobalBatches(range(44), 12)
    orders = [order for epoch in range(3) for order in torch.as_tensor(loader.order(epoch)).split(12)]
    for chosen in orders[:9]:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    for process, text in enumerate(texts):
        repeated, calls, seeds, parameters = json.loads(
            next(line for line in text.splitlines() if line.startswith("["))
        )
        assert (repeated, calls) == (1, 9)
        assert seeds == [100 + process] * 2, "no two of those that live draw the same"
        for here, there in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(here, dtype=torch.float64), there.detach(), rtol=0.0, atol=1e-12)


# What a newcomer cannot join, and what no other does for a lost worker.

TRAINS = """
    import os, signal, sys, time, torch, anabranch as ab
    member, joined = os.environ["ANABRANCH_MEMBER"], ab.job().joined
    data = [{"x": torch.full((4,), float(index))} for index in range(24)]

    def executor(batch_size=6, timeout=60.0):
        model = torch.nn.Linear(4, 1)
        loss = lambda model, batch: model(batch["x"]).square().mean()
        step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.001))
        loader = ab.loaders.GlobalBatches(data, batch_size)
        return ab.Executor({"train": step}, dataloaders={"train": loader}, timeout=timeout)

    def train(executor, n, dies_at=None, victim="1"):
        while executor.step < n:
            executor.run("train")
            if executor.step == dies_at and member == victim and not joined:
                os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_newcomer_whose_batches_are_of_another_size_leaves(script: Script, tmp_path: Path) -> None:
    source = """
    with executor(4 if joined else 6) as one:
        train(one, 8, 3)
        print("ended at", one.epoch, one.step)
    """
    outcome = launch(script(TRAINS + source), workers=3, log_dir=tmp_path, seconds=120.0)
    texts = [log.read_text() for log in sorted(tmp_path.glob("worker-*.log"))]
    assert outcome.exit_code == 0, texts
    assert ["ended at 2 8" in text for text in texts] == [True, False, True], texts
    assert "cannot join the others, and leaves: its loaders are not theirs" in texts[1]


def test_others_are_replaced_when_a_newcomer_has_left_and_ends_late(script: Script, tmp_path: Path) -> None:
    source = """
    try:
        with executor(4 if joined and member == "1" else 6) as one:
            train(one, 5, 3)
            if member == "2" and not joined:
                os.kill(os.getpid(), signal.SIGKILL)
            train(one, 8)
    finally:
        time.sleep(4.0 if joined and member == "1" else 0.0)
    """
    told = list[str]()
    outcome = launch(script(TRAINS + source), workers=3, log_dir=tmp_path, seconds=120.0, tell=told.append)
    assert outcome.exit_code == 0, told
    assert "another takes its place" in told[-1], told


@pytest.mark.parametrize("dies_in", ["first", "second"])
def test_a_script_may_train_in_one_executor_after_the_other(script: Script, tmp_path: Path, dies_in: str) -> None:
    """A newcomer begins with the first: where the others are in the second already, it leaves."""
    source = """
    with executor() as one:
        train(one, 5, 3 if sys.argv[1] == "first" else None)
    with executor() as one:
        train(one, 5, 3 if sys.argv[1] == "second" else None)
        print("ended as", ab.job().rank, "of", ab.job().world_size)
    """
    outcome = launch(script(TRAINS + source), [dies_in], workers=3, log_dir=tmp_path, seconds=120.0)
    texts = [log.read_text() for log in sorted(tmp_path.glob("worker-*.log"))]
    assert outcome.exit_code == 0, texts
    if dies_in == "first":
        assert [f"ended as {rank} of 3" in text for rank, text in zip((0, 2, 1), texts, strict=True)] == [True] * 3
    else:
        assert [f"ended as {rank} of 2" in text for rank, text in zip((0, 9, 1), texts, strict=True)] == [1, 0, 1]
        assert "they train in another Executor of the script" in texts[1]


def test_a_newcomer_is_told_the_epoch_exactly(script: Script, tmp_path: Path) -> None:
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
    outcome = launch(script(TRAINS + source), [str(tmp_path / "there")], workers=3, log_dir=tmp_path, seconds=120.0)
    texts = [log.read_text() for log in sorted(tmp_path.glob("worker-*.log"))]
    assert outcome.exit_code == 0, texts
    assert "began in 1 ended at 8" in texts[1], texts


def test_no_epoch_ends_between_a_newcomer_s_look_at_it_and_its_joining(script: Script, tmp_path: Path) -> None:
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
    outcome = launch(script(TRAINS + source), workers=3, min_workers=2, log_dir=tmp_path, seconds=120.0)
    texts = [log.read_text() for log in sorted(tmp_path.glob("worker-*.log"))]
    assert outcome.exit_code == 0, texts
    assert all("compared calls over gloo 0 times" in text for text in texts), texts


def test_the_work_behind_the_training_of_a_killed_worker_is_missed(script: Script, tmp_path: Path) -> None:
    source = """
    with executor() as one:
        train(one, 3)
    if member == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600.0)
    """
    outcome = launch(script(TRAINS + source), workers=2, min_workers=1, log_dir=tmp_path, patience=HURRIED)
    failure = outcome.first_failure
    assert failure is not None
    assert (failure.rank, failure.code, outcome.exit_code) == (1, -signal.SIGKILL, 1)


def test_a_newcomer_that_has_become_rank_0_saves_where_the_job_has_resumed(script: Script, tmp_path: Path) -> None:
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
    path = script(TRAINS + source)
    for what, step in (("begins", 3), ("goes on", 9)):
        arguments = [str(tmp_path / "saved"), what]
        outcome = launch(path, arguments, workers=2, log_dir=tmp_path, seconds=120.0)
        texts = [log.read_text() for log in sorted(tmp_path.glob("worker-*.log"))]
        assert outcome.exit_code == 0, texts
        assert f"rank 0 saved {step}" in texts[0]


SAVED_BEFORE = """
    import os, signal, torch, anabranch as ab
    from anabranch import checkpoint
    from anabranch.executor.running.redo import Redo

    job, settle, meetings = ab.job(), Redo._settle, []
    model = torch.nn.Linear(4, 1)
    step = ab.TrainStep(model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), lr=0.001))

    def dies_as_the_newcomer_comes(redo, *arguments, **options):
        meetings.append(1)
        if len(meetings) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return settle(redo, *arguments, **options)

    def seen(record):
        if record.joined:
            executor.request_stop()

    if job.rank == 0 and not job.joined:
        Redo._settle = dies_as_the_newcomer_comes
        checkpoint.write = lambda *args, **options: signal.pause()  # in the background
    with ab.Executor(step, timeout=300.0) as executor:
        executor.on("membership", seen)
        while not executor.stopping:
            executor.run(batch=lambda job: torch.ones(12 // job.world_size, 4))
            if executor.step == 2:
                executor.save("checkpoints", wait=False)
            if executor.step == 3 and job.rank == 2 and not job.joined:
                os.kill(os.getpid(), signal.SIGKILL)
        executor.finish_saves()
        print("ends", ab.job().world_size)
"""


def test_a_newcomer_does_not_wait_for_the_save_of_a_worker_that_died_as_it_joined(
    script: Script, tmp_path: Path
) -> None:
    options = {"min_workers": 1, "worker_restarts": RestartBudget(1), "patience": PATIENT}
    outcome = launch(script(SAVED_BEFORE), workers=3, log_dir=tmp_path, seconds=120.0, **options)
    assert not outcome.timed_out
    assert outcome.exit_code == 0
    member, newcomer = ((tmp_path / f"worker-{process}.log").read_text() for process in (1, 2))
    assert "rank 0 was lost, and may not have written the save of step 2" in member
    assert "ends" in member
    assert "ends" in newcomer, newcomer


def test_a_newcomer_that_nobody_lets_in_leaves(script: Script, tmp_path: Path) -> None:
    source = """
    with executor(timeout=2.0 if joined else 60.0) as one:
        train(one, 4, 3)
        until = time.monotonic() + 60.0
        while not joined and "it leaves" not in open(f"{sys.argv[1]}/worker-1.log").read():
            assert time.monotonic() < until
            time.sleep(0.1)
        train(one, 5)
    """
    folder = str(tmp_path)
    outcome = launch(script(TRAINS + source), [folder], workers=3, min_workers=1, log_dir=tmp_path, seconds=120.0)
    texts = [log.read_text() for log in sorted(tmp_path.glob("worker-*.log"))]
    assert outcome.exit_code == 0, texts
    assert "the others have not let this worker join them for 2 s: it leaves" in texts[1]


def test_a_stop_ends_the_wait_for_a_replacement(script: Script, tmp_path: Path) -> None:
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
    arguments, told = [str(os.getpid()), str(tmp_path / "saved")], list[str]()
    outcome = launch(script(TRAINS + source), arguments, workers=3, log_dir=tmp_path, tell=told.append, seconds=120.0)
    texts = [log.read_text() for log in sorted(tmp_path.glob("worker-*.log"))]
    assert outcome.interrupted == signal.SIGTERM
    assert not any("did not stop in time" in line for line in told), told
    assert outcome.exit_code == 0, texts
    # The launcher lets them go on without the newcomer a moment before the signal reaches them.
    assert any(all(f"stopped at {step}\n" in texts[rank] for rank in (0, 2)) for step in (4, 5)), texts


def test_a_meeting_takes_place_for_all_or_for_none(script: Script, tmp_path: Path) -> None:
    """One has seen all come, as another sees the next membership: none of the members has died in between."""
    source = """
    import msgspec
    from pathlib import Path
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
    budget = RestartBudget(0)
    outcome = launch(
        script(TRAINS + source), [str(tmp_path)], workers=3, min_workers=1, worker_restarts=budget, log_dir=tmp_path,
        seconds=120.0,
    )  # fmt: skip
    texts = [log.read_text() for log in sorted(tmp_path.glob("worker-*.log"))]
    assert outcome.exit_code == 0, texts
    assert [f"ended as {rank} of 2 of membership 1" in texts[2 * rank] for rank in range(2)] == [True, True], texts


def test_the_end_of_the_budget_is_told(script: Script, tmp_path: Path) -> None:
    source = """
    if joined:
        os.kill(os.getpid(), signal.SIGKILL)
    with executor() as one:
        train(one, 9, 3)
    """
    told: list[str] = []
    outcome = launch(
        script(TRAINS + source), workers=2, worker_restarts=RestartBudget(1), log_dir=tmp_path, tell=told.append
    )
    assert outcome.exit_code == 1
    assert any("rank 1 is not replaced again: --worker-restarts 1/600s" in line for line in told), told


def test_a_stopped_worker_of_a_job_that_is_not_elastic_may_be_woken(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
    import os, signal, sys, time
    from pathlib import Path
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
        sys.exit()
    while not (pid := Path(sys.argv[1])).exists():
        time.sleep(0.01)
    os.kill(int(pid.read_text()), signal.SIGCONT)
    """
    looks, pid = list[object](), tmp_path / "pid"

    def frozen(members: Members, services: object) -> list[RoleProcess]:
        found = look(members, services)  # type: ignore[arg-type]
        looks.extend(one for one in members._workers if one.running and one.frozen)
        if len(looks) == 3:
            (tmp_path / "part").write_text(f"{members._workers[1].pid}")
            (tmp_path / "part").rename(pid)
        return found

    look = Members.frozen
    monkeypatch.setattr(Members, "frozen", frozen)
    for module in (supervisor, members_module):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.1)
    outcome = launch(script(source), [str(pid)], workers=2, log_dir=tmp_path, seconds=120.0)
    assert [one.code for one in outcome.exits] == [0, 0]
