"""Run by the workers of an elastic job, which die where the plan says, and note what they do.

Its arguments are a folder for the notes and the plan; see ``elastic.py``, which starts it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from elastic import BATCH, SAMPLES, Model, sample
from torch import Tensor, nn

import anabranch as ab
from anabranch import checkpoint
from anabranch.collectives import buckets, differentiable, shared_memory, workers
from anabranch.deadline import Deadline
from anabranch.errors import PeerLost
from anabranch.executor.saving.saving import Saver
from anabranch.liveness.peers import Identity, Peers

FOLDER, PLAN = Path(sys.argv[1]), json.loads(sys.argv[2])
PROCESS, JOINED = int(os.environ["ANABRANCH_MEMBER"]), ab.job().joined
if PLAN["hosts"]:  # each process believes to be on one of two
    identity = replace(Identity.of_this_process(), host=f"host-{PROCESS % 2}")
    Identity.of_this_process = classmethod(lambda cls: identity)  # type: ignore[method-assign, assignment]
MOMENTS = PLAN["joiners" if JOINED else "deaths"].get(str(PROCESS), [])  # [place, run]
STEPS, SERVED = PLAN["steps"], PLAN["mode"] is not None
EXECUTORS: list[ab.Executor] = []
IN_LOSS = [-1]  # the run whose loss was computed last
MISSED: list[object] = []


def run_here() -> int:
    return EXECUTORS[0]._runners["train"].runs if EXECUTORS else 0


def die() -> None:
    if PLAN["strikes"] is not None and not JOINED:
        roles = json.loads((Path(PLAN["logs"]) / "job.json").read_text())["roles"]
        server = next(one["pid"] for one in roles if one["role"] == "parameters")
        os.kill(server, signal.Signals[PLAN["strikes"]])
    os.kill(os.getpid(), signal.SIGSTOP if PLAN["freezes"] else signal.SIGKILL)


def dies_at(place: str, run: int | None = None) -> None:
    if JOINED and os.environ["TORCHELASTIC_RESTART_COUNT"] != "1":  # in place of one that has died so
        return
    if [place, run_here() if run is None else run] in MOMENTS:
        die()


def write(name: str, **facts: object) -> None:
    with (FOLDER / f"{name}-{PROCESS}").open("a") as file:
        file.write(json.dumps(facts) + "\n")


def around(
    owner: Any, name: str, before: Callable[..., object] | None = None, after: Callable[..., object] | None = None
) -> None:
    """Call these with the arguments of a method before and after it."""
    call = getattr(owner, name)

    def instead(*arguments: Any, **options: Any) -> Any:
        if before is not None:
            before(*arguments)
        result = call(*arguments, **options)
        if after is not None:
            after(*arguments)
        return result

    setattr(owner, name, instead)


def loss(model: Any, batch: Any) -> Tensor:
    torch.rand(())  # of which the model knows nothing
    executor = EXECUTORS[0]
    IN_LOSS[0] = run = run_here()
    write("doings", number=executor.statistics().memberships, run=run, ids=batch["id"].tolist())
    dies_at("forward")
    model.calls = model.calls + 1
    output = model(batch["ids"])
    output.register_hook(lambda gradient: dies_at("backward"))
    if ["refused", run] in MOMENTS:
        output.register_hook(lambda gradient: gradient * float("nan"))
    if PLAN["reduces"]:
        output = output + 0.0 * ab.all_reduce(output.sum())
        assert len(differentiable._sums) < 2, "the memory of former members is freed"
    return (output - batch["y"]).square().mean()


def score(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    dies_at("in an evaluation")
    return {"loss": (model(batch["ids"]) - batch["y"]).square().mean()}


def miss(pending: Any) -> None:
    """Let this worker miss a result that is there, once another is lost."""
    run, operation, number = PLAN["misses"].get(str(PROCESS), [None, None, None])
    if run_here() == run and operation in pending._operation:
        MISSED.append(pending)
    if run_here() == run and len(MISSED) == number:
        until = time.monotonic() + 60
        while not pending._done(0.01) or not pending._workers.lost():
            assert time.monotonic() < until
            time.sleep(0.001)
        PLAN["misses"].clear()
        raise PeerLost("it was killed", peer="rank 0", operation=operation)


def die_where_workers_sum_meet_and_save() -> None:
    for owner, name in ((workers.Workers, "start_all_reduce"), (shared_memory.SharedSum, "start")):
        around(owner, name, lambda *_: dies_at("before the sum"), lambda *_: dies_at("in the sum"))
    around(workers.Pending, "finish", miss)
    meeting = [lambda *_, when=when: dies_at(f"{when} a meeting") for when in ("before", "behind")]
    around(workers.Workers, "meet_again", *meeting)
    around(Peers, "become", lambda *_: dies_at("in a meeting"))
    around(workers.Workers, "_made", lambda _, __, operation: dies_at(operation))
    around(Saver, "dense_state", lambda *_: dies_at("before it sends the state"))
    state = lambda *_: dies_at("before it takes the state"), lambda *_: dies_at("behind the state")
    around(Saver, "take_dense_state", *state)
    around(checkpoint, "write", lambda *_: dies_at("in a save"))
    around(Saver, "_part", lambda *_: dies_at("before a save"))
    around(Saver, "_gather_at_first", after=lambda *_: dies_at("as the states are there"))
    around(Saver, "_entries", *[lambda saver, *_, at=at: dies_at(f"{at} {saver._call}") for at in ("before", "behind")])
    around(Saver, "export", after=lambda *_: dies_at("at the end of export"))
    if PLAN["gloo"]:
        buckets.shared_sums = lambda workers, forms: [None] * len(forms)


def die_where_servers_are_asked(part: Any) -> None:
    client = part.client

    def half(requests: Sequence[Any], *_: object) -> None:
        if requests and requests[0].verb == "push" and ["half pushed", IN_LOSS[0]] in MOMENTS:
            client._client.call(requests[0], Deadline.after(30.0))
            die()

    def told(scale: object) -> None:
        for place, shards in (("half told", [1]), ("told", [0, 1])):
            if [place, IN_LOSS[0]] in MOMENTS:
                client.calls.post([client._word(at) for at in shards])
                client.steps()  # each shard takes a word before the request that follows it
                die()

    around(client, "pull_many", lambda *_: dies_at("pull", IN_LOSS[0]))
    around(client.calls, "outcomes", half)
    around(client, "push_many", after=lambda *_: dies_at("pushed", IN_LOSS[0]))
    around(part, "refuse", after=lambda *_: dies_at("refused", IN_LOSS[0]))
    places = [lambda *_, place=place: dies_at(place, IN_LOSS[0]) for place in ("before the vote", "voted")]
    around(part, "vote", *places)
    around(part, "decide", after=told)


def share(job: ab.Job) -> Any:
    number = (run_here() * BATCH) % (SAMPLES - BATCH)
    chosen = range(number + job.rank, number + BATCH, job.world_size)
    return torch.utils.data.default_collate([sample(index) for index in chosen])


class Shares:
    """A loader of another kind, which shares the samples out at each pass."""

    def __iter__(self) -> Iterator[Any]:
        job = ab.job()
        yield torch.utils.data.default_collate([sample(index) for index in range(job.rank, SAMPLES, job.world_size)])


def wait_for_newcomers(executor: ab.Executor) -> None:
    """Wait for newcomers, whom nobody needs."""
    until = time.monotonic() + 60
    place, runner = executor._redo._place, executor._runners["train"]  # type: ignore[union-attr]
    while not runner.newcomers_seen and not place.newcomers_wait() and ab.job().world_size < PLAN["workers"]:
        assert time.monotonic() < until
        time.sleep(0.001)
    executor._redo._look_at = 0.0  # type: ignore[union-attr]  # as the next run would, 0.05 s later


def train(executor: ab.Executor) -> None:
    runner = executor._runners["train"]
    while executor.step < STEPS and not executor.stopping:
        if STEPS > 1000 and (FOLDER / "stop").exists():
            executor.request_stop()
        if 0 <= PLAN["waits"] <= run_here():
            wait_for_newcomers(executor)
        result = executor.run("train", share if PLAN["function"] else None)
        number, run = executor.statistics().memberships, run_here() - 1
        write("losses", run=run, loss=result["loss"].item(), number=number)
        dies_at("between")
        if PLAN["evaluates"]:
            other = Shares() if PLAN["background"] else None
            write("scores", run=run, loss=executor.evaluate("validate", other)["loss"].item())
            dies_at("behind an evaluation")
            if executor.step and not runner.in_window:
                executor.save(FOLDER / "saved", wait=not PLAN["background"])
                dies_at("behind a save")
        if PLAN["exports"]:
            state = executor.state_dict()
            write("states", run=run, rank=ab.job().rank, state={one: state[one].tolist() for one in state})
            executor.export(FOLDER / "exported")


def main() -> None:
    die_where_workers_sum_meet_and_save()
    model, data = Model(), [sample(index) for index in range(SAMPLES)]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    window = {"accumulate": PLAN["accumulate"], "clip_grad_norm": PLAN["clip"]}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    steps = {
        "train": ab.TrainStep(model, loss, optimizer, scheduler=scheduler, **window),
        "validate": ab.EvalStep(model, score),
    }
    loaders = {
        "train": ab.loaders.GlobalBatches(data, BATCH, seed=3),
        "validate": ab.loaders.GlobalBatches(data, BATCH, shuffle=False),
    }
    cache = ab.Cache(capacity=12) if PLAN["cache"] else None
    mode = PLAN["mode"] or "auto"
    # Others of this host are lost by what the kernel says; two beats of one elsewhere may be late on a busy machine.
    heartbeat = 10.0 if PLAN["hosts"] else 0.5
    options = {"dataloaders": loaders, "cache": cache, "seed": 5, "heartbeat": heartbeat, "timeout": 60.0}
    with ab.Executor(steps, mode, **options) as executor:
        EXECUTORS.append(executor)
        if SERVED:
            die_where_servers_are_asked(executor._remote)
        executor.on("membership", lambda record: write(
            "memberships", left=record.left, rank=record.rank, joined=record.joined, size=record.world_size,
            job=[ab.job().rank, ab.job().world_size], process=PROCESS, files=len(os.listdir("/proc/self/fd")),
            number=executor.statistics().memberships,
        ))  # fmt: skip
        dies_at("before it joins")
        train(executor)
        statistics, step = executor.statistics(), executor.step
    write(
        "end", parameters=[p.tolist() for p in model.parameters()], pid=os.getpid(), calls=model.calls.item(),
        memberships=statistics.memberships, repeated=statistics.repeated_steps, rank=ab.job().rank,
        size=ab.job().world_size, drawn=torch.rand(()).item(), joined=JOINED, steps=step,
        restarts=os.environ["TORCHELASTIC_RESTART_COUNT"],
    )  # fmt: skip


main()
