"""What a parameter server adds: pull and push of rows through a shard, beside an echo of as many bytes and the kernels.

    python benchmarks/parameter_server.py

26 tables of 100,000 rows of 16, the distinct ids of a batch of 2,048 Zipf lookups a table (about 26,000), Adagrad, one
client and one shard in another process, over a Unix socket. The limit is the sum of two things that cannot be avoided:
an echo of as many bytes over the same transport, and the same gather, merge and update in one process. They take turns.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile

import numpy as np
import torch
from measure import keep, machine, options_of, over_batches
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.tables import Normal, RowOptimizer, Table, TableGroup, TableSpec
from anabranch.tables.arena import Arena
from anabranch.transport import Client, Request, Server, Verb

TABLES, ROWS, WIDTH, BATCH, ZIPF = 26, 100_000, 16, 2048, 1.05
RULE = RowOptimizer.from_factory(functools.partial(torch.optim.Adagrad, lr=0.01))
NAMES = [f"t{k}" for k in range(TABLES)]


def serve(directory: str, stop: multiprocessing.synchronize.Event) -> None:
    torch.set_num_threads(1)
    double = Verb("exchange", lambda call: call.reply(call.tensors[1:]))
    with (
        ParameterServer(listen=f"unix:{directory}/shard"),
        Server([double], listen=f"unix:{directory}/echo"),
    ):
        stop.wait(timeout=600)


def make_ids(count: int) -> list[list[Tensor]]:
    generator = np.random.default_rng(0)
    weights = np.cumsum(np.arange(1, ROWS + 1, dtype=np.float64) ** -ZIPF)
    weights /= weights[-1]

    def draw() -> Tensor:
        return torch.from_numpy(np.unique(np.searchsorted(weights, generator.random(BATCH)).clip(max=ROWS - 1)))

    return [[draw() for _ in range(TABLES)] for _ in range(count)]


def measure(rounds: int) -> dict[str, dict[str, float]]:
    batches = make_ids(4)
    grads = [[torch.randn(len(ids), WIDTH) for ids in batch] for batch in batches]
    specs = [TableSpec(name, ROWS, WIDTH, initial=Normal(0, 0.01)) for name in NAMES]
    arena = Arena(specs[0], RULE)
    tables = TableGroup([Table(spec, RULE, arena) for spec in specs])
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o700)
        process = context.Process(target=serve, args=(directory, stop))
        process.start()
        try:
            with ParameterClient([f"unix:{directory}/shard"], retries=100) as client, Client(retries=100) as echo:
                for name in NAMES:
                    client.init_table(TableSpec(name, ROWS, WIDTH, initial=Normal(0, 0.01)), RULE)

                def through_a_server(number: int) -> None:
                    client.pull_many(dict(zip(NAMES, batches[number], strict=True)), training=True)
                    client.push_many(dict(zip(NAMES, zip(batches[number], grads[number], strict=True), strict=True)))

                def echoed(number: int) -> None:
                    ids, rows = torch.cat(batches[number]), torch.cat(grads[number])
                    deadline = Deadline.after(10.0)
                    # Ids go, rows come; then ids and rows go, nothing comes: the sizes of a pull and of a push.
                    echo.call(Request(f"unix:{directory}/echo", "exchange", tensors=[ids, rows[:0]]), deadline)
                    echo.call(Request(f"unix:{directory}/echo", "exchange", tensors=[ids, rows]), deadline)

                def here(number: int) -> None:
                    ids, counts = torch.cat(batches[number]), [len(some) for some in batches[number]]
                    tables.pull(ids, counts, training=True)
                    tables.push(ids, torch.cat(grads[number]), counts)

                return over_batches({"server": through_a_server, "echo": echoed, "kernels": here}, rounds, 4)
        finally:
            stop.set()
            process.join(timeout=30)


def main() -> None:
    arguments = options_of(__doc__, rounds=40).parse_args()
    torch.set_num_threads(1)
    before = machine()
    found = measure(arguments.rounds)
    for name, numbers in found.items():
        print(f"{name:10} median {numbers['median']:7.2f} ms  min {numbers['min']:7.2f} ms")
    for kind in ("median", "min"):
        ratio = found["server"][kind] / (found["echo"][kind] + found["kernels"][kind])
        print(f"server / (echo + kernels), {kind}: {ratio:.2f}")
    rows = [{"side": name, "median_ms": numbers["median"], "min_ms": numbers["min"]} for name, numbers in found.items()]
    keep("parameter_server", before, rows, arguments.out, bars="median_ms", by=("side",))


if __name__ == "__main__":
    main()
