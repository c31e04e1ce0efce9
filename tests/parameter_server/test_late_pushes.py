"""Gradients that wait in a cache and leave while the next step runs, and rows that are asked for ahead of it."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from clusters import cluster
from remote_tables_models import LARGE, ROWS, Cached, Gate

from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded, NonFinite, PeerLost
from anabranch.parameter_server import Merging, ParameterClient, Pulled, RemoteEmbedding, RemoteTables, Worker
from anabranch.tables import Cache, RowOptimizer
from anabranch.testing import FakeClock
from waiting import join


@pytest.mark.parametrize("way", ["flushed", "due in a step without rows"])
@pytest.mark.parametrize("mean", [True, False])
def test_waiting_gradients_are_weighted_by_their_worker_s_share_like_a_step_s_push(mean: bool, way: str) -> None:
    """Flushed gradients once counted as if their worker were alone, and those due in a step without rows not at all."""
    ids, weights = torch.tensor([1]), [1.0, 3.0]
    with cluster() as servers:
        bare, models = servers.client(), []
        for client in servers.workers(2):
            table = RemoteEmbedding("t", ROWS, 2, init=0.0, optimizer=functools.partial(torch.optim.SGD, lr=1.0))
            tables = RemoteTables(client, cache=Cache(capacity=4, pull_bound=2, push_bound=2))
            tables.adopt_modules(table)
            models.append((table, tables))

        def steps(rank: int) -> None:
            table, tables = models[rank]
            tables.begin(0)
            table(ids).sum().backward()
            tables.push(Merging(weights[rank], mean))
            for step in (1, 2):
                if way != "flushed":
                    tables.begin(step)
                    tables.push(Merging(0.0 if mean else 1.0, mean))
            tables.flush()

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(steps, range(2)))
        assert torch.equal(-bare.sparse_pull("t", ids), torch.full((1, 2), 1.0 if mean else 2.0))


def test_a_push_is_on_its_way_while_the_next_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = torch.arange(ROWS)
    with ParameterClient() as client:
        both, gate = Cached(client, "sgd", push_bound=1), Gate(client, monkeypatch)
        both.step(0, everyone)
        gate.opened.set()
        both.tables.push()  # of nothing yet
        both.step(1, everyone)
        both.tables.wait_until_quiet()
        gate.opened.clear()
        both.tables.push()  # of both steps, which returns though nothing leaves
        both.step(2, everyone)
        assert both.pushed() == 0
        gate.opened.set()
        both.tables.push()
        assert both.pushed() == ROWS
        both.tables.close()
        both.assert_alike()


def test_a_row_that_is_not_here_is_read_once_its_push_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """The push leaves when the read has begun to wait for it: who does not wait reads too early, or nothing."""
    with ParameterClient() as client:
        both, gate = Cached(client, "sgd", policy="LFUOpt", capacity=1), Gate(client, monkeypatch)
        wait_for = client.calls.wait_for

        def let(*args: Any, **options: Any) -> object:
            gate.opened.set()
            return wait_for(*args, **options)

        monkeypatch.setattr(client.calls, "wait_for", let)
        for step in range(4):
            both.step(step, torch.tensor([1, 2, 3]))
            gate.opened.clear()
            both.tables.push()
        both.tables.close()


def test_a_failed_push_is_raised_at_the_next_call_that_depends_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([1, 2])
    with ParameterClient() as client:
        both, gate = Cached(client, "adagrad"), Gate(client, monkeypatch)
        gate.opened.set()
        gate.failure = DeadlineExceeded("gone", peer="shard 0", operation="push", step=0)
        both.step(0, ids)
        both.tables.push()
        for call in (both.tables.push, both.tables.flush, lambda: both.model(torch.tensor([5]))):
            with pytest.raises(DeadlineExceeded, match="gone"):
                call()
        gate.failure = None
        both.tables.drop_caches()  # as after loading a checkpoint: what was on its way no longer counts
        both.tables.begin(1)
        assert torch.equal(both.model(ids), client.pull("0.weight")[ids])
        both.tables.close()


def test_nothing_is_forgotten_before_requests_in_flight_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a push from before would move what a checkpoint has put back."""
    with ParameterClient() as client, ThreadPoolExecutor(1) as thread:
        both, gate = Cached(client, "adagrad"), Gate(client, monkeypatch)
        both.step(0, torch.tensor([1, 2]))
        both.tables.push()
        dropped = thread.submit(both.tables.drop_caches)
        assert not wait([dropped], timeout=0.2).done
        gate.opened.set()
        dropped.result(timeout=60)
        assert both.pushed() == 2
        both.tables.close()


def test_a_lost_worker_is_named_while_its_push_is_waited_for() -> None:
    """What lies beside the steps counts by the workers' shares in the last one, so it waits for all of that."""
    lost = threading.Event()

    def watch() -> None:
        if lost.is_set():
            raise PeerLost("rank 1 is lost", peer="rank 1")

    with cluster() as servers:
        missing = servers.client(worker=Worker(1, 2))
        client = servers.client(worker=Worker(0, 2), watch=watch, heartbeat=1.0)
        table = RemoteEmbedding("t", ROWS, 2, init=0.0, optimizer=functools.partial(torch.optim.SGD, lr=1.0))
        tables = RemoteTables(client, cache=Cache(**LARGE))
        tables.adopt_modules(table)
        tables.begin(0)
        table(torch.tensor([7])).sum().backward()
        tables.push(Merging(mean=False))
        lost.set()
        with pytest.raises(PeerLost, match="rank 1"):
            tables.flush()
        missing.push_many({}, step=0)  # so that the shard waits no more
        tables.abandon()


def test_a_push_that_overruns_its_deadline_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread ends with the tables: it was once waited for as long as a call may take, and then left behind."""
    clock = FakeClock()

    def pass_time() -> None:
        clock.advance(100.0)  # at the first look

    class Told(Deadline):
        def __init__(self, seconds: float, _: object = None) -> None:
            super().__init__(seconds, clock)

    with ParameterClient(watch=pass_time) as client:
        both, gate = Cached(client, "adagrad"), Gate(client, monkeypatch)
        both.step(0, torch.tensor([1]))
        both.tables.push()
        with monkeypatch.context() as patch:
            patch.setattr("anabranch.parameter_server.client.shards.Deadline", Told)
            with pytest.raises(DeadlineExceeded, match="push"):
                both.tables.flush()
            patch.setattr(ParameterClient, "timeout", 0.01)
            letting = threading.Timer(0.2, gate.opened.set)
            letting.start()
            both.tables.abandon()
        assert not [thread.name for thread in threading.enumerate() if thread.name == "anabranch-push"]
        join(letting)


def test_a_sum_too_large_is_refused_in_the_step_that_pushes_it() -> None:
    """A step later this worker would wait for the others in that step, and they for its push."""
    with ParameterClient() as client:
        both = Cached(client, "sgd", push_bound=1)
        for step in range(2):
            both.tables.begin(step)
            (both.model(torch.tensor([1])) * 0.9e18).sum().backward()
            with pytest.raises(NonFinite, match="0.weight") if step else nullcontext():
                both.tables.push()
        both.tables.abandon()


@pytest.mark.parametrize("where", ["0.weight", "bias"])
def test_a_push_with_nan_is_refused_and_takes_nothing_out_of_the_cache(where: str) -> None:
    ids, nothing = torch.tensor([1, 2]), torch.empty(0, dtype=torch.int64)
    with ParameterClient() as client:
        both = Cached(client, "sgd", push_bound=2)
        with both.tables as tables:
            rule = RowOptimizer.from_torch(both.optimizer)
            client.init_dense("bias", torch.zeros(2), rule)
            for step in range(3):
                if step == 2:
                    tables.begin(step)
                    (both.model(ids) * (math.nan if where == "0.weight" else 1.0)).sum().backward()
                    bad = torch.full((2,), math.nan if where == "bias" else 1.0)
                    with pytest.raises(NonFinite, match=where):
                        tables.push(beside={"bias": (nothing, bad, rule)})
                both.step(step, ids)
                tables.push(beside={"bias": (nothing, torch.ones(2), rule)})
        assert sum(client.statistics()[0].refused_values.values()) == 1
        both.assert_alike()


def test_closing_ends_the_threads_though_a_push_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with ParameterClient() as client:
        both, gate = Cached(client, "adagrad"), Gate(client, monkeypatch)
        gate.opened.set()
        both.step(0, torch.tensor([1]))
        both.tables.prefetch({"0.weight": torch.tensor([2])})
        gate.failure = DeadlineExceeded("gone", peer="shard 0", operation="push", step=0)
        both.tables.push()
        with pytest.raises(DeadlineExceeded, match="gone"):
            both.tables.close()
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("anabranch-p")]


def test_prefetching_needs_a_cache() -> None:
    with ParameterClient() as client, pytest.raises(ValueError, match="cache"):
        RemoteTables(client).prefetch({})


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["sgd", "adagrad", "row-wise adagrad"])
def test_prefetched_rows_are_not_requested_again(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Over several rounds of both bounds: no step waits for the servers to answer, and its rows are what they are."""
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, ROWS, (3,), generator=draw).unique() for _ in range(60)]
    reads: list[int] = []
    step = -1
    with ParameterClient() as client:
        both = Cached(client, name, pull_bound=9, push_bound=9)
        with both.tables as tables:
            pull = client.pull_many

            def noted(*args: Any, ahead: bool = False, **options: Any) -> dict[str, Pulled]:
                reads.extend([] if ahead else [step])
                return pull(*args, ahead=ahead, **options)

            monkeypatch.setattr(client, "pull_many", noted)
            for step, ids in enumerate(batches[:-1]):
                tables.begin(step)
                found = both.model(ids)
                tables.prefetch({"0.weight": batches[step + 1]})
                if name == "sgd":  # of the others a sum of gradients is not a sum of steps
                    torch.testing.assert_close(found, both.plain(ids), rtol=1e-4, atol=1e-5)
                for rows in (found, both.plain(ids)):
                    rows.sum().backward()
                tables.push()
                both.own.step()
                both.own.zero_grad()
            assert reads == [0]
        if name == "sgd":
            torch.testing.assert_close(client.pull("0.weight"), both.plain.weight, rtol=1e-4, atol=1e-5)


def test_gradients_of_a_row_wait_for_its_requested_state() -> None:
    """Else its first gradient is pushed, and the state that comes is too old to be of use."""
    ids = torch.tensor([1, 2])
    with ParameterClient() as client:
        both = Cached(client, "adagrad")
        with both.tables as tables:
            for step in range(4):
                tables.begin(step)
                found = both.model(ids)
                tables.prefetch({"0.weight": ids})
                both.go_back(found, ids)
                tables.push()
            tables.begin(4)
            assert both.pushed() == 0
        assert both.pushed() == 2


def test_prefetched_rows_are_as_of_the_requesting_step() -> None:
    """Asked before the other worker's push of the step before, it is answered after it."""
    with cluster() as servers:
        sides = []
        for rank, client in enumerate(servers.workers(2)):
            table = RemoteEmbedding("t", ROWS, 2, init=0.0, optimizer=functools.partial(torch.optim.SGD, lr=1.0))
            cache = Cache(**LARGE) if rank == 0 else None
            sides.append((table, RemoteTables(client, cache=cache)))
            sides[-1][1].adopt_modules(table)
        (table, tables), (other, others) = sides
        tables.begin(0)
        tables.push(Merging(mean=False))
        tables.begin(1)
        tables.prefetch({"t": torch.tensor([7])})
        # However long it is waited for: the other one has not pushed.
        resting = servers.enter(ThreadPoolExecutor(1)).submit(tables.wait_until_quiet)
        assert not futures.wait([resting], timeout=0.2).done
        others.begin(0)
        other(torch.tensor([7])).sum().backward()
        others.push(Merging(mean=False))
        others.begin(1)
        others.push(Merging(mean=False))
        resting.result(timeout=60)
        tables.push(Merging(mean=False))
        tables.begin(2)
        assert torch.equal(table(torch.tensor([7])), torch.full((1, 2), -1.0))
        tables.close()


@contextmanager
def _row_1_left() -> Iterator[Cached]:
    """In step 1 row 2 has been read in the place of row 1, whose gradient of step 0 waits."""
    with ParameterClient() as client:
        both = Cached(client, "sgd", capacity=1)
        with both.tables as tables:
            both.step(0, torch.tensor([1]))
            tables.push()
            tables.begin(1)
            both.model(torch.tensor([2]))
            yield both


def test_gradients_evicted_by_an_earlier_read_of_the_step_are_in_the_rows_of_a_later_read() -> None:
    with _row_1_left() as both:
        ids = torch.tensor([1])
        both.go_back(both.model(ids), ids)
        both.tables.push()
        both.tables.flush()
        both.assert_alike()


def test_rows_evicted_before_a_restore_are_not_pushed_after_it() -> None:
    with _row_1_left() as both:
        wanted = both.client.pull("0.weight")  # the step fails, so a checkpoint is loaded
        both.tables.drop_caches()
        both.tables.begin(1)
        both.tables.push()
        both.tables.flush()
        assert torch.equal(both.client.pull("0.weight"), wanted)
