"""A worker that is killed leaves the job: the others do its step again, and nothing shows.

None is replaced here; see ``test_workers_that_join.py``.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from jobs import launch, lines
from torch import nn

import anabranch as ab
from anabranch.launch import JobOutcome, RestartBudget

Script = Callable[[str], Path]
Deaths = dict[int, list[tuple[str, int]]]  # of processes: where, and in which run, counted from 0

SAMPLES, BATCH, STEPS = 44, 12, 10  # 4 batches an epoch, the last of 8 samples

TRAINING = """
import json, os, signal, sys, time
from pathlib import Path

import torch
from torch import nn
import anabranch as ab
from anabranch import checkpoint
from anabranch.collectives import buckets, shared_memory, workers
from anabranch.errors import PeerLost
from anabranch.executor.saving.saving import Saver

folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
process, joined = int(os.environ["ANABRANCH_MEMBER"]), ab.job().joined
moments = plan["joiners" if joined else "deaths"].get(str(process), [])  # [place, run]
steps, batch_size, samples = plan["steps"], plan["batch"], plan["samples"]


def run_here():
    return 0 if executor is None else executor._runners["train"].runs


def dies_at(place):
    if joined and os.environ["TORCHELASTIC_RESTART_COUNT"] != "1":  # in place of one that has died so
        return
    if [place, run_here()] in moments:
        os.kill(os.getpid(), signal.SIGSTOP if plan["freezes"] else signal.SIGKILL)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return samples

    def __getitem__(self, index):
        return {"id": index, "x": torch.sin(torch.arange(6, dtype=torch.float64) * (index + 1)), "y": index % 7 / 7.0}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.layers(x)


def write(name, **facts):
    with (folder / f"{name}-{process}").open("a") as file:
        file.write(json.dumps(facts) + "\\n")


def loss(model, batch):
    drawn = torch.rand(())  # of which the model knows nothing
    number = executor.statistics().memberships
    write("doings", number=number, run=run_here(), ids=batch["id"].tolist())
    dies_at("forward")
    output = model(batch["x"])
    output.register_hook(lambda gradient: dies_at("backward"))
    if plan["reduces"]:
        output = output + 0.0 * ab.all_reduce(output.sum())
        assert len(ab.collectives.differentiable._sums) < 2, "the memory of former members is freed"
    return (output[:, 0] - batch["y"]).square().mean()


if plan["gloo"]:
    buckets.shared_sums = lambda workers, forms: [None] * len(forms)

start, finish = workers.Workers.start_all_reduce, workers.Pending.finish
begin = shared_memory.SharedSum.start


def started(before):
    def starts(self, *args, **options):
        dies_at("before the sum")
        pending = before(self, *args, **options)
        dies_at("in the sum")
        return pending

    return starts


seen = []


def finished(self):
    run, operation, number = plan["misses"].get(str(process), [None, None, None])
    if run_here() == run and operation in self._operation:
        seen.append(self)
    if run_here() == run and len(seen) == number:
        until = time.monotonic() + 60
        while not self._done(0.01):  # the sum is there, but this worker does not look at it
            assert time.monotonic() < until
        while not self._workers.lost():
            assert time.monotonic() < until
            time.sleep(0.001)
        plan["misses"].clear()
        raise PeerLost("it was killed", peer="rank 0", operation=operation)
    finish(self)


executor = None
workers.Workers.start_all_reduce, shared_memory.SharedSum.start = started(start), started(begin)
workers.Pending.finish = finished


def met(self, *, awaited):
    dies_at("before a meeting")
    goes_on = meet_again(self, awaited=awaited)
    dies_at("behind a meeting")
    return goes_on


def sent(self, more):
    dies_at("before it sends the state")
    return dense_state(self, more)


def taken(self, state):
    dies_at("before it takes the state")
    more = take_dense_state(self, state)
    dies_at("behind the state")
    return more


meet_again, workers.Workers.meet_again = workers.Workers.meet_again, met
dense_state, Saver.dense_state = Saver.dense_state, sent
take_dense_state, Saver.take_dense_state = Saver.take_dense_state, taken
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
step = ab.TrainStep(model, loss, optimizer, scheduler=scheduler, accumulate=plan["accumulate"], clip_grad_norm=1.0)
data = Data()
loader = ab.loaders.GlobalBatches(data, batch_size, seed=3)


class Shares:  # a loader of another kind, which shares the samples out at each pass
    def __iter__(self):
        job = ab.job()
        yield torch.utils.data.default_collate([data[index] for index in range(job.rank, samples, job.world_size)])


def score(model, batch):
    dies_at("in an evaluation")
    return {"loss": (model.layers(batch["x"])[:, 0] - batch["y"]).square().mean()}


write_files = checkpoint.write


def saved(*args, **options):
    dies_at("in a save")
    return write_files(*args, **options)


def read_part(self):
    dies_at("before a save")
    return part_of(self)


def gathered_at_first(self, mine):
    states = gather(self, mine)
    dies_at("as the states are there")
    return states


checkpoint.write = saved
part_of, Saver._part = Saver._part, read_part
gather, Saver._gather_at_first = Saver._gather_at_first, gathered_at_first
ordered = ab.loaders.GlobalBatches(data, batch_size, shuffle=False)
both = {"train": step, "validate": ab.EvalStep(model, score)}
loaders = {"train": loader, "validate": ordered}
with ab.Executor(both, dataloaders=loaders, seed=5, heartbeat=0.5, timeout=60.0) as made:
    executor = made
    executor.on("membership", lambda record: write("memberships", left=record.left, rank=record.rank,
        joined=record.joined, size=record.world_size, job=[ab.job().rank, ab.job().world_size]))
    dies_at("before it joins")

    def share(job):
        number = (run_here() * batch_size) % (samples - batch_size)
        chosen = range(number + job.rank, number + batch_size, job.world_size)
        return torch.utils.data.default_collate([data[index] for index in chosen])

    stop = folder / "stop"
    while executor.step < steps and not executor.stopping:
        if steps > 1000 and stop.exists():
            executor.request_stop()
        if 0 <= plan["waits"] <= run_here():  # for newcomers, whom nobody needs
            until = time.monotonic() + 60
            place, runner = executor._redo._place, executor._runners["train"]
            while not runner.newcomers_seen and not place.newcomers_wait() and ab.job().world_size < plan["workers"]:
                assert time.monotonic() < until
                time.sleep(0.001)
        result = executor.run("train", share if plan["function"] else None)
        run = run_here() - 1
        write("losses", run=run, loss=result["loss"].item(), number=executor.statistics().memberships)
        dies_at("between")
        if plan["evaluates"]:
            other = Shares() if plan["background"] else None
            write("scores", run=run, loss=executor.evaluate("validate", other)["loss"].item())
            dies_at("behind an evaluation")
            if executor.step and not executor._runners["train"].in_window:
                executor.save(folder / "saved", wait=not plan["background"])
                dies_at("behind a save")
    statistics = executor.statistics()
    write("end", parameters=[p.tolist() for p in model.parameters()], pid=os.getpid(), calls=model.calls.item(),
        memberships=statistics.memberships, repeated=statistics.repeated_steps, rank=ab.job().rank,
        size=ab.job().world_size, drawn=torch.rand(()).item(), epoch=executor.epoch, joined=joined,
        steps=executor.step, restarts=os.environ["TORCHELASTIC_RESTART_COUNT"])
"""


class Undisturbed(nn.Module):
    """The plain loop on whole batches."""

    def __init__(self, *, function: bool, accumulate: int, steps: int = STEPS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        loader = ab.loaders.GlobalBatches(range(SAMPLES), BATCH, seed=3)
        epochs = [
            [int(one) for one in loader.order(epoch)[first : first + BATCH]]
            for epoch in range(steps * accumulate * BATCH // SAMPLES + 2)
            for first in range(0, SAMPLES, BATCH)
        ]
        offsets = [(run * BATCH) % (SAMPLES - BATCH) for run in range(steps * accumulate)]
        self.batches = [list(range(one, one + BATCH)) for one in offsets] if function else epochs
        self.losses: list[float] = []
        self.scores: list[float] = []
        everything = torch.arange(SAMPLES, dtype=torch.float64)
        inputs = torch.sin(torch.arange(6, dtype=torch.float64) * (everything[:, None] + 1))
        for step in range(steps):
            runs = self.batches[step * accumulate : (step + 1) * accumulate]
            optimizer.zero_grad()
            for ids in runs:
                x = torch.stack([torch.sin(torch.arange(6, dtype=torch.float64) * (one + 1)) for one in ids])
                y = torch.tensor([one % 7 / 7.0 for one in ids], dtype=torch.float64)
                errors = (self.layers(x)[:, 0] - y).square()
                self.losses.append(errors.mean().item())
                (errors.sum() / sum(map(len, runs))).backward()
                with torch.no_grad():
                    self.scores.append((self.layers(inputs)[:, 0] - everything % 7 / 7.0).square().mean().item())
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                self.scores[-1] = (self.layers(inputs)[:, 0] - everything % 7 / 7.0).square().mean().item()


def drawn_after(count: int, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    return float(torch.rand(count + 1, generator=generator)[-1])


def train(
    script: Script,
    folder: Path,
    deaths: Deaths,
    *,
    workers: int = 3,
    misses: dict[int, tuple[int, str, int]] | None = None,
    gloo: bool = False,
    function: bool = False,
    accumulate: int = 1,
    least: int | None = 1,
    freezes: bool = False,
    evaluates: bool = False,
    background: bool = False,
    reduces: bool = False,
    joiners: Deaths | None = None,
    restarts: int = 0,
    waits: int = -1,
    left: int | None = None,
    steps: int = STEPS,
) -> tuple[JobOutcome, list[str]]:
    """Train, and check that all have what the undisturbed run has; return the end and what was told.

    ``left``: so many are there at the end; by default those that do not die. ``joiners``: deaths of replacements.
    """
    plan = {"deaths": deaths, "misses": misses or {}, "gloo": gloo, "function": function, "accumulate": accumulate}
    plan |= {"freezes": freezes, "evaluates": evaluates, "joiners": joiners or {}, "waits": waits, "workers": workers}
    plan |= {"background": background, "steps": steps, "batch": BATCH, "samples": SAMPLES, "reduces": reduces}
    records = folder / "records"
    records.mkdir()
    told: list[str] = []
    logs = folder / "logs"
    logs.mkdir()
    outcome = launch(
        script(TRAINING), [str(records), json.dumps(plan)], workers=workers, min_workers=least, log_dir=logs,
        worker_restarts=RestartBudget(restarts), tell=told.append, seconds=300.0,
    )  # fmt: skip
    assert outcome.exit_code == 0, "\n".join([*told, *(log.read_text() for log in sorted(logs.glob("*.log")))])
    ends = lines(records, "end")
    steps = ends[0]["steps"]
    expected = Undisturbed(function=function, accumulate=accumulate, steps=steps)
    left = workers - len(deaths) if left is None else left
    assert len(ends) == left
    assert sorted(end["rank"] for end in ends) == list(range(left))
    assert {end["size"] for end in ends} == {left}
    assert {end["restarts"] for end in ends if not end["joined"]} <= {"0"}
    assert {end["pid"] for end in ends} <= {one.pid for one in outcome.exits}
    for end in ends:
        for here, there in zip(end["parameters"], expected.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(here, dtype=torch.float64), there.detach(), rtol=0.0, atol=1e-12)
        assert end["calls"] == steps * accumulate  # buffers and generators went back with the step
        seeds = [] if end["joined"] else [5 + process for process in range(workers)]
        assert not seeds or end["drawn"] in [drawn_after(steps * accumulate, seed) for seed in seeds]
    # In the last doing of each run every sample counts once.
    doings: dict[int, dict[int, list[int]]] = {}
    for one in lines(records, "doings"):
        doings.setdefault(one["run"], {}).setdefault(one["number"], []).extend(one["ids"])
    for run in range(steps * accumulate):
        last = max(doings[run])
        assert sorted(doings[run][last]) == sorted(expected.batches[run]), run
    for one in lines(records, "losses"):
        assert one["loss"] == pytest.approx(expected.losses[one["run"]], abs=1e-12)
    for one in lines(records, "scores"):
        assert one["loss"] == pytest.approx(expected.scores[one["run"]], abs=1e-12)
    if evaluates:
        assert ab.checkpoint.read(records / "saved").state["ranks"][0]["counts"]["train"]["steps"] == steps
    for one in lines(records, "memberships"):
        assert one["job"] == [one["rank"], one["size"]]
    return outcome, told


def test_the_others_do_the_step_of_a_killed_rank_0_again(script: Script, tmp_path: Path) -> None:
    outcome, told = train(script, tmp_path, {0: [("in the sum", 6)]})
    assert [one.code for one in outcome.exits] == [-signal.SIGKILL, 0, 0]
    assert any("the job goes on with 2 workers, whose rank 0 writes to worker-2.log" in line for line in told)
    assert [one["left"] for one in lines(tmp_path / "records", "memberships")] == [[0], [0]]
    assert {(end["memberships"], end["repeated"]) for end in lines(tmp_path / "records", "end")} == {(2, 1)}


def test_a_worker_that_has_missed_the_last_result_takes_it_from_one_that_has_it(script: Script, tmp_path: Path) -> None:
    train(script, tmp_path, {0: [("between", 6)]}, misses={1: (5, "gradients", 1)}, gloo=True)


@pytest.mark.slow
def test_a_worker_that_has_missed_the_end_of_an_epoch_sees_it_again(script: Script, tmp_path: Path) -> None:
    """One has gone on to the first run of the next epoch, and one has not seen that all are at the end of this one."""
    train(script, tmp_path, {0: [("forward", 4)]}, misses={1: (4, "gradients", 1)}, gloo=True)


PLACES = ("forward", "backward", "before the sum", "in the sum", "between")


@pytest.mark.slow
@pytest.mark.parametrize("gloo", [False, True])
@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("place", PLACES)
def test_any_worker_may_die_anywhere(script: Script, tmp_path: Path, place: str, victim: int, gloo: bool) -> None:
    train(script, tmp_path, {victim: [(place, 4 + victim)]}, workers=4, gloo=gloo)


@pytest.mark.slow
@pytest.mark.parametrize(
    "deaths",
    [
        {0: [("forward", 5)], 2: [("forward", 5)]},
        {0: [("in the sum", 3)], 3: [("forward", 6)]},
        {1: [("backward", 4)], 3: [("before a meeting", 4)]},
        {1: [("backward", 4)], 0: [("behind a meeting", 4)]},
        {3: [("in the sum", 4)], 2: [("behind a meeting", 4)], 0: [("between", 8)]},
        {0: [("forward", 1)], 1: [("forward", 2)], 2: [("forward", 3)]},
    ],
    ids=str,
)
@pytest.mark.parametrize("gloo", [False, True])
def test_several_may_die(script: Script, tmp_path: Path, deaths: Deaths, gloo: bool) -> None:
    train(script, tmp_path, deaths, workers=4, gloo=gloo)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("run", [6, 7])
@pytest.mark.parametrize("function", [False, True])
def test_an_accumulation_window_is_done_again_from_its_first_run(
    script: Script, tmp_path: Path, place: str, run: int, function: bool
) -> None:
    train(script, tmp_path, {1: [(place, run)]}, accumulate=2, function=function)


@pytest.mark.slow
def test_batches_of_a_function_are_shared_out_anew(script: Script, tmp_path: Path) -> None:
    train(script, tmp_path, {2: [("in the sum", 4)]}, function=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "victim", "accumulate", "run"),
    [
        (place, victim, accumulate, run)
        for place in ("in an evaluation", "behind an evaluation", "in a save", "between")
        for victim in (0, 1)
        for accumulate, run in ((1, 5), (2, 5), (2, 6))
        if place != "in a save" or (victim == 0 and run % accumulate == 0)  # rank 0 writes, between two windows
    ],
)
def test_evaluations_and_saves_begin_again(
    script: Script, tmp_path: Path, place: str, victim: int, accumulate: int, run: int
) -> None:
    train(script, tmp_path, {victim: [(place, run)]}, evaluates=True, accumulate=accumulate)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("place", ["in an evaluation", "before a save", "as the states are there", "between"])
def test_saves_in_the_background_and_evaluations_of_any_loader_begin_again(
    script: Script, tmp_path: Path, place: str, victim: int
) -> None:
    train(script, tmp_path, {victim: [(place, 5)]}, evaluates=True, background=True)


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_a_save_in_the_background_that_one_has_not_seen_begin_is_finished(
    script: Script, tmp_path: Path, late: int
) -> None:
    misses = {late: (6, "save", 10)}  # the last message of it, behind those of the end of the one before
    train(script, tmp_path, {2: [("behind a save", 6)]}, evaluates=True, background=True, misses=misses)


@pytest.mark.slow
def test_an_evaluation_s_result_is_taken_from_a_worker_that_has_it(script: Script, tmp_path: Path) -> None:
    misses = {1: (6, "evaluate", 4)}  # the last message of it
    train(script, tmp_path, {0: [("behind an evaluation", 6)]}, evaluates=True, misses=misses)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("place", ["forward", "in the sum", "between"])
def test_a_frozen_worker_is_killed_and_leaves(script: Script, tmp_path: Path, place: str, victim: int) -> None:
    outcome, told = train(script, tmp_path, {victim: [(place, 5)]}, freezes=True)
    assert outcome.exits[victim].code == -signal.SIGKILL
    assert any("is frozen; killing it" in line for line in told)


GIVEN = """
    import os, signal, torch, anabranch as ab
    model = torch.nn.Linear(4, 1)
    step = ab.TrainStep(model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), lr=0.001))
    with ab.Executor(step) as executor:
        for number in range(10**9):
            executor.run(batch=torch.full((8, 4), 1.0 + ab.job().rank))
            if number == 2 and ab.job().rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_job_that_cannot_go_on_ends_and_says_why(script: Script, tmp_path: Path) -> None:
    outcome = launch(script(GIVEN), workers=3, min_workers=1, log_dir=tmp_path)
    assert outcome.exit_code == 1
    failure = outcome.first_failure
    assert failure is not None
    assert (failure.rank, failure.code) == (1, -signal.SIGKILL), "it, and not those that have lost it"
    text = (tmp_path / "worker-0.log").read_text()
    assert "PeerLost: rank 1 is lost" in text
    assert "the job does not go on without it: run('default', ...) was given a batch" in text


EARLY = """
    import os, signal, torch, anabranch as ab
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    model = torch.nn.Linear(4, 1)
    ab.Executor(ab.TrainStep(model, lambda m, b: m(b).sum(), torch.optim.SGD(model.parameters(), lr=0.1)))
"""


def test_a_worker_that_dies_before_it_has_an_executor_is_not_waited_for(script: Script, tmp_path: Path) -> None:
    outcome = launch(script(EARLY), workers=3, min_workers=1, log_dir=tmp_path, seconds=120.0)
    assert not outcome.timed_out
    assert outcome.exit_code == 1
    assert "PeerLost: its process has ended (peer rank 1" in (tmp_path / "worker-0.log").read_text()


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
    script: Script, tmp_path: Path, executors: str
) -> None:
    options = {"min_workers": 1, "worker_restarts": RestartBudget(0)}
    outcome = launch(script(TWO), [executors], workers=3, log_dir=tmp_path, seconds=120.0, **options)
    assert not outcome.timed_out
    text = (tmp_path / "worker-1.log").read_text()
    assert "saved" not in text
    goes_on = executors == "one"
    assert outcome.exit_code == int(not goes_on)
    assert ("goes on" in text.splitlines()) == goes_on
    assert ("rank 0 was lost, and may not have written the save of step 2" in text) == goes_on
    assert ("the job does not go on without it: the script has two Executors open at once" in text) == (not goes_on)


# What the launcher decides, with scripts that train nothing.

ENDS = """
    import json, os, sys, time
    from pathlib import Path
    from anabranch.liveness.membership import own_place
    rank, ends = os.environ["RANK"], dict(one.split(":") for one in sys.argv[1:])
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
"""


@pytest.mark.parametrize(
    ("ends", "least", "code"),
    [
        ({1: -signal.SIGKILL}, 2, 0),
        ({1: -signal.SIGKILL}, 3, 1),
        ({1: -signal.SIGKILL, 2: -signal.SIGKILL}, 1, 0),
        ({1: -signal.SIGSEGV}, 1, 0),
        ({1: -signal.SIGSEGV, 2: -signal.SIGABRT}, 1, 1),
        ({1: 3}, 1, 1),
        ({1: -signal.SIGTERM}, 1, 1),
    ],
    ids=str,
)
def test_an_exit_code_ends_the_job_and_a_kill_does_not(
    script: Script, tmp_path: Path, ends: dict[int, int], least: int, code: int
) -> None:
    arguments = [f"{rank}:{int(end)}" for rank, end in ends.items()]
    options = {"min_workers": least, "worker_restarts": RestartBudget(0)}
    told: list[str] = []
    outcome = launch(script(ENDS), arguments, workers=3, log_dir=tmp_path, tell=told.append, **options)
    assert outcome.exit_code == code
    assert any("is the second that has crashed in step 2" in line for line in told) == (
        -signal.SIGABRT in ends.values()
    )
