"""Waits that last are shown with whom they are for."""

from __future__ import annotations

import functools
import threading
import time

import pytest
import torch
from torch.distributed import HashStore

from anabranch.deadline import Deadline
from anabranch.liveness.group import Group
from anabranch.liveness.peers import Peers
from anabranch.observe.metrics import waiting_metric
from anabranch.parameter_server import ParameterClient, ParameterServer, Worker
from anabranch.record.spans import LONG, open_spans
from anabranch.tables import Constant, RowOptimizer, TableSpec
from anabranch.transport import Call, Client, Request, Server, Verb
from waiting import running, wait_until

SGD = functools.partial(torch.optim.SGD, lr=1.0)


def waits() -> list[dict[str, object]]:
    return [one for one in open_spans() if one["name"] == "wait"]


def group_of(ranks: list[int], heartbeat: float) -> Group:
    return Group(Peers(0, HashStore), ranks, heartbeat)


def test_a_wait_for_ranks_is_shown_once_it_is_long_and_not_after_its_end() -> None:
    seen: list[list[dict[str, object]]] = []

    def done(seconds: float) -> bool:
        seen.append(waits())
        if seen[-1]:
            return True
        time.sleep(seconds)
        return False

    before = time.monotonic()
    group_of([0, 1, 3], 60.0).wait(done, "all_reduce", Deadline.after(50.0))
    assert not seen[0]
    (wait,) = seen[-1]
    assert before <= wait.pop("since") <= time.monotonic() - LONG  # type: ignore[operator]
    assert wait == {"name": "wait", "peer": "rank 1, rank 3", "operation": "all_reduce", "limit": 50.0}
    assert waits() == []


@pytest.mark.parametrize("many", [1, 2])
def test_a_call_that_is_not_answered_is_recorded_with_its_endpoint(many: int) -> None:
    release = threading.Event()

    def answer(call: Call) -> None:
        release.wait(60)
        call.reply()

    with Server([Verb("pull", answer)]) as server, Client() as client:
        requests = [Request(server.endpoint, "pull", target="users")] * many
        outcomes: list[object] = []
        with running(lambda: outcomes.extend(client.gather(requests, Deadline.after(60.0)))):
            wait_until(waits)
            (wait,) = waits()
            assert (wait["peer"], wait["operation"]) == (server.endpoint, "pull users")
            (sample,) = waiting_metric().samples
            assert list(sample.labels.values()) == [server.endpoint, "pull users"]
            release.set()
        assert len(outcomes) == many
        assert waits() == []


def test_a_shard_names_the_worker_it_waits_for_and_the_waiting_worker_names_the_shard() -> None:
    ids, grad = torch.tensor([1]), torch.ones(1, 2)
    with (
        ParameterServer() as server,
        ParameterClient([server.endpoint], worker=Worker(0, 2)) as first,
        ParameterClient([server.endpoint], worker=Worker(1, 2)) as second,
    ):
        first.init_table(TableSpec("t", 4, 2, initial=Constant(0.0)), RowOptimizer.from_factory(SGD))
        first.push_many({"t": (ids, grad)}, step=0)
        with running(lambda: first.pull_many({"t": ids}, training=True, step=1)):
            wait_until(lambda: len(waits()) == 2)
            assert {wait["peer"] for wait in waits()} == {server.endpoint, "rank 1"}
            second.push_many({}, step=0)
        wait_until(lambda: not waits())
