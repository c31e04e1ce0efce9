"""Waits of a worker: for a shard that does not listen yet, and for other workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded, PeerLost, SchemaError
from anabranch.parameter_server import ParameterClient, ParameterServer, Worker
from anabranch.parameter_server.client.shards import ShardCalls
from anabranch.parameter_server.messages import JoinMessage, NormMessage, ReleaseMessage, WorkerProgress
from anabranch.parameter_server.server.shard import Shard
from anabranch.record.spans import Span, heard, open_spans
from anabranch.testing import FakeClock
from anabranch.transport import Call, Client, Request, Server, Verb
from waiting import wait_until


def test_a_worker_waits_for_a_shard_that_does_not_listen_yet(tmp_path: Path) -> None:
    """The first servers on a busy new machine compile for more than a minute: their workers had given up by then."""
    endpoint = f"unix:{tmp_path / 'private' / 'shard'}"
    (tmp_path / "private").mkdir(mode=0o700)
    tried = threading.Semaphore(0)

    def note(span: Span) -> None:
        if span[0] == "transport.retry":
            tried.release()

    def join() -> int:
        with ParameterClient([endpoint], worker=Worker(0, 1, "bsp"), retries=1, timeout=60.0) as client:
            return client.shards

    with heard(note), ThreadPoolExecutor(1) as pool:
        joined = pool.submit(join)
        assert all(tried.acquire(timeout=60.0) for _ in range(4))  # more than the retries of a call
        with ParameterServer(listen=endpoint):
            assert joined.result(timeout=60.0) == 1


def test_a_long_wait_for_other_workers_looks_for_them_at_intervals_that_do_not_grow() -> None:
    looks, unanswered = 0, list[Call]()

    def watch() -> None:
        nonlocal looks
        looks += 1
        if looks == 12:  # with intervals that double, after 40 s
            raise PeerLost("its process has ended", peer="rank 1")

    with Server([Verb("pull", unanswered.append)], drain_seconds=0.01) as server, Client() as client:
        calls = ShardCalls(client, [server.endpoint], 60.0, watch, 0.01)
        with pytest.raises(PeerLost, match="its process has ended"):
            calls.all([calls.request(0, "pull")], watched=True)
        assert looks == 12
    assert len(unanswered) <= 1, "the request is not repeated for each look"


def test_a_look_that_lasts_beyond_the_deadline_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on for as long as was left before the look."""
    deadline = Deadline.after(60.0, clock := FakeClock())

    def watch() -> None:
        clock.advance(61.0)
        monkeypatch.setattr("anabranch.transport.client.select", None)

    with Server([Verb("pull", lambda call: None)], drain_seconds=0.01) as server, Client() as client:
        (outcome,) = client.gather([Request(server.endpoint, "pull")], deadline, watch=watch, every=0.0)
        monkeypatch.undo()
    assert isinstance(outcome, DeadlineExceeded)


REPLACED = (lambda shard: shard.join(JoinMessage(0, 1, "bsp", number=1), b"c" * 16), "another client has joined")
DROPPED = (
    lambda shard: shard.release(ReleaseMessage(1, WorkerProgress(0, 2, 1)), b"b" * 16),
    "not every worker's push of step 0 is held",
)


@pytest.mark.parametrize(("end", "error"), [REPLACED, DROPPED])
def test_nobody_waits_for_the_norm_of_a_job_that_is_replaced_or_a_step_that_is_dropped(
    end: Callable[[Shard], object], error: str
) -> None:
    shard, first = Shard(), b"a" * 16
    for rank in range(2):
        shard.join(JoinMessage(rank, 2, "bsp"), first if rank == 0 else b"b" * 16)
    with ThreadPoolExecutor(1) as pool:
        norm = pool.submit(shard.squared_norm, NormMessage(0, 0), Deadline(600.0), first)
        wait_until(lambda: bool(open_spans()))
        end(shard)
        with pytest.raises(SchemaError, match=error):
            norm.result(timeout=60.0)
