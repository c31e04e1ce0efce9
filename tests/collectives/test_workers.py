"""The workers of a job as a group: met, met again, and asked for what each of them has."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anabranch.collectives import Workers
from anabranch.collectives import workers as workers_module
from anabranch.collectives.messages import ended_within
from anabranch.collectives.workers import SAID_AFTER, _Comparison
from anabranch.errors import BoundaryError
from anabranch.record import spans
from toys import in_job, run_in_job


def meeting_again() -> list[Any]:
    results: list[Any] = []
    for _ in range(3):
        with Workers() as workers:
            total = workers.all_reduce(torch.tensor([float(workers.rank)])).item()
            texts = workers.all_gather_bytes(b"x" * workers.rank)
            tensors = [torch.full((2,), float(workers.rank)), torch.full((), workers.rank)]
            workers.broadcast(tensors)
            results.append([total, [len(text) for text in texts], [tensor.sum().item() for tensor in tensors]])
        assert not dist.is_initialized()
    return [*results, workers.bytes_sent > 0]


def test_workers_may_meet_again_after_they_have_parted() -> None:
    assert in_job(meeting_again, 3) == [[[3.0, [0, 1, 2], [0.0, 0]]] * 3 + [True]] * 3


def calls_apart() -> list[str]:
    workers_module.SAID_AFTER = 0.0
    dist.init_process_group("gloo")
    store, rank, messages = dist.distributed_c10d._get_default_store(), dist.get_rank(), []
    for turn in range(2):
        workers = Workers(dist.new_group([0, 1]), heartbeat=0.1)
        with pytest.raises(BoundaryError) as caught:  # noqa: PT012
            if rank == 0:
                workers.all_gather_bytes(b"results", operation="evaluation")
            elif turn:
                workers.all_gather_bytes(b"", operation="save")
            else:
                workers.all_reduce(torch.ones(3), operation="all_reduce of gradients")
        messages.append(str(caught.value))
        store.set(f"{turn} {rank}", "over")
        store.wait([f"{turn} {other}" for other in (0, 1)])
    return messages


def test_a_worker_that_makes_a_call_alone_and_the_others_are_told_of_each_other() -> None:
    calls = ["evaluation", "all_reduce of gradients"]
    for rank, result in enumerate(run_in_job(calls_apart, 2).results):  # whose groups are broken in the end
        assert result is not None
        waits, elsewhere = result["returned"]
        assert f"rank {1 - rank} waits in {calls[1 - rank]!r} and this rank in {calls[rank]!r}" in waits
        assert f"rank {1 - rank} is in another call" in elsewhere


def test_a_store_that_never_answers_ends_no_look_at_the_other_ranks() -> None:
    asked, go = threading.Event(), threading.Event()

    class Frozen:
        def set(self, key: str, value: str) -> None:
            asked.set()
            go.wait(60.0)
            raise RuntimeError("it has ended")

    workers: Any = SimpleNamespace(store=Frozen(), ranks=[0, 1], rank=0, peers=SimpleNamespace(rank=0))
    comparison = _Comparison(workers, 1, "evaluation")
    comparison._began -= SAID_AFTER
    assert comparison() == {}
    assert asked.wait(60.0)
    assert comparison() == {}
    go.set()


def alone() -> list[str]:
    dist.init_process_group("gloo")
    recorder = spans.SpanRecorder()
    with spans.heard(recorder.add), Workers() as workers:
        workers.all_reduce(torch.ones(2))
        workers.gather_bytes(b"x")
    return [name for name, *_ in recorder.take()]


def test_a_collective_of_a_single_worker_sends_nothing_and_does_not_wait() -> None:
    assert in_job(alone, 1) == [[]]


def test_workers_without_a_job_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK"):
        Workers()


# A look at a collective that is under way: whether it has ended, and how.


class Work:
    """A collective that ends after so many waits, with this error if there is one."""

    def __init__(self, waits: int, error: str) -> None:
        self._left, self._error = waits, error

    def wait(self, timeout: timedelta) -> None:
        late, self._left = self._left > 0, max(0, self._left - 1)
        if late or self._error:
            raise RuntimeError("Timed out waiting" if late else self._error)

    def is_completed(self) -> bool:
        return self._left == 0


@pytest.mark.parametrize("error", ["", "connection reset"])
@pytest.mark.parametrize("waits", [0, 1, 2])
def test_a_look_says_whether_it_has_ended_also_just_after_its_time_or_how_it_failed(waits: int, error: str) -> None:
    with pytest.raises(RuntimeError, match=error) if error and waits < 2 else nullcontext():
        assert ended_within(Work(waits, error), 1.0) == (waits < 2)  # type: ignore[arg-type]
