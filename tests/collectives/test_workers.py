"""The workers of a job as a group: met, met again, and asked for what each of them has."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.collectives import Workers
from anabranch.collectives.workers import SAID_AFTER, _Comparison
from anabranch.testing import LocalJob

AGAIN = """
import json, torch
import anabranch as ab
from anabranch.collectives import Workers

found = []
for _ in range(3):
    with Workers() as workers:
        total = workers.all_reduce(torch.tensor([float(workers.rank)])).item()
        texts = workers.all_gather_bytes(b"x" * workers.rank)
        tensors = [torch.full((2,), float(workers.rank)), torch.full((), workers.rank)]
        workers.broadcast(tensors)
        found.append([total, [len(text) for text in texts], [tensor.sum().item() for tensor in tensors]])
    assert not torch.distributed.is_initialized()
print(json.dumps({"found": found, "bytes": workers.bytes_sent}))
"""


def test_workers_may_meet_again_after_they_have_parted() -> None:
    for found in LocalJob(3).run_source(AGAIN).check().results:
        assert found["found"] == [[3.0, [0, 1, 2], [0.0, 0]]] * 3
        assert found["bytes"] > 0


APART = """
import json, time, torch
import torch.distributed as dist
import anabranch as ab
from anabranch.collectives import Workers

dist.init_process_group("gloo")
store, rank, found = dist.distributed_c10d._get_default_store(), dist.get_rank(), []
for group in (None, dist.new_group([0, 1])):
    if rank == 0:  # the other one's construction has failed before it came here
        try:
            Workers(group, timeout=0.3)
        except ab.DeadlineExceeded:
            found.append("late")
        store.set(f"late {len(found)}", "yes")
    else:
        found.append("late")
        store.wait([f"late {len(found)}"])
    began = time.monotonic()
    with Workers(group, timeout=20) as workers:
        found.append(workers.all_reduce(torch.ones(1)).item())
        found.append(time.monotonic() - began < 15)
print(json.dumps({"found": found}))
"""


def test_workers_meet_after_the_construction_of_one_of_them_has_failed() -> None:
    for found in LocalJob(2).run_source(APART).check().results:
        assert found == {"found": ["late", 2.0, True] * 2}


PARTED = """
import json, torch
import torch.distributed as dist
import anabranch as ab
from anabranch.collectives import Workers

ab.collectives.workers.SAID_AFTER = 0.0
dist.init_process_group("gloo")
store, rank, messages = dist.distributed_c10d._get_default_store(), dist.get_rank(), []
for turn in range(2):
    workers = Workers(dist.new_group([0, 1]), heartbeat=0.1)
    calls = [
        lambda: workers.all_gather_bytes(b"results", operation="evaluation"),
        lambda: workers.all_gather_bytes(b"", operation="save")
        if turn
        else workers.all_reduce(torch.ones(3), operation="all_reduce of gradients"),
    ]
    try:
        calls[rank]()
    except ab.BoundaryError as error:
        messages.append(str(error))
    store.set(f"{turn} {rank}", "over")
    store.wait([f"{turn} {other}" for other in (0, 1)])
print(json.dumps({"messages": messages}))
"""


def test_a_worker_that_makes_a_call_alone_and_the_others_are_told_of_each_other() -> None:
    calls = ["evaluation", "all_reduce of gradients"]
    for rank, result in enumerate(LocalJob(2).run_source(PARTED).results):
        assert result is not None
        [waits, elsewhere] = result["messages"]
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


ALONE = """
import json, torch
from anabranch.record import spans
from anabranch.collectives import Workers

torch.distributed.init_process_group("gloo")
recorder = spans.SpanRecorder()
with spans.heard(recorder.add), Workers() as workers:
    workers.all_reduce(torch.ones(2))
    workers.gather_bytes(b"x")
print(json.dumps({"spans": [name for name, *_ in recorder.take()]}))
"""


def test_a_collective_of_a_single_worker_sends_nothing_and_does_not_wait() -> None:
    assert LocalJob(1).run_source(ALONE).check().results == ({"spans": []},)


def test_workers_without_a_job_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK"):
        Workers()
