"""Waits that last are recorded with whom they are for, and told in the process's status file."""

from __future__ import annotations

import functools
import json
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from anabranch import status_file, waits
from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded
from anabranch.liveness.group import Group
from anabranch.liveness.peers import Peers
from anabranch.observe.metrics import waiting_metric
from anabranch.parameter_server import ParameterClient, ParameterServer, Worker
from anabranch.tables import Constant, RowOptimizer, TableSpec
from anabranch.testing import FakeClock
from anabranch.transport import Call, Client, Request, Server, Verb
from waiting import join, wait_until

SGD = functools.partial(torch.optim.SGD, lr=1.0)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process's facts go, as under a launcher."""
    monkeypatch.setenv(status_file.STATUS_VARIABLE, str(tmp_path / "worker-0"))
    return tmp_path / "worker-0.status"


def read(path: Path) -> dict[str, object]:
    return json.loads(path.read_text())


def group_of(ranks: list[int], heartbeat: float) -> Group:
    return Group(Peers(0, HashStore), ranks, heartbeat)


def test_a_wait_for_ranks_is_recorded_once_it_is_long_and_forgotten_at_its_end(told: Path) -> None:
    seen: list[tuple[waits.Wait, ...]] = []
    files: list[object] = []

    def done(seconds: float) -> bool:
        seen.append(waits.current())
        if waits.current():
            files.append(read(told)["waits"])
            return True
        time.sleep(seconds)
        return False

    group_of([0, 1, 3], 60.0).wait(done, "all_reduce", Deadline.after(50.0))
    assert not seen[0]
    assert [(wait.peers, wait.operation) for wait in seen[-1]] == [(("rank 1", "rank 3"), "all_reduce")]
    assert seen[-1][0].seconds() >= waits.LONG
    assert files == [
        [
            {
                "peers": ["rank 1", "rank 3"],
                "operation": "all_reduce",
                "since": seen[-1][0].since,
                "limit": seen[-1][0].limit,
            }
        ]
    ]
    assert 0.0 < (seen[-1][0].limit or 0.0) <= 60.0
    assert waits.current() == ()
    assert read(told)["waits"] == []


def test_a_wait_that_fails_is_forgotten_too(told: Path) -> None:
    clock = FakeClock()

    def done(seconds: float) -> bool:
        time.sleep(seconds)
        if waits.current():  # only then is the time over
            clock.advance(60.0)
        return False

    with pytest.raises(DeadlineExceeded):
        group_of([0, 1], 1.0).wait(done, "all_reduce", Deadline.after(60.0, clock))
    assert waits.current() == ()
    assert read(told)["waits"] == []


def test_a_short_wait_writes_nothing(told: Path) -> None:
    group_of([0, 1], 1.0).wait(lambda seconds: True, "all_reduce", Deadline.after(5.0))
    assert not told.exists()


@pytest.mark.parametrize("many", [1, 2])
def test_a_call_that_is_not_answered_is_recorded_with_its_endpoint(many: int) -> None:
    release = threading.Event()

    def answer(call: Call) -> None:
        release.wait(60)
        call.reply()

    with Server([Verb("pull", answer)]) as server, Client() as client:
        requests = [Request(server.endpoint, "pull", target="users")] * many
        outcomes: list[object] = []
        asking = threading.Thread(target=lambda: outcomes.extend(client.gather(requests, Deadline.after(60.0))))
        asking.start()
        wait_until(waits.current)
        (wait,) = waits.current()
        assert (wait.peers, wait.operation) == ((server.endpoint,), "pull users")
        metric = waiting_metric()
        assert [labels for labels, _ in metric.values] == [(server.endpoint, "pull users")]
        release.set()
        join(asking)
        assert len(outcomes) == many
        assert waits.current() == ()


def test_a_shard_names_the_worker_it_waits_for_and_the_waiting_worker_names_the_shard() -> None:
    ids, grad = torch.tensor([1]), torch.ones(1, 2)
    with (
        ParameterServer() as server,
        ParameterClient([server.endpoint], worker=Worker(0, 2)) as first,
        ParameterClient([server.endpoint], worker=Worker(1, 2)) as second,
    ):
        first.init_table(TableSpec("t", 4, 2, initial=Constant(0.0)), RowOptimizer.from_factory(SGD))
        first.push_many({"t": (ids, grad)}, step=0)
        asking = threading.Thread(target=lambda: first.pull_many({"t": ids}, training=True, step=1))
        asking.start()
        wait_until(lambda: len(waits.current()) == 2)
        assert {wait.peers for wait in waits.current()} == {(server.endpoint,), ("rank 1",)}
        second.push_many({}, step=0)
        join(asking)
        wait_until(lambda: not waits.current())
