"""A step with servers happens on all of them and on all workers, or nowhere; also where a worker dies in its middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab
import toys
from anabranch.deadline import Deadline
from anabranch.parameter_server.messages import ReleaseMessage
from toys import in_job, job_servers, plain_step, run_in_job
from waiting import wait_until

ROWS, FATAL = 24, 3
SIZE = 3 * ROWS * 4  # numbers of the tables, which are the last
POINTS = ("half pushed", "pushed", "voted", "updated", "half told", "told")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(ROWS, 4) for _ in range(3))  # rows on both shards
        self.head = nn.Linear(4, 1)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(sum(table(ids).mean(1) for table in self.tables))[:, 0]  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["ids"]), batch["y"])


def batch_of(step: int, rank: int, world: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, ROWS, (7, 3), generator=generator)
    y = torch.randn(7, generator=generator, dtype=torch.float64)
    part = slice(7 * rank // world, 7 * (rank + 1) // world)
    return {"ids": ids[part], "y": y[part]}


def step_of(model: Model, clip: float | None = 0.5) -> ab.TrainStep:
    adam = partial(torch.optim.Adam, weight_decay=0.01)
    return toys.step_of(model, adam, loss, lr=0.05, clip_grad_norm=clip)


def numbers(state: dict[str, Tensor]) -> list[float]:
    return [number for name in sorted(state) for number in state[name].flatten().tolist()]


def plainly(steps: int, clip: float | None = 0.5) -> Any:
    model = Model()
    step = step_of(model, clip)
    for number in range(steps):
        plain_step(model, loss, step.optimizers[0], batch_of(number, 0, 1), clip)
    return pytest.approx(numbers(model.state_dict()), rel=0, abs=1e-12)


def die_at(point: str, executor: ab.Executor) -> None:
    """Let this worker die in its next step, at ``point``."""
    part = executor._remote
    assert part is not None
    client = part.client

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def nothing(*_: object) -> None: ...

    def around(owner: Any, name: str, before: Callable[..., object], after: Callable[..., object] = nothing) -> None:
        call = getattr(owner, name)

        def instead(*arguments: Any, **options: Any) -> Any:
            before(*arguments)
            result = call(*arguments, **options)
            after(*arguments)
            return result

        setattr(owner, name, instead)

    def half(requests: Sequence[Any], *_: object) -> None:
        if requests and requests[0].verb == "push":
            client._client.call(requests[0], Deadline.after(30.0))
            die()

    def tell(*_: object) -> None:
        if point == "half told":
            client._uninformed = {1}
        client.tell()
        client.steps()  # each shard takes a word before the request that follows it
        die()

    if point == "half pushed":
        around(client.calls, "outcomes", half)
    elif point in ("pushed", "voted"):
        around(part, "vote", *((die,) if point == "pushed" else (nothing, die)))
    else:
        around(part, "decide", *((die,) if point == "updated" else (nothing, tell)))


def lose_one(mode: str, point: str) -> dict[str, object]:
    """Rank 1 dies in its fourth step; the steps that rank 0 has made, and its model after it was closed."""
    model, rank, returned = Model(), ab.job().rank, 0
    executor = ab.Executor(step_of(model), mode, timeout=50.0)
    try:
        with executor:
            for number in range(FATAL + 2):
                if rank == 1 and number == FATAL:
                    die_at(point, executor)
                executor.run(batch=batch_of(number, rank, 2))
                returned += 1
    except ab.PeerLost:
        pass
    assert returned in (executor.step, executor.step - 1)  # its last run may have ended as it read the copies
    return {"done": executor.step, "model": numbers(model.state_dict())}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("mode", ["PS", "Hybrid"])
@pytest.mark.parametrize("point", POINTS)
def test_what_run_has_returned_for_is_on_all_servers_whenever_a_worker_dies(
    point: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_servers(2, monkeypatch) as servers:
        lost = run_in_job(lose_one, 2, mode, point)
        assert lost.exit_codes[1] == -9
        assert lost.results[0] is not None, lost.logs[0]
        survivor: Any = lost.results[0]["returned"]
        assert survivor["done"] == FATAL + (point in ("voted", "updated", "half told", "told"))
        assert survivor["model"] == plainly(survivor["done"])  # what it was given back, from the servers and its own
        for server in servers:
            assert server._shard._job is not None
            assert server._shard._job.applied == survivor["done"]
        assert tables_there("PS") == pytest.approx(survivor["model"][-SIZE:], rel=0, abs=1e-12)


def tables_there(mode: str) -> list[float]:
    """The numbers of the tables, of which the servers' are taken over."""
    with ab.Executor(step_of(Model()), mode, served="adopt") as executor:
        executor._remote.open()  # type: ignore[union-attr]
        return numbers(executor.state_dict())[-SIZE:]


def die_together(mode: str) -> None:
    """All have the result of the fourth step, and die when one shard has heard of it from rank 1."""
    rank = ab.job().rank
    with ab.Executor(step_of(Model()), mode, timeout=50.0) as executor:
        for number in range(FATAL + 1):
            if number == FATAL:
                die_at("updated" if rank == 0 else "half told", executor)
            executor.run(batch=batch_of(number, rank, 2))


@pytest.mark.parametrize("mode", ["PS", pytest.param("Hybrid", marks=pytest.mark.slow)])
def test_a_job_that_takes_over_what_servers_hold_applies_what_one_has_heard_of(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_servers(2, monkeypatch) as servers:
        lost = run_in_job(die_together, 2, mode)
        assert lost.exit_codes == (-9, -9)
        jobs = [server._shard._job for server in servers]
        assert [job.applied for job in jobs if job is not None] == [FATAL, FATAL]
        assert [max(job.released) for job in jobs if job is not None] == [FATAL, FATAL + 1]
        assert tables_there(mode) == pytest.approx(plainly(FATAL + 1).expected[-SIZE:], rel=0, abs=1e-12)


def refuse_one(mode: str) -> list[object]:
    """Rank 1's push of the second step is refused by one shard; all get its error, and go on."""
    model, rank = Model(), ab.job().rank
    with ab.Executor(step_of(model), mode, timeout=50.0) as executor:
        errors: list[str] = []
        for number in (0, 1, 1, 2):
            if rank == 1 and number == 1 and not errors:
                assert executor._remote is not None
                refuse_next(executor._remote.client.calls)
            try:
                executor.run(batch=batch_of(number, rank, 2))
            except ab.Overloaded as error:
                errors.append(str(error))
        return [errors, executor.step, numbers(executor.state_dict())]


def refuse_next(calls: Any) -> None:
    outcomes = calls.outcomes

    def refused(requests: Sequence[Any], *options: Any) -> Any:
        if requests and requests[0].verb == "push":
            calls.outcomes = outcomes
            return [ab.Overloaded("this shard is full"), *outcomes(requests[1:], *options)]
        return outcomes(requests, *options)

    calls.outcomes = refused


def test_a_worker_tells_each_shard_once_that_nothing_else_has_turn_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense parameters are read after the step, which tells it; shards with rows alone get a word of their own."""
    words = []
    with job_servers(2, monkeypatch) as servers:
        for server in servers:
            release = server._shard.release

            def heard(message: ReleaseMessage, client: bytes, release: Any = release) -> None:
                words.append(message.turn.done)
                release(message, client)

            monkeypatch.setattr(server._shard, "release", heard)
        with ab.Executor(toys.step_of(nn.Embedding(10, 2)), "Hybrid") as executor:
            executor.run(batch=torch.arange(4))
            executor._remote.client.steps()  # type: ignore[union-attr]
    assert words == [1, 1]


# Workers that do not wait for each other.


def stop_one(path: str, bound: int) -> dict[str, object]:
    """Rank 1 makes three steps and stops, until rank 0 was halted; then both go on to the tenth."""
    model, folder, rank = Model(), Path(path), ab.job().rank
    halted = folder / "halted"
    alone = {"done": 0, "error": ""}
    model.head.requires_grad_(False)  # all that a step reads is here from the first on
    cache = ab.Cache(capacity=ROWS, pull_bound=100, push_bound=100)
    with ab.Executor(step_of(model, None), "PS", consistency=f"ssp:{bound}", cache=cache) as executor:
        assert executor._remote is not None
        while (step := executor.step) < 10:
            # A new machine compiles its kernels in the first steps.
            executor._remote.client.calls.timeout = 400.0 if halted.exists() or step < 3 or rank == 1 else 30.0
            if step == 3:
                (folder / f"stopped-{rank}").touch()
                wait_until((halted if rank == 1 else folder / "stopped-1").exists)
            try:
                executor.run(batch=batch_of(0, rank, 2))
            except ab.DeadlineExceeded as error:
                if not halted.exists():
                    alone = {"done": step, "error": str(error)}
                    halted.touch()
    return alone


@pytest.mark.slow
def test_when_one_worker_stops_the_others_halt_after_exactly_k_steps(tmp_path: Path) -> None:
    """Although all that a step reads is cached, so that it asks the servers for nothing."""
    halted, _ = in_job(stop_one, 2, str(tmp_path), 2, servers=2, timeout=800.0)
    assert halted["done"] == 4 + 2  # rank 1 is in its fourth step
    assert "nothing arrived from worker 1" in str(halted["error"])


def close_early(path: str) -> int:
    """Rank 1 makes three steps and closes; its process stays until rank 0 has made ten."""
    rank, over = ab.job().rank, Path(path) / "over"
    options = {"consistency": "ssp:2", "timeout": 50.0, "served": "replace"}
    with ab.Executor(step_of(Model(), None), "PS", **options) as executor:  # type: ignore[arg-type]
        for step in range(3 if rank else 10):
            executor.run(batch=batch_of(step, rank, 2))
    if rank == 0:
        over.touch()
    wait_until(over.exists)
    return executor.step


def refuse_and_close(mode: str, path: str) -> list[Any]:
    return [refuse_one(mode), close_early(path)]


@pytest.mark.parametrize("mode", ["PS", pytest.param("Hybrid", marks=pytest.mark.slow)])
def test_a_push_that_one_shard_refuses_is_applied_nowhere_and_who_has_closed_is_not_waited_for(
    mode: str, tmp_path: Path
) -> None:
    """All workers are told of the push."""
    (mine, ten), (theirs, three) = in_job(refuse_and_close, 2, mode, str(tmp_path), servers=2)
    refused = "this shard is full"
    assert theirs[0] == [refused]
    assert mine == [[f"{refused}; this was the push of rank 1, and nothing was applied"], 3, plainly(3)]
    assert [ten, three] == [10, 3]


# Stopped, and resumed elsewhere.


def go_on(folder: str, mode: str, last: int, at_end: str) -> list[object]:
    """Train from the newest checkpoint to step ``last``, or until rank 1 asks for a stop, and save."""
    model, rank, world = Model(), ab.job().rank, ab.job().world_size
    with ab.Executor(step_of(model), mode, cache=ab.Cache(capacity=10)) as executor:
        executor.resume(folder)
        while executor.step < last and not executor.stopping:
            if at_end == "stop" and executor.step == 3 and rank == 1:
                executor.request_stop()
            executor.run(batch=batch_of(executor.step, rank, world))
        executor.save(folder)
        return [executor.step, numbers(executor.state_dict())]


@pytest.mark.slow
def test_a_stopped_job_resumes_with_other_workers_and_servers(tmp_path: Path) -> None:
    assert [step for step, _ in in_job(go_on, 2, str(tmp_path), "PS", 8, "stop", servers=1)] == [4, 4]
    in_job(go_on, 3, str(tmp_path), "Hybrid", 6, "save", servers=2)
    assert in_job(go_on, 1, str(tmp_path), "PS", 8, "save", servers=1) == [[8, plainly(8)]]
