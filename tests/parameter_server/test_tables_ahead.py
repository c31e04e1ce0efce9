"""What a step asks for ahead of the next one, and rows that leave a cache for others to come."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from remote_tables_models import LARGE, ROWS, Cached

from anabranch.parameter_server import (
    Merging,
    ParameterClient,
    ParameterServer,
    Pulled,
    RemoteEmbedding,
    RemoteTables,
    Worker,
)
from anabranch.tables import Cache
from anabranch.testing import MemoryTransport

STEPS = 6


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
    network = MemoryTransport()
    with ExitStack() as stack:
        enter = stack.enter_context
        server = enter(ParameterServer(transport=network))
        sides = []
        for rank in range(2):
            client = enter(ParameterClient([server.endpoint], transport=network, worker=Worker(rank, 2)))
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
        resting = stack.enter_context(ThreadPoolExecutor(1)).submit(tables.wait_until_quiet)
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
