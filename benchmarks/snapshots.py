"""The longest wait of a push while its shard writes a checkpoint, beside a process that writes as many bytes.

    python benchmarks/snapshots.py --bytes 4e9 --directory /dev/shm

One table of rows of 16 under Adagrad fills as many bytes of a shard in a process of its own; a client pushes 4,096
random ids after one another. Meanwhile, in turns, the shard writes a checkpoint, another process writes as many bytes
in as many files (on a disk, a push may wait for that alone), or nothing is written.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from measure import keep, machine, options_of

from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.tables import Normal, RowOptimizer, TableSpec

WIDTH, BATCH, ROW, FILE = 16, 4096, 144, 8 << 20
RULE = RowOptimizer.from_factory(functools.partial(torch.optim.Adagrad, lr=0.01))


def memory(word: str) -> int:
    """Bytes of this process, as the system counts them under ``word``."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(word))
    return int(line.split()[1]) << 10


def serve(endpoint: str, directory: str, calls: Connection) -> None:
    torch.set_num_threads(1)
    # No checkpoint but those that are asked for.
    with ParameterServer(
        listen=endpoint, durability="checkpoint", checkpoint_dir=directory, checkpoint_seconds=1e6
    ) as server:
        calls.send(0)
        while calls.recv():
            before = memory("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # from now on VmHWM is the most
            server.checkpoint()
            calls.send(memory("VmHWM") - before)


def write(directory: str, calls: Connection) -> None:
    calls.send(0)
    some = os.urandom(1 << 20)
    while count := calls.recv():
        paths = [Path(directory, f"other-{k}") for k in range(-(-count // FILE))]
        for path in paths:
            with path.open("xb", buffering=0) as file:
                for _ in range(FILE >> 20):
                    file.write(some)
                os.fsync(file.fileno())
        for path in paths:
            path.unlink()
        calls.send(0)


def measure(size: int, rounds: int, place: str | None) -> list[dict[str, object]]:
    context, rows = multiprocessing.get_context("spawn"), size // ROW
    with tempfile.TemporaryDirectory(dir=place) as directory, tempfile.TemporaryDirectory() as sockets:
        endpoint = f"unix:{sockets}/shard"
        (shard, for_shard), (writer, for_writer) = context.Pipe(), context.Pipe()
        processes = [
            context.Process(target=serve, args=(endpoint, directory, for_shard)),
            context.Process(target=write, args=(directory, for_writer)),
        ]
        for process in processes:
            process.start()
        try:
            with ParameterClient([endpoint], retries=100) as client:
                shard.recv()
                writer.recv()
                client.init_table(TableSpec("t", rows, WIDTH, initial=Normal(0, 0.01)), RULE)
                for first in range(0, rows, 1 << 18):
                    ids = torch.arange(first, min(first + (1 << 18), rows))
                    client.sparse_push("t", ids, torch.ones(len(ids), WIDTH))
                return in_turns(client, shard, writer, rows, rounds)
        finally:
            for calls in (shard, writer):
                calls.send(0)
            for process in processes:
                process.join(timeout=600)


def in_turns(
    client: ParameterClient, shard: Connection, writer: Connection, rows: int, rounds: int
) -> list[dict[str, object]]:
    draw, grads = torch.Generator().manual_seed(0), torch.randn(BATCH, WIDTH)

    def pushes(done: Callable[[], bool]) -> list[float]:
        times = []
        while not done() or len(times) < 10:
            ids = torch.randint(rows, (BATCH,), generator=draw)
            begun = time.perf_counter()
            client.sparse_push("t", ids, grads)
            times.append(time.perf_counter() - begun)
        return times

    longest: dict[str, list[float]] = {"checkpoint": [], "another writer": [], "alone": []}
    rate: dict[str, list[float]] = {side: [] for side in longest}
    most = 0
    for number in range(rounds + 1):
        seconds = 0.0
        for side, calls in (("checkpoint", shard), ("another writer", writer), ("alone", None)):
            begun = time.perf_counter()
            if calls is not None:
                calls.send(rows * ROW)
                times = pushes(calls.poll)
                most = max(most, calls.recv()) if side == "checkpoint" else calls.recv() or most
                seconds = max(seconds, time.perf_counter() - begun)
            else:
                times = pushes(lambda: time.perf_counter() - begun > seconds)  # noqa: B023 - called at once
            if number:  # the first round warms up
                longest[side].append(max(times) * 1e3)
                rate[side].append(len(times) / sum(times))
    alone = statistics.median(rate["alone"])
    return [
        {
            "side": side,
            "longest_push_ms": statistics.median(longest[side]),
            "longest_of_all_ms": max(longest[side]),
            "pushes_of_those_alone": statistics.median(rate[side]) / alone,
            "memory_mb": most / 1e6 if side == "checkpoint" else 0.0,
        }
        for side in longest
    ]


def main() -> None:
    parser = options_of(__doc__, rounds=5)
    parser.add_argument("--bytes", type=float, default=4e9, help="of the shard's rows")
    parser.add_argument("--directory", default=None, help="where the checkpoints are written; /dev/shm is no disk")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = machine()
    rows = measure(int(arguments.bytes), arguments.rounds, arguments.directory)
    for row in rows:
        print(
            "  ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{value:15}" for key, value in row.items())
        )
    keep("snapshots", before, rows, arguments.out, bars="longest_push_ms", by=("side",))


if __name__ == "__main__":
    main()
