"""What a dynamic vocabulary, float16 and files add to a table, and how long new ids stop one, in one process.

    python benchmarks/table_kinds.py

26 tables of 100,000 rows of 16, the distinct ids of a batch of 2,048 Zipf lookups a table (about 26,000), Adagrad, a
shard called as its server calls it. Kinds take turns. Every call has other ids than the one before, and rows got their
places in another order than that of any batch. A pull is followed by the push of the same ids, which finds their rows
again ("own"), and that by a push of other ids ("other"), which looks for theirs. Then 26,000 new ids at a time go into
one table, to ``--rows`` and a tenth more. Times are those of the calling thread: what else runs does not count.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from measure import keep, machine, options_of
from torch import Tensor

from anabranch.parameter_server import Shard
from anabranch.parameter_server.messages import InitMessage, PullMessage, PullPart, PushMessage, PushPart
from anabranch.tables import Normal, Table, TableSpec
from parameter_server import BATCH, NAMES, ROWS, RULE, WIDTH, make_ids

KINDS = ("fixed", "dynamic", "float16", "mapped")
CALLS = ("pull", "own push", "other push")
NEW = 26_000


class Side:
    """A shard with tables of one kind, whose rows all have their places."""

    def __init__(self, kind: str, directory: str) -> None:
        self.shard, self.dtype = Shard(scratch=directory), torch.float16 if kind == "float16" else torch.float32
        rows = None if kind == "dynamic" else ROWS
        for name in NAMES:
            spec = TableSpec(name, rows, WIDTH, self.dtype, Normal(0, 0.01), memory_map=kind == "mapped")
            self.shard.init(InitMessage(name, RULE.to_dict(), spec.to_dict()))
        order = torch.Generator().manual_seed(1)
        for some in zip(*(torch.split(torch.randperm(ROWS, generator=order), BATCH) for _ in NAMES), strict=True):
            self.push(list(some))

    def pull(self, ids: list[Tensor]) -> float:
        message = PullMessage([PullPart(name, len(some)) for name, some in zip(NAMES, ids, strict=True)], training=True)
        flat = torch.cat(ids)
        return seconds(lambda: self.shard.pull(self.shard.request(message, [flat])))

    def push(self, ids: list[Tensor]) -> float:
        message = PushMessage([PushPart(name, len(some)) for name, some in zip(NAMES, ids, strict=True)], [])
        flat = torch.cat(ids)
        grads = torch.randn(len(flat) * WIDTH).to(self.dtype)
        return seconds(lambda: self.shard.push(self.shard.request(message, [flat, grads])))


def seconds(call: Callable[[], object]) -> float:
    begun = time.thread_time()
    call()
    return time.thread_time() - begun


def kinds(rounds: int) -> list[dict[str, object]]:
    batches = make_ids(40)
    times: dict[tuple[str, str], list[float]] = {(kind, call): [] for kind in KINDS for call in CALLS}
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # the page cache, without a disk behind it
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        sides = {kind: Side(kind, directory) for kind in KINDS}
        for number in range(rounds + 4):
            ids, others = batches[number % 40], batches[(number + 17) % 40]
            first = number % len(KINDS)
            for kind in KINDS[first:] + KINDS[:first]:
                side = sides[kind]
                taken = side.pull(ids), side.push(ids), side.push(others)
                if number >= 4:  # the first rounds warm up
                    for call, each in zip(CALLS, taken, strict=True):
                        times[kind, call].append(each * 1e3)
    medians = {key: statistics.median(some) for key, some in times.items()}
    rows: list[dict[str, object]] = []
    for kind in KINDS:
        both = [medians[one, "pull"] + medians[one, "own push"] for one in (kind, "fixed")]
        row: dict[str, object] = {"kind": kind} | {f"{call}_ms": medians[kind, call] for call in CALLS}
        row |= {call: medians[kind, call] / medians["fixed", call] for call in CALLS}
        rows.append(row | {"together": both[0] / both[1]})
    return rows


def new_ids(rows: int) -> dict[str, object]:
    """Milliseconds of pushes of new ids; the longest of those around ``rows`` rows, and of all."""
    table = Table(TableSpec("t", None, WIDTH, initial=Normal(0, 0.01)), RULE)
    draw, grads = torch.Generator().manual_seed(0), torch.ones(NEW, WIDTH)
    times: list[float] = []
    while table.used < 1.1 * rows:
        ids = torch.randint(-(2**62), 2**62, (NEW,), generator=draw)
        times.append(seconds(lambda: table.push(ids, grads)) * 1e3)  # noqa: B023 - called at once
    around = times[int(0.9 * len(times) / 1.1) :]
    return {
        "rows": rows,
        "longest_ms": max(around),
        "longest_of_all_ms": max(times),
        "median_ms": statistics.median(times),
    }


def main() -> None:
    parser = options_of(__doc__, rounds=40)
    parser.add_argument("--rows", type=int, default=6_000_000, help="into which new ids go, 150 bytes of memory each")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = machine()
    rows = kinds(arguments.rounds)
    for row in rows:
        print(
            f"{row['kind']:8} "
            + "  ".join(f"{call} {row[f'{call}_ms']:.2f} ms ({row[call]:.2f})" for call in CALLS)
            + f"  pull and push {row['together']:.2f} of fixed"
        )
    keep("table_kinds", before, rows, arguments.out, bars="together", by=("kind",))
    new = new_ids(arguments.rows)
    print(f"{NEW:,} new ids: " + "  ".join(f"{key} {value:,.4g}" for key, value in new.items()))
    keep("new_ids", before, [new], arguments.out)


if __name__ == "__main__":
    main()
