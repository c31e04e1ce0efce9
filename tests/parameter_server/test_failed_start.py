"""A shard whose directory cannot be reached starts not at all, and leaves nothing open."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from anabranch.parameter_server import ParameterClient, ParameterServer, Worker
from anabranch.record.spans import Span, heard


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
