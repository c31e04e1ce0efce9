"""A worker that is killed leaves the job: the others do its step again, and nothing shows.

None is replaced here; see ``test_workers_that_join.py``.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic import Deaths, chosen, train
from jobs import PATIENT, Ends, lines

from anabranch.launch import RestartBudget


def test_the_others_do_the_step_of_a_killed_rank_0_again(tmp_path: Path) -> None:
    outcome, told = train(tmp_path, {0: [("in the sum", 6)]})
    assert [one.code for one in outcome.exits] == [-signal.SIGKILL, 0, 0]
    assert any("the job goes on with 2 workers, whose rank 0 writes to worker-2.log" in line for line in told)
    assert [one["left"] for one in lines(tmp_path / "records", "memberships")] == [[0], [0]]
    assert {(end["memberships"], end["repeated"]) for end in lines(tmp_path / "records", "end")} == {(2, 1)}


def test_a_worker_that_has_missed_the_last_result_takes_it_from_one_that_has_it(tmp_path: Path) -> None:
    train(tmp_path, {0: [("between", 6)]}, misses={1: (5, "gradients", 1)}, gloo=True)


def test_the_others_on_two_hosts_do_the_step_again(tmp_path: Path) -> None:
    """Sums within a host are in shared memory, and both are connected by gloo, as under the next membership."""
    train(tmp_path, {1: [("in the sum", 6)]}, workers=4, hosts=True)


PLACES = ("forward", "backward", "before the sum", "in the sum", "between")


def cases() -> Iterator[tuple[str, Deaths, dict[str, Any]]]:
    """What may happen, who dies where, and the options of the job."""
    for place, victim, gloo in chosen(PLACES, range(4), [False, True]):
        yield "any worker may die anywhere", {victim: [(place, 4 + victim)]}, {"workers": 4, "gloo": gloo}
    several: list[Deaths] = [
        {0: [("forward", 5)], 2: [("forward", 5)]},
        {0: [("in the sum", 3)], 3: [("forward", 6)]},
        {1: [("backward", 4)], 3: [("before a meeting", 4)]},
        {1: [("backward", 4)], 0: [("behind a meeting", 4)]},
        {3: [("in the sum", 4)], 2: [("behind a meeting", 4)], 0: [("between", 8)]},
        {0: [("forward", 1)], 1: [("forward", 2)], 2: [("forward", 3)]},
    ]
    for deaths, gloo in product(several, [False, True]):
        yield "several may die", deaths, {"workers": 4, "gloo": gloo}
    hosts: list[Deaths] = [{0: [("in the sum", 6)]}, {0: [("forward", 3)], 2: [("forward", 3)]}, {3: [("between", 5)]}]
    for deaths, freezes in product(hosts, [False, True]):
        yield "a whole host may die", deaths, {"workers": 4, "hosts": True, "freezes": freezes}
    unconnected: Deaths = {1: [("forward", 4)], 3: [("meet between hosts", 4)]}
    yield "the first of a host dies before it is connected with others", unconnected, {"workers": 4, "hosts": True}
    # One has gone on to the first run of the next epoch, and one has not seen that all are at the end of this one.
    late = {"misses": {1: (4, "gradients", 1)}, "gloo": True}
    yield "the end of an epoch that one has missed is seen again", {0: [("forward", 4)]}, late
    late = {"misses": {1: (4, "rows", 1)}, "gloo": True, "evaluates": True, "accumulate": 2}
    yield "who has missed a run of the window does it with one that evaluates", {0: [("between", 5)]}, late
    for place, run, function in chosen(PLACES, [6, 7], [False, True]):
        yield "a window is done again from its first run", {1: [(place, run)]}, {"accumulate": 2, "function": function}
    yield "batches of a function are shared out anew", {2: [("in the sum", 4)]}, {"function": True}
    for place, victim, (accumulate, run) in product(
        ("in an evaluation", "behind an evaluation", "in a save", "between"), [0, 1], [(1, 5), (2, 5), (2, 6)]
    ):
        if place != "in a save" or (victim == 0 and run % accumulate == 0):  # rank 0 writes, between two windows
            options = {"evaluates": True, "accumulate": accumulate}
            yield "evaluations and saves begin again", {victim: [(place, run)]}, options
    aside = {"evaluates": True, "background": True}
    for place, victim in product(["in an evaluation", "before a save", "as the states are there", "between"], [0, 1]):
        yield "so do saves in the background, and evaluations of any loader", {victim: [(place, 5)]}, aside
    for one in (0, 1):  # the last message of it, behind those of the end of the one before
        missed = aside | {"misses": {one: (6, "save", 10)}}
        yield "a save that one has not seen begin is finished", {2: [("behind a save", 6)]}, missed
    missed = {"evaluates": True, "misses": {1: (6, "evaluate", 6)}}  # the last message of it
    yield "an evaluation's result is taken from who has it", {0: [("behind an evaluation", 6)]}, missed


@pytest.mark.slow
@pytest.mark.parametrize(("what", "deaths", "options"), [*cases()], ids=str)
def test_the_others_go_on(tmp_path: Path, what: str, deaths: Deaths, options: dict[str, Any]) -> None:
    train(tmp_path, deaths, **options)


STATES = ("before state_dict", "behind state_dict", "before export", "behind export", "at the end of export")


@pytest.mark.slow
@pytest.mark.parametrize(("place", "victim", "mode"), chosen(STATES, [0, 1], [None, "Hybrid"]))
def test_states_and_exports_begin_again(tmp_path: Path, place: str, victim: int, mode: str | None) -> None:
    train(tmp_path, {victim: [(place, 5)]}, exports=True, mode=mode)
    records = lines(tmp_path / "records", "states")
    runs = {one["run"] for one in records}
    assert [one["run"] for one in records if one["state"]] == sorted(runs), "rank 0 has each, and nobody else"


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_a_save_in_the_background_that_one_has_not_seen_begin_is_finished(tmp_path: Path, late: int) -> None:
    misses = {late: (6, "save", 10)}  # the last message of it, behind those of the end of the one before
    train(tmp_path, {2: [("behind a save", 6)]}, evaluates=True, background=True, misses=misses)


@pytest.mark.slow
def test_an_evaluation_s_result_is_taken_from_a_worker_that_has_it(tmp_path: Path) -> None:
    misses = {1: (6, "evaluate", 6)}  # the last message of it
    train(tmp_path, {0: [("behind an evaluation", 6)]}, evaluates=True, misses=misses)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("place", ["forward", "in the sum", "between"])
def test_a_frozen_worker_is_killed_and_leaves(tmp_path: Path, place: str, victim: int) -> None:
    outcome, told = train(tmp_path, {victim: [(place, 5)]}, freezes=True)
    assert outcome.exits[victim].code == -signal.SIGKILL
    assert any("is frozen; killing it" in line for line in told)


OWN_ROWS = """
    import json, os, signal, sys, torch, anabranch as ab
    way, accumulate, dies_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    me = int(os.environ["RANK"])  # of the start
    length = 7 if me == 1 and way == "a longer loader" else 4
    batches = [torch.full((2 + me, 4), 1.0 + me + number / 8, dtype=torch.float64) for number in range(length)]
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()

    def loss(model, batch):
        if len(seen) == dies_at and me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch).square().mean()

    step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.01), accumulate=accumulate)
    seen, epochs = [], []
    with ab.Executor({"train": step}, dataloaders=None if way == "given" else {"train": batches}) as executor:
        while len(seen) < 10:
            run = executor.run("train", batches[len(seen) % 4] if way == "given" else None)
            seen.append(run["loss"].item())
            epochs.append(executor.epoch)
        dropped, weight = executor.statistics().dropped_rows, model.weight.tolist()[0]
        executor.run("train", lambda job: batches[0])
        assert executor.statistics().dropped_rows == dropped, "those that are left share it out"
    print(json.dumps([weight, seen, dropped, epochs]))
"""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("way", "dies_at"),
    [
        ("given", 6),
        ("loader", 8),
        ("a longer loader", 3),
        *(pytest.param(way, at, marks=pytest.mark.slow) for way in ("given", "loader") for at in (3, 4)),
    ],
)
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_worker_with_rows_of_its_own_takes_them_with_it(ended: Ends, way: str, accumulate: int, dies_at: int) -> None:
    texts = ended(OWN_ROWS, way, accumulate, dies_at, min_workers=2).texts
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, count = list[float](), 0
    for number in range(10):
        everyone = [torch.full((2 + one, 4), 1.0 + one + number % 4 / 8, dtype=torch.float64) for one in range(3)]
        rows = everyone if number < dies_at - dies_at % accumulate else [everyone[0], everyone[2]]  # from its window on
        model(torch.cat(rows)).square().sum().backward()
        count += sum(map(len, rows))
        losses.append(model(torch.cat(everyone if number < dies_at else rows)).square().mean().item())
        if number % accumulate == accumulate - 1:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= count
            optimizer.step()
            optimizer.zero_grad()
            count = 0
    for rank in (0, 2):
        text = texts[rank]
        weight, seen, dropped, epochs = json.loads(next(line for line in text.splitlines() if line.startswith("[")))
        assert weight == pytest.approx(model.weight.tolist()[0], rel=1e-12)
        assert seen == pytest.approx(losses, rel=1e-12)
        assert dropped == 3 * (10 - dies_at), "the mean of 2 and 4 rows"
        assert epochs == [0 if way == "given" else (number + 1) // 4 for number in range(10)]
        assert ("its rows are dropped: " in text) == (rank == 0)


IN_WINDOWS = """
    import json, os, signal, sys, torch, anabranch as ab
    accumulate, longest, deaths = json.loads(sys.argv[1])
    me = int(os.environ["RANK"])  # of the start
    batches = [torch.full((2 + me, 4), 1.0 + me + number / 8, dtype=torch.float64) for number in range(4)]
    batches += batches[: longest - 4] if me == 1 else []
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()
    model.register_buffer("calls", torch.zeros(()))
    runs, calls, losses = [], [], []

    def dies_at(*moment):
        if [me, *moment] in deaths:
            os.kill(os.getpid(), signal.SIGKILL)

    def loss(model, batch):
        losses.append(batch)
        dies_at("loss", len(losses))
        model.calls += 1
        return model(batch).square().mean()

    def score(model, batch):
        dies_at("score", len(calls))
        return {"calls": model.calls}

    train = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.01), accumulate=accumulate)
    steps = {"train": train, "validate": ab.EvalStep(model, score)}
    with ab.Executor(steps, dataloaders={"train": batches}) as executor:
        for epoch in range(2):
            runs.append(0)
            while executor.epoch == epoch:
                executor.run("train")
                runs[-1] += 1
                with torch.inference_mode():
                    calls.append(executor.evaluate("validate", batches[:1])["calls"].item())
        print(json.dumps([model.weight.tolist()[0], runs, calls, executor.step]))
"""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("accumulate", "longest", "deaths"),
    [
        pytest.param(2, 4, [(1, "score", 4)], id="behind the first batch of an epoch"),
        pytest.param(3, 7, [(1, "score", 3)], id="behind the last batch of those that are left"),
        pytest.param(3, 7, [(1, "loss", 5), (3, "loss", 6)], id="and another in the window behind it"),
    ],
)
def test_a_window_of_own_batches_is_done_again_as_it_was(
    ended: Ends, accumulate: int, longest: int, deaths: list[tuple[int, str, int]]
) -> None:
    job, workers = json.dumps([accumulate, longest, deaths]), 2 + len(deaths)
    texts = ended(IN_WINDOWS, job, workers=workers, min_workers=2).texts
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()
    optimizer, window, steps = torch.optim.SGD(model.parameters(), lr=0.01), list[torch.Tensor](), 0
    for number in range(8):
        first = {1: 4 if accumulate == 2 else 3, 3: 4}  # that they miss
        ranks = [rank for rank in range(workers) if number < first.get(rank, 8)]
        window += [torch.full((2 + one, 4), 1.0 + one + number % 4 / 8, dtype=torch.float64) for one in ranks]
        if number % 4 % accumulate == accumulate - 1 or number % 4 == 3:
            optimizer.zero_grad()
            model(torch.cat(window)).square().mean().backward()
            optimizer.step()
            window, steps = [], steps + 1
    for rank in (0, 2):
        weight, *counts = json.loads(next(line for line in texts[rank].splitlines() if line.startswith("[")))
        assert counts == [[5, 3] if len(deaths) > 1 else [4, 4], list(range(1, 9)), steps]
        assert weight == pytest.approx(model.weight.tolist()[0], rel=1e-12)


OUTSIDE = """
    import os, signal, torch, anabranch as ab
    model = torch.nn.Linear(4, 1)
    step = ab.TrainStep(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.001))
    with ab.Executor(step, timeout=60.0) as executor:
        executor.run(batch=lambda job: torch.ones(12 // job.world_size, 4))
        if os.environ["ANABRANCH_MEMBER"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            ab.all_reduce(torch.ones(1))
        except ab.PeerLost as error:
            print("lost", error.peer)
        executor.run(batch=lambda job: torch.ones(12 // job.world_size, 4))
        print("now", ab.all_reduce(torch.ones(1)).item())
"""


def test_a_sum_outside_of_a_step_is_not_done_again(ended: Ends) -> None:
    texts = ended(OUTSIDE, min_workers=1, worker_restarts=RestartBudget(0)).texts[::2]
    assert all("\nlost rank 1\n" in text and text.endswith("\nnow 2.0\n") for text in texts), texts


CLOSES = """
    import os, time, torch, anabranch as ab
    from pathlib import Path
    model = torch.nn.Linear(4, 1)
    step = ab.TrainStep(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.001))
    first = os.environ["RANK"] == "0"
    with ab.Executor(step, timeout=60.0, heartbeat=0.2) as executor:
        while executor.step < (5 if first else 9):
            executor.run(batch=lambda job: torch.ones(12 // job.world_size, 4))
    size = ab.job().world_size
    Path(f"there are {size}").touch()
    while first and not Path("there are 1").exists():
        time.sleep(0.01)
    if first:
        try:
            ab.Executor(step, timeout=60.0, heartbeat=0.2)
        except ab.PeerLost as error:
            print(error)
    print("ended with", size)
"""


def test_the_others_go_on_without_one_that_has_closed_and_works_on(
    ended: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = ended(CLOSES, workers=2, patience=PATIENT).texts
    assert [text.endswith(f"ended with {size}\n") for text, size in zip(texts, (2, 1), strict=True)] == [True] * 2
    assert "sockets" not in texts[1], "a worker alone has no gradients to send"
    assert "the others have gone on without this worker, which had closed its Executor before them" in texts[0]


FAILS = """
    import os, signal, sys, time, torch, anabranch as ab
    model = torch.nn.Linear(4, 1)
    step = ab.TrainStep(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.001))
    try:
        with ab.Executor(step, timeout=60.0, heartbeat=0.2) as executor:
            while executor.step < 9:
                executor.run(batch=lambda job: torch.ones(12 // job.world_size, 4))
                if executor.step == 5 and os.environ["RANK"] == "0":
                    raise KeyError("mine")
    except KeyError:
        time.sleep(4.0)  # such as a report of it
        raise
    finally:
        print("ended at", executor.step)
"""


def test_the_others_do_not_go_on_without_one_that_has_failed_and_ends_late(ended: Ends) -> None:
    text = ended(FAILS, code=1, workers=2, patience=PATIENT).texts[1]
    assert "\nended at 5\n" in text, text
    assert "rank 0 has left" in text


EARLY = """
    import os, signal, torch, anabranch as ab
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    model = torch.nn.Linear(4, 1)
    ab.Executor(ab.TrainStep(model, lambda m, b: m(b).sum(), torch.optim.SGD(model.parameters(), lr=0.1)))
"""


def test_a_worker_that_dies_before_it_has_an_executor_is_not_waited_for(ended: Ends) -> None:
    job = ended(EARLY, code=1, min_workers=1, patience=PATIENT)
    assert not job.outcome.timed_out
    assert "PeerLost: its process has ended (peer rank 1" in job.texts[0]


TWO = """
    import os, signal, sys, torch, anabranch as ab
    from anabranch import checkpoint
    first, both = os.environ["RANK"] == "0", sys.argv[1] == "both"

    def made():
        model = torch.nn.Linear(4, 1)
        step = ab.TrainStep(model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), lr=0.001))
        return ab.Executor(step, timeout=300.0)

    def share(job):
        return torch.ones(12 // job.world_size, 4)

    if first:
        checkpoint.write = lambda *args, **options: signal.pause()  # in the background
    with made() as one, made() if both else one as other:
        one.on("save", lambda record: print("saved", record))
        one.run(batch=share)
        other.run(batch=share)
        one.save("checkpoints", wait=False)
        if first:
            os.kill(os.getpid(), signal.SIGKILL)
        one.run(batch=share)
        one.finish_saves()
        print("goes on")
"""


@pytest.mark.parametrize("executors", ["one", "both"])
def test_a_save_in_the_background_is_lost_with_its_worker_and_a_job_of_two_executors_ends(
    ended: Ends, executors: str
) -> None:
    goes_on, options = executors == "one", {"min_workers": 1, "worker_restarts": RestartBudget(0), "patience": PATIENT}
    job = ended(TWO, executors, code=int(not goes_on), **options)
    assert not job.outcome.timed_out
    text = job.texts[1]
    assert "saved" not in text
    assert ("goes on" in text.splitlines()) == goes_on
    assert ("rank 0 was lost, and may not have written the save of step 2" in text) == goes_on
    assert ("the job does not go on without it: the script has two Executors open at once" in text) == (not goes_on)


# What the launcher decides, with scripts that train nothing.

ENDS = """
    import json, os, sys, time
    from pathlib import Path
    from anabranch.liveness.membership import own_place
    folder, rank, ends = Path(sys.argv[1]), os.environ["RANK"], dict(one.split(":") for one in sys.argv[2:])
    own_place().write_progress(1, 0)  # as a job whose training goes on does
    if number := int(ends.get(rank, 0)):
        if number < 0:
            os.kill(os.getpid(), -number)
        sys.exit(number)
    while True:
        with open(os.environ["ANABRANCH_MEETING"] + ".members") as file:
            now = json.load(file)
        if now["over"] or now["number"] == len(ends):
            break
        time.sleep(0.005)
    (folder / f"seen-{rank}").touch()  # the end of any that is left makes another membership
    while not now["over"] and len(list(folder.glob("seen-*"))) < 3 - len(ends):
        time.sleep(0.005)
"""


@pytest.mark.parametrize(
    ("ends", "least", "code"),
    [
        pytest.param({1: -signal.SIGKILL}, 2, 0, marks=pytest.mark.slow),
        ({1: -signal.SIGKILL}, 3, 1),
        pytest.param({1: -signal.SIGKILL, 2: -signal.SIGKILL}, 1, 0, marks=pytest.mark.slow),
        ({1: -signal.SIGSEGV}, 1, 0),
        ({1: -signal.SIGSEGV, 2: -signal.SIGABRT}, 1, 1),
        ({1: 3}, 1, 1),
        ({1: -signal.SIGTERM}, 1, 1),
    ],
    ids=str,
)
def test_an_exit_code_ends_the_job_and_a_kill_does_not(
    ended: Ends, tmp_path: Path, ends: dict[int, int], least: int, code: int
) -> None:
    arguments = [tmp_path, *(f"{rank}:{int(end)}" for rank, end in ends.items())]
    told = ended(ENDS, *arguments, code=code, min_workers=least, worker_restarts=RestartBudget(0)).told
    crashed = any("is the second that has crashed in step 2" in line for line in told)
    assert crashed == (-signal.SIGABRT in ends.values())


def test_the_screen_shows_the_log_of_whoever_is_rank_0(
    ended: Ends, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    says = "\n    print(f'process {rank} is rank {now[\"ranks\"][rank]}')\n"
    options = {"min_workers": 1, "worker_restarts": RestartBudget(0), "live": True}
    job = ended(ENDS + says, tmp_path, f"0:{-signal.SIGKILL:d}", **options)
    assert [line.endswith("goes on with 2 workers, whose rank 0 writes to worker-2.log") for line in job.told] == [True]
    assert capfd.readouterr().out == "process 2 is rank 0\n"
    assert job.texts[1] == "process 1 is rank 1\n"
