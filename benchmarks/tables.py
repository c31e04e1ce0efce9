"""Embedding tables: one step of gather, merge and update against torch's own modules, and against FBGEMM where it is.

    python benchmarks/tables.py                      # P2 against torch, cost as tables grow, and two threads
    make bench-peers                                 # the same beside FBGEMM, in a virtual environment of its own

26 tables of 100,000 rows of 16, batches of 2,048 Zipf-distributed lookups a table. Every side gets the same ids and the
same gradients, the sides take turns, and what counts is the ratio of their times. A step is: look the rows up, and
apply the gradient of each lookup by the optimizer. The dense part of a model is not in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from measure import keep, machine, options_of, over_batches
from torch import Tensor

from anabranch.tables import KernelThreads, Normal, RowOptimizer, RowWiseAdagrad, Table, TableGroup, TableSpec
from anabranch.tables.arena import Arena

TABLES, ROWS, WIDTH, BATCH, ZIPF = 26, 100_000, 16, 2048, 1.05
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.01),
    "RowWiseAdagrad": functools.partial(RowWiseAdagrad, lr=0.01),
    "SGD": functools.partial(torch.optim.SGD, lr=0.01),
    "Adam": functools.partial(torch.optim.Adam, lr=0.01),
}
Step = Callable[[Tensor, Tensor], None]  # ids [tables, batch], gradients [batch, tables * width]


def make_batches(count: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    generator = np.random.default_rng(0)
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF
    cumulated = np.cumsum(weights / weights.sum())
    batches = []
    for _ in range(count):
        ids = np.searchsorted(cumulated, generator.random((TABLES, BATCH))).clip(max=rows - 1)
        batches.append((torch.from_numpy(ids), torch.randn(BATCH, TABLES * WIDTH)))
    return batches


def ours(optimizer: str, threads: int) -> Step:
    rule = RowOptimizer.from_factory(OPTIMIZERS[optimizer])
    spec = functools.partial(TableSpec, rows=ROWS, width=WIDTH, initial=Normal(0, 0.01))
    arena = Arena(spec("t"), rule, pool=KernelThreads(threads))
    group = TableGroup([Table(spec(f"t{k}"), rule, arena) for k in range(TABLES)])
    counts = [BATCH] * TABLES

    def step(ids: Tensor, grads: Tensor) -> None:
        rows = group.pull(ids.view(-1), counts, training=True)
        rows.view(TABLES, BATCH, WIDTH).transpose(0, 1).contiguous()  # side by side, as a model reads them
        group.push(ids.view(-1), grads.view(BATCH, TABLES, WIDTH).transpose(0, 1).reshape(-1, WIDTH), counts)

    return step


def torch_bags(optimizer: str, threads: int) -> Step:
    bags = torch.nn.ModuleList([torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True) for _ in range(TABLES)])
    made = (
        OPTIMIZERS[optimizer](bags.parameters())
        if optimizer != "Adam"
        else torch.optim.SparseAdam(list(bags.parameters()), lr=0.01)
    )
    offsets = torch.arange(BATCH)

    def step(ids: Tensor, grads: Tensor) -> None:
        made.zero_grad()
        out = torch.cat([bag(ids[k], offsets) for k, bag in enumerate(bags)], dim=1)
        out.backward(grads)
        made.step()

    return step


def fbgemm(optimizer: str, threads: int) -> Step:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    kinds = {
        "Adagrad": EmbOptimType.EXACT_ADAGRAD,
        "RowWiseAdagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "SGD": EmbOptimType.EXACT_SGD,
        "Adam": EmbOptimType.ADAM,
    }
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, WIDTH, EmbeddingLocation.HOST, ComputeDevice.CPU)] * TABLES,
        optimizer=kinds[optimizer],
        learning_rate=0.01,
        weights_precision=SparseType.FP32,
    )
    tables.init_embedding_weights_uniform(-0.01, 0.01)
    offsets = torch.arange(TABLES * BATCH + 1)

    def step(ids: Tensor, grads: Tensor) -> None:
        tables(ids.reshape(-1), offsets).backward(grads)

    return step


def in_turns(sides: dict[str, Step], batches: list[tuple[Tensor, Tensor]], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds a step of each side."""
    runs = {name: lambda index, step=step: step(*batches[index]) for name, step in sides.items()}
    return over_batches(runs, rounds, len(batches))


def embedding_step(threads: int, rounds: int) -> list[dict[str, object]]:
    batches = make_batches(8, ROWS)
    unique = sum(len(torch.unique(row)) for row in batches[0][0])
    results: list[dict[str, object]] = []
    for optimizer in OPTIMIZERS:
        makers = {"anabranch": ours, "torch EmbeddingBag": torch_bags}
        if has_fbgemm() and optimizer != "Adam":  # its CPU kernels have no Adam
            makers["fbgemm"] = fbgemm
        sides = {name: make(optimizer, threads) for name, make in makers.items()}
        found = in_turns(sides, batches, rounds)
        mine = found["anabranch"]["median"]
        for name, numbers in found.items():
            results.append({"optimizer": optimizer, "side": name, **numbers, "ours / theirs": mine / numbers["median"]})
            print(f"{optimizer:15} {name:20} median {numbers['median']:7.2f} ms  min {numbers['min']:7.2f}  "
                  f"ours/theirs {mine / numbers['median']:.2f}")  # fmt: skip
    print(f"{unique} distinct ids a step")
    return results


def growth(largest: int, rounds: int) -> list[dict[str, object]]:
    """One table of 10^5 rows and more, the same number of lookups: the cost of a step should not grow with the rows."""
    rule = RowOptimizer.from_factory(OPTIMIZERS["Adagrad"])
    generator = torch.Generator().manual_seed(0)
    results: list[dict[str, object]] = []
    rows = 100_000
    while rows <= largest:
        table = Table(TableSpec("t", rows, WIDTH, initial=Normal(0, 0.01)), rule)
        grads = torch.randn(20_000, WIDTH)
        batches = [(torch.randint(0, rows, (20_000,), generator=generator), grads) for _ in range(4)]

        def step(ids: Tensor, grads: Tensor, table: Table = table) -> None:
            table.pull(ids, training=True)
            table.push(ids, grads)

        numbers = in_turns({"t": step}, batches, rounds)["t"]
        results.append({"rows": rows, **numbers})
        print(f"{rows:>12,} rows: median {numbers['median']:.2f} ms for 20,000 lookups")
        rows *= 10
    return results


def two_threads(rounds: int) -> list[dict[str, object]]:
    """Pull and push of distinct rows, as workers send them to a shard, by one thread and by two."""
    rule = RowOptimizer.from_factory(OPTIMIZERS["Adagrad"])
    generator = torch.Generator().manual_seed(0)
    results: list[dict[str, object]] = []
    for kind, size in (("fixed", 1_000_000), ("dynamic", None)):
        for rows in (26_000, 100_000):
            batches = [
                (torch.randperm(1_000_000, generator=generator)[:rows].sort()[0], torch.randn(rows, WIDTH))
                for _ in range(3)
            ]
            sides: dict[str, Step] = {}
            for threads in (1, 2):
                spec = TableSpec("t", size, WIDTH, initial=Normal(0, 0.01))
                table = Table(spec, rule, Arena(spec, rule, pool=KernelThreads(threads)))
                sides[f"pull {threads}"] = lambda ids, _, table=table: table.pull(ids, training=True)  # type: ignore[misc]
                sides[f"push {threads}"] = table.push
            found = in_turns(sides, batches, rounds)
            for verb in ("pull", "push"):
                one, two = (found[f"{verb} {threads}"]["median"] for threads in (1, 2))
                results.append({"table": kind, "rows": rows, "verb": verb, "one": one, "two": two, "ratio": one / two})
                print(f"{kind:8} {verb} of {rows:>7,} rows: {one:.2f} ms, two threads {two:.2f}, {one / two:.2f} times")
    return results


def has_fbgemm() -> bool:
    try:
        import fbgemm_gpu  # noqa: F401
    except ImportError:
        return False
    return True


def main() -> None:
    parser = options_of(__doc__, rounds=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--largest", type=int, default=10_000_000, help="rows of the largest table")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    before = machine()
    steps = embedding_step(arguments.threads, arguments.rounds)
    keep("tables", before, steps, arguments.out, bars="ours / theirs", by=("optimizer", "side"))
    grown = growth(arguments.largest, arguments.rounds)
    keep("tables_growth", before, grown, arguments.out, bars="median", by=("rows",))
    both = two_threads(arguments.rounds)
    keep("tables_threads", before, both, arguments.out, bars="ratio", by=("table", "verb", "rows"))


if __name__ == "__main__":
    main()
