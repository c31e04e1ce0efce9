"""What caching the tables' rows on the workers saves: bytes and steps a second over a slow link.

    python benchmarks/cached_tables.py                    # all of it: some minutes
    python benchmarks/cached_tables.py --skews            # the saving against skew alone, over an unshaped link

``comm_mode="Hybrid"`` on two workers and two shards: 26 tables of 100,000 rows of 16, a batch of 2,048 lookups a table
and worker, Zipf 1.05, Adagrad, a cache of 10 % of each table's rows with both bounds 50. Each worker reaches the shards
through a relay of its own, a process that lets 200 Mbit/s pass each way and counts what passes::

    worker 0 ── relay 0 ──┬── shard 0          worker 1 ── relay 1 ──┬── shard 0
                          └── shard 1                                └── shard 1

The sides take turns in one run, a period of the bounds at a time, on servers of their own: rows not cached; cached;
cached, with batches from a ``DataLoader`` with a process of its own in place of a list; cached, with rows of 8 bits on
their way; and as ``DistributedDataParallel`` has it, every gradient dense. (``--sides`` also takes ``bfloat16``:
cached, and kept in half the bytes.) What is all-reduced does not pass a relay: the time that
its bytes would take there is added, on all sides alike.

Beside them the best static cache of the same size, computed for the same batches: it holds the rows that are used most
from the start, and knows which these are. A row costs it what it costs without a cache.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from measure import keep, machine, options_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import anabranch as ab
from anabranch.tables import Normal
from anabranch.testing import LocalJob

TABLES, WIDTH, BATCH, BOUND, WORKERS, SHARDS = 26, 16, 2048, 50, 2, 2
RULE = partial(torch.optim.Adagrad, lr=0.05)
PIECE = 1 << 14
UP, DOWN = 0, 1


# The link. ------------------------------------------------------------------------------------------------------------


class Link:
    """One direction of a link: bytes pass at a rate, all connections together; what has passed is counted."""

    def __init__(self, rate: float, count: np.ndarray) -> None:
        self._rate, self._count = rate, count
        self._free_at = 0.0
        self._lock = threading.Lock()

    def carry(self, data: bytes) -> None:
        with self._lock:
            self._count += len(data)
            if not self._rate:
                return
            self._free_at = max(time.monotonic(), self._free_at) + len(data) / self._rate
            wait = self._free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)


def relay(pairs: list[tuple[str, str]], rate: float, counts: str, stop: multiprocessing.synchronize.Event) -> None:
    """Listens at the first path of each pair and connects to the second, until ``stop``."""
    count = np.memmap(counts, np.int64, "r+", shape=(2,))
    up, down = Link(rate, count[UP : UP + 1]), Link(rate, count[DOWN : DOWN + 1])

    def pump(source: socket.socket, target: socket.socket, link: Link) -> None:
        try:
            while data := source.recv(PIECE):
                link.carry(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            for end in (source, target):
                end.close()

    def accept(listener: socket.socket, shard: str) -> None:
        while True:
            near, _ = listener.accept()
            far = socket.socket(socket.AF_UNIX)
            far.connect(shard)
            for ends, link in (((near, far), up), ((far, near), down)):
                threading.Thread(target=pump, args=(*ends, link), daemon=True).start()

    for path, shard in pairs:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        threading.Thread(target=accept, args=(listener, shard), daemon=True).start()
    stop.wait(timeout=3600)


def serve(
    path: str, shard: int, ready: multiprocessing.synchronize.Event, stop: multiprocessing.synchronize.Event
) -> None:
    torch.set_num_threads(1)
    with ab.ParameterServer(shard, SHARDS, listen=f"unix:{path}"):
        ready.set()
        stop.wait(timeout=3600)


@contextmanager
def servers(place: Path, sides: list[str], rate: float) -> Iterator[None]:
    """Two shards a side; a relay a side and worker, whose sockets are ``<side>.<worker>.<shard>``."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    processes = []
    for side in sides:
        shards = [str(place / f"{side}.shard{shard}") for shard in range(SHARDS)]
        for shard, path in enumerate(shards):
            ready = context.Event()
            processes.append(context.Process(target=serve, args=(path, shard, ready, stop)))
            processes[-1].start()
            if not ready.wait(timeout=60):
                raise TimeoutError(f"shard {shard} of {side} did not start within 60 s")
        for worker in range(WORKERS):
            counts = place / f"{side}.{worker}.counts"
            counts.write_bytes(bytes(16))
            pairs = [(str(place / f"{side}.{worker}.{shard}"), path) for shard, path in enumerate(shards)]
            processes.append(context.Process(target=relay, args=(pairs, rate, str(counts), stop)))
            processes[-1].start()
    try:
        yield
    finally:
        stop.set()
        for process in processes:
            process.join(timeout=30)
            process.kill()


# The work. ------------------------------------------------------------------------------------------------------------


def make_batches(count: int, rows: int, zipf: float, seed: int) -> list[dict[str, Tensor]]:
    """Ids (B, TABLES), the most frequent first, and labels that depend on them."""
    draw = np.random.default_rng(seed)
    chances = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -zipf)
    effect = np.random.default_rng(1).normal(0, 0.5, (TABLES, rows))
    batches = []
    for _ in range(count):
        ids = np.searchsorted(chances, draw.random((BATCH, TABLES)) * chances[-1]).clip(max=rows - 1)
        odds = effect[np.arange(TABLES), ids].sum(1) - 0.5
        labels = draw.random(BATCH) < 1 / (1 + np.exp(-odds))
        batches.append({"ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels.astype(np.float32))})
    return batches


class Model(nn.Module):
    def __init__(self, tables: list[nn.Module]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)
        self.layers = nn.Sequential(nn.Linear(TABLES * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor) -> Tensor:
        vectors = [table(ids[:, number]) for number, table in enumerate(self.tables)]
        return self.layers(torch.cat(vectors, 1).float()).squeeze(-1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["ids"]), batch["labels"])


def dense_bytes(model: Model) -> int:
    return sum(value.numel() * 4 for value in model.layers.parameters())


class Side:
    """One way to keep the tables, and what its steps took."""

    def __init__(self, name: str, place: Path, rows: int, batches: list[dict[str, Tensor]], rate: float) -> None:
        rank = int(os.environ["RANK"])
        os.environ["ANABRANCH_SERVERS"] = ",".join(f"unix:{place}/{name}.{rank}.{n}" for n in range(SHARDS))
        self._count = np.memmap(place / f"{name}.{rank}.counts", np.int64, "r", shape=(2,))
        torch.manual_seed(0)
        kind = torch.bfloat16 if name == "bfloat16" else torch.float32
        made = partial(ab.RemoteEmbedding, init=Normal(0, 0.03), optimizer=RULE, dtype=kind)
        tables = [made(f"t{k}", rows, WIDTH) for k in range(TABLES)]
        model = Model(list(tables))
        step = ab.TrainStep(model, loss, torch.optim.Adam(model.layers.parameters(), lr=1e-3, fused=True))
        cache = None if name == "uncached" else ab.Cache("LFU", rows // 10, pull_bound=BOUND, push_bound=BOUND)
        self._extra = dense_bytes(model) / rate if rate else 0.0
        self.executor = ab.Executor(
            {"train": step},
            "Hybrid",
            cache=cache,
            row_compression="int8" if name == "8-bit" else None,
            dataloaders={"train": DataLoader(batches, None, num_workers=1) if name == "DataLoader" else batches},
            heartbeat=5.0,
        )
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.bytes = np.zeros(2, np.int64)

    def run(self, steps: int, *, counted: bool) -> None:
        before, began = np.array(self._count), time.monotonic()
        losses = [self.executor.run("train")["loss"].item() for _ in range(steps)]
        self.losses += losses
        if counted:
            self.seconds.append((time.monotonic() - began) / steps + self._extra)
            self.bytes += np.array(self._count) - before

    def result(self, counted: int) -> dict[str, object]:
        return {
            "seconds_a_step": self.seconds,
            "up_a_step": int(self.bytes[UP]) / counted,
            "down_a_step": int(self.bytes[DOWN]) / counted,
            "last_loss": statistics.mean(self.losses[-BOUND:]),
        }


def distributed_data_parallel(
    rows: int, batches: list[dict[str, Tensor]], rate: float, steps: int
) -> dict[str, object]:
    """Steps of the plain loop, whose buckets take as long as the link would need for them."""
    torch.manual_seed(0)
    model = Model([nn.Embedding(rows, WIDTH) for _ in range(TABLES)])
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    sent = 0

    def over_the_link(_, bucket):  # torch reads annotations, and refuses those that are texts
        nonlocal sent
        gradient = bucket.buffer().div_(WORKERS)
        size = gradient.numel() * 4 * 2 * (WORKERS - 1) // WORKERS  # of a ring: what each sends
        sent += size
        began = time.monotonic()
        future = dist.all_reduce(gradient, async_op=True).get_future()

        def arrived(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            time.sleep(max(0.0, began + size / rate - time.monotonic()))
            return done.value()[0]

        return future.then(arrived)

    wrapped.register_comm_hook(None, over_the_link)
    seconds = []
    for batch in batches[:steps]:
        began = time.monotonic()
        optimizer.zero_grad()
        loss(wrapped, batch).backward()
        optimizer.step()
        seconds.append(time.monotonic() - began)
    return {"seconds_a_step": seconds[1:], "up_a_step": sent / steps, "down_a_step": sent / steps}


def static_cache(batches: list[dict[str, Tensor]], rows: int, first: int, last: int) -> tuple[float, float]:
    """Of the rows that pass without a cache: the share that passes with the best static one, and that is outside it.

    It holds the most frequent tenth of each table. A row in it is read again once it is BOUND steps old, and its
    gradient is sent once the first of it is; a row outside is read and sent each time.
    """
    read = np.full((TABLES, rows), -(1 << 30))
    dirty = np.full((TABLES, rows), -1)
    passed = outside = whole = 0
    for step, batch in enumerate(batches[:last]):
        counted = step >= first
        for table in range(TABLES):
            ids = np.unique(batch["ids"][:, table].numpy())
            inside = ids[ids < rows // 10]
            stale = inside[step - read[table, inside] > BOUND]
            read[table, stale] = step
            clean = inside[dirty[table, inside] < 0]
            dirty[table, clean] = step
            due = np.flatnonzero((dirty[table] >= 0) & (step - dirty[table] >= BOUND))
            dirty[table, due] = -1
            if counted:
                passed += 2 * (len(ids) - len(inside)) + len(stale) + len(due)
                outside += len(ids) - len(inside)
                whole += len(ids)
    return passed / (2 * whole), outside / whole


def work(options: argparse.Namespace) -> None:
    """What each worker does."""
    rank, place = int(os.environ["RANK"]), Path(options.place)
    torch.set_num_threads(1)
    warm, periods = BOUND + 10, options.periods
    steps = warm + periods * (BOUND + 1)
    batches = make_batches(steps, options.rows, options.zipf, seed=10 + rank)
    rate = options.mbit * 1e6 / 8
    sides = {name: Side(name, place, options.rows, batches, rate) for name in options.sides}
    try:
        for side in sides.values():
            side.run(warm, counted=False)
        for _ in range(periods):
            for side in sides.values():
                side.run(BOUND + 1, counted=True)
        found: dict[str, object] = {name: side.result(periods * (BOUND + 1)) for name, side in sides.items()}
        if options.ddp:
            found["ddp"] = distributed_data_parallel(options.rows, batches, rate, options.ddp)
    finally:
        for side in reversed(sides.values()):
            side.executor.close()
    found["static"], found["outside"] = static_cache(batches, options.rows, warm, steps)
    print(json.dumps(found), flush=True)


def measure(options: argparse.Namespace, sides: list[str], zipf: float, mbit: float, ddp: int) -> dict[str, object]:
    """Runs the sides; rank 0's figures."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o700)
        with servers(Path(directory), sides, mbit * 1e6 / 8):
            arguments = ["--place", directory, "--sides", *sides, "--zipf", zipf, "--mbit", mbit, "--ddp", ddp]
            arguments += ["--rows", options.rows, "--periods", options.periods]
            job = LocalJob(WORKERS, timeout=1800)
            result = job.run(__file__, *map(str, arguments)).check().results[0]
    assert result is not None
    return result


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument("--periods", type=int, default=2, help="of 51 steps, counted, a side")
    parser.add_argument("--mbit", type=float, default=200.0, help="a second that the link lets pass each way")
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument(
        "--ddp",
        type=int,
        default=3,
        help="steps with dense gradients, of which the first is not counted; 0 leaves them out",
    )
    parser.add_argument("--skews", action="store_true", help="only the saving against skew")
    parser.add_argument("--place", help=argparse.SUPPRESS)
    parser.add_argument(
        "--sides", nargs="+", default=["uncached", "cached", "DataLoader", "8-bit"], help="the first two at least"
    )
    options = parser.parse_args()
    if options.place:
        return work(options)
    before = machine()
    sides = options.sides
    if not options.skews:
        found = measure(options, sides, options.zipf, options.mbit, options.ddp)
        print(text_of(found, options))
        keep("cached_tables", before, rows_of(found), options.out, bars="share_of_uncached", by=("side",))
    else:
        rows = []
        for zipf in (0.8, 1.05, 1.3):
            found = measure(options, sides[:2], zipf, 0.0, 0)
            rows.append(
                {"zipf": zipf, "cached": total(found["cached"]) / total(found["uncached"]), "static": found["static"]}
            )
            print(
                f"zipf {zipf}: cached {rows[-1]['cached']:.1%} of the bytes, best static cache {rows[-1]['static']:.1%}"
            )
        keep("cached_tables_skews", before, rows, options.out, bars="cached", by=("zipf",))
    print(f"machine before: {before}; load after: {os.getloadavg()}")
    return None


def rows_of(found: dict[str, dict[str, object]]) -> list[dict[str, object]]:
    """A row for each side, and one for what a static cache would leave."""
    base = total(found["uncached"])
    rows = [
        {
            "side": name,
            "bytes_a_step": total(side),
            "share_of_uncached": total(side) / base,
            "steps_per_second": 1 / statistics.median(side["seconds_a_step"]),
            "loss": side.get("last_loss", ""),
        }
        for name, side in found.items()
        if isinstance(side, dict)
    ]
    return [*rows, {"side": "best static cache", "share_of_uncached": found["static"]}]


def total(side: dict[str, float]) -> float:
    return side["up_a_step"] + side["down_a_step"]


def text_of(found: dict[str, dict[str, object]], options: argparse.Namespace) -> str:
    base = total(found["uncached"])
    lines = ["| side | kB up a step | kB down | share of uncached | steps/s | loss |", "|---|---|---|---|---|---|"]
    for name, side in found.items():
        if isinstance(side, dict):
            rate = 1 / statistics.median(side["seconds_a_step"])
            lines.append(
                f"| {name} | {side['up_a_step'] / 1e3:,.0f} | {side['down_a_step'] / 1e3:,.0f} | "
                f"{total(side) / base:.1%} | {rate:.2f} | {side.get('last_loss', float('nan')):.4f} |"
            )
    lines.append(
        f"\nbest static cache: {found['static']:.1%} of the uncached rows; {found['outside']:.1%} of a batch's "
        f"ids lie outside it. cached / static: {total(found['cached']) / base / found['static']:.2f}"
    )
    times = {name: statistics.median(side["seconds_a_step"]) for name, side in found.items() if isinstance(side, dict)}
    lines.append(
        f"steps/s over a link of {options.mbit:g} Mbit/s: cached {times['uncached'] / times['cached']:.2f}x uncached"
    )
    if "ddp" in times:
        lines[-1] += f", {times['ddp'] / times['cached']:.1f}x dense gradients"
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
