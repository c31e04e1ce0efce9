"""Sums of workers on one host: in one order, bit-equal on all of them; and nothing is left, however a rank ends."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import anabranch as ab
from anabranch.collectives import GradientBuckets, Workers, differentiable, sparse_rows
from anabranch.collectives import shared_memory as shared
from anabranch.collectives.shared_memory import FlatForm, SharedSum, shared_sums
from anabranch.errors import BoundaryError, DeadlineExceeded, PeerLost
from covering import slow_except
from programs import start, start_ranks
from toys import in_job, messages_of

CPU = torch.device("cpu")
NAME = "anabranch-sums"


def sums_of(workers: Workers, *sizes: int, dtype: torch.dtype = torch.float32) -> list[SharedSum]:
    sums = shared_sums(workers, [FlatForm(size, dtype, CPU) for size in sizes])
    assert None not in sums
    return sums  # type: ignore[return-value]


def mappings() -> int:
    """How much of the segments this process has: mappings, and descriptors."""
    descriptors = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdigit()
                   if os.path.lexists(f"/proc/self/fd/{fd}")]  # fmt: skip
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum(NAME in line for line in [*descriptors, *maps])


def pretend_hosts() -> None:
    """Let two workers each believe to be on a host of their own: memory is shared by processes of one user."""
    host = int(os.environ["RANK"]) // 2
    os.getuid = lambda: 4711 + host


# What is summed.


def sums_in_order(names: list[str]) -> list[Any]:
    torch.set_num_threads(1)
    with Workers() as workers:
        results = [result for name in names for result in compared(workers, getattr(torch, name))]
    return [all(equal for equal, _ in results), [digest for _, digest in results], mappings()]


def compared(workers: Workers, dtype: torch.dtype) -> Iterator[tuple[bool, str]]:
    """Whether sums are as they should be, and their bits."""
    for turn, one in enumerate(2 * sums_of(workers, 1, 7, 1023, 5000, 100_001, dtype=dtype)):
        generator = torch.Generator().manual_seed(100 * turn + workers.rank)
        mine = torch.randn(len(one.flat), generator=generator, dtype=dtype)
        first, *others = workers.all_gather(mine)
        for row in others:
            first += row
        by_gloo = workers.all_reduce(mine.clone())
        one.flat.copy_(mine)
        one.start(operation="sum", step=turn).finish()
        close = torch.allclose(one.flat, by_gloo, rtol=0, atol=8 * torch.finfo(dtype).eps * by_gloo.abs().max().item())
        yield close and torch.equal(one.flat, first), hashlib.sha256(one.flat.numpy()).hexdigest()


@pytest.mark.parametrize("workers", slow_except([2, 3, 4], 3))
def test_sums_are_gloos_in_the_order_of_ranks_and_bit_equal_on_all_of_them(workers: int) -> None:
    results = in_job(sums_in_order, workers, ["float32", "float64"])
    for equal, digests, mapped in results:
        assert equal
        assert digests == results[0][1]
        assert mapped == 0  # freed with the last tensor


class Layers(nn.Module):
    def __init__(self, dtype: torch.dtype, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
        self.table = nn.Embedding(11, 3, sparse=sparse, dtype=dtype)
        self.unused = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.table((x[:, 0].abs() * 10).long() % 11)  # type: ignore[no-any-return]


def trained(name: str, accumulate: int = 1, sparse: bool = False) -> list[Any]:
    model = Layers(getattr(torch, name), sparse)
    step = ab.TrainStep(
        model,
        lambda model, x: model(x).square().mean(),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if "64" in name else 0.0),
        clip_grad_norm=0.3,
        accumulate=accumulate,
    )
    gradients: list[list[float] | None] = []
    with ab.Executor(step, "AllReduce") as executor:
        rank = dist.get_rank()
        for turn in range(6):
            rows = 2 + (turn + rank) % 3 if (turn, rank) != (3, 1) else 0  # uneven, and once none at all
            generator = torch.Generator().manual_seed(10 * turn + rank)
            executor.run(batch=torch.randn(rows, 5, generator=generator, dtype=torch.float64).to(model.unused.dtype))
            seen = model.layers[0].weight.grad  # also in the middle of a window
            gradients.append(None if seen is None else seen.double().flatten().tolist())
        used = mappings()
        model.zero_grad()
    del executor, step
    gc.collect()
    left = mappings()
    values = [parameter.detach().double().flatten().tolist() for parameter in model.parameters()]
    return [used > 0, left, gradients, [number for row in values for number in row]]


def trained_both_ways() -> list[list[list[Any]]]:
    """By memory and over gloo, dense and sparse, in windows and without; last on several hosts, and in half types."""
    found = []
    for way in product((1, 2), (True, False)):
        with pytest.MonkeyPatch.context() as patch:
            found.append([trained("float64", *way)])
            patch.setattr(Workers, "hosts", [])
            found[-1].append(trained("float64", *way))
    halves = [trained(name) for name in ("float16", "bfloat16")]
    pretend_hosts()
    return [[*found, [trained("float64", 2, False), found[-1][1]]], halves]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("workers", [2, 3])
def test_training_gives_the_parameters_that_it_gives_over_gloo(workers: int) -> None:
    """Half types are summed in float32 numbers, and over gloo."""
    (first, halves), *_ = everyone = in_job(trained_both_ways, workers)
    for rank, mine in everyone:
        for (by_memory, over_gloo), (of_first, _) in zip(rank, first, strict=True):
            used, left, gradients, values = by_memory
            assert (used, left, over_gloo[0]) == (True, 0, False)  # an executor takes the memory with it
            assert values == of_first[3] == pytest.approx(over_gloo[3], rel=0, abs=1e-12)
            assert gradients == [None if one is None else pytest.approx(one, abs=1e-12) for one in over_gloo[2]]
        for (used, *_, values), (*_, others) in zip(mine, halves, strict=True):
            assert used
            assert values == others


def gathered() -> list[bool]:
    torch.set_num_threads(1)
    results = []
    for sparse_rows._MOST_SHARED in (1 << 20, 1 << 15):
        results += gathered_by_all()
        results.append(mappings() == 0)
    return results


def gathered_by_all() -> list[bool]:
    results = []
    with Workers() as workers:
        weight = nn.Parameter(torch.zeros(30_000, 3))
        buckets = GradientBuckets({"weight": weight}, workers, sparse=["weight"])
        for turn, count in enumerate((1, 700, 0, 30_000, 2)):
            ids = torch.randperm(30_000, generator=torch.Generator().manual_seed(turn))
            ids = ids[: 1 if workers.rank else count]
            rows = torch.randn(len(ids), 3)
            gradient = torch.sparse_coo_tensor(ids[None], rows, weight.shape, check_invariants=False)
            buckets.start_window()
            buckets.start_run(1.0, last=True)
            buckets.ready(weight, gradient)
            buckets.launch_rest()
            buckets.finish(2.0)
            expected = workers.all_reduce(gradient.to_dense()) / 2
            assert weight.grad is not None
            results.append(torch.equal(weight.grad.to_dense(), expected))
    return results


def summed_in_groups() -> list[Any]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
    mine = groups[rank % 2]
    for _ in range(2):  # a group that is made again has the name and the store of the one before
        differentiable._sums.clear()
        for group in (None, mine):
            ab.all_reduce(torch.ones(1), group=group, timeout=60.0)  # over gloo, and then they share memory
    if rank != 1:
        dist.all_reduce = None  # type: ignore[assignment]
    sums = [ab.all_reduce(torch.full((size,), rank + 1.0), group=mine).sum().item() for size in (3, 100_000)]
    return [*sums, ab.all_reduce(torch.ones(5), "mean").tolist()]


def test_a_loss_sums_over_any_group_in_shared_memory() -> None:
    pair, alone = [12.0, 400_000.0, [1.0] * 5], [6.0, 200_000.0, [1.0] * 5]
    assert in_job(summed_in_groups, 3) == [pair, alone, pair]


def test_rows_are_gathered_in_memory_that_grows_up_to_a_size() -> None:
    assert in_job(gathered, 2) == [[True] * 12] * 2


# Whoever cannot share memory.


REASONS = {
    "other users": "shared memory is for 2 to 64 processes of one user on one host",
    "no memory": "rank 0 has no shared memory: [Errno 28] no space left",
    "cannot open": "rank 1 has no shared memory: [Errno 28] no space left",
}


def voted() -> dict[str, list[Any]]:
    said, found = messages_of("anabranch.executor"), {}

    def refuse(*_: object) -> int:
        raise OSError(28, "no space left")

    for what in REASONS:
        said.clear()
        with Workers() as workers, pytest.MonkeyPatch.context() as patch:
            if what == "other users":
                patch.setattr(os, "getuid", partial(sum, (4711, workers.rank)))
            elif what == "no memory" and workers.rank == 0:
                patch.setattr(os, "posix_fallocate", refuse)
            elif what == "cannot open" and workers.rank == 1:
                patch.setattr(shared, "_map", refuse)
            sums = [shared_sums(workers, [FlatForm(10, torch.float32, CPU)]) for _ in range(2)]
            found[what] = [sums, workers.all_reduce(torch.ones(1)).item(), *said]
        assert mappings() == 0
    return found


def test_where_one_worker_cannot_all_of_them_take_gloo_and_say_so_once() -> None:
    for found in in_job(voted, 3):
        for what, (sums, total, said) in found.items():
            assert (sums, total) == ([[None], [None]], 3.0)
            assert REASONS[what] in said


def test_sums_on_other_devices_and_of_other_dtypes_ask_nobody() -> None:
    forms = [FlatForm(1, torch.bfloat16, CPU), FlatForm(1, torch.float32, torch.device("cuda"))]
    assert shared_sums(None, forms) == [None, None]  # type: ignore[arg-type]


def test_no_process_can_shrink_or_grow_the_memory() -> None:
    descriptor = shared._create(8192)
    try:
        for size in (0, 16_384):
            with pytest.raises(PermissionError), open(f"/proc/self/fd/{descriptor}", "r+b", buffering=0) as file:
                file.truncate(size)
    finally:
        os.close(descriptor)


# A rank that ends, freezes, leaves or does not come.


class Rank:
    """One of several in this process, over the same words: the first three numbers are halved.

    ``own`` are its numbers, if they are not in its row.
    """

    def __init__(self, words: np.ndarray, rows: np.ndarray, rank: int, own: np.ndarray | None = None) -> None:
        self.words, self.rows, self.rank = words, rows, rank
        self.copies, self.own = (rows[None], rows[rank]) if own is None else (rows, own)
        self.number = 0
        self.begin()

    def begin(self) -> None:
        self.number, self.stage = self.number + 1, shared._BEGUN

    def go_on(self) -> int:
        place = self.words, shared._LINE, self.copies, self.own, self.rank
        what = self.number, self.stage, 3, np.float64(2)
        if self.stage < shared._DONE:
            self.stage = shared._advance(*place, *what, shared._waiting(1), 0)
        return self.stage

    def give_up(self) -> None:
        shared._give_up(self.words, np.array([shared._LINE]), self.rank)


@pytest.fixture
def pair() -> tuple[Rank, Rank]:
    words, rows = np.zeros(4 * shared._LINE, np.uint32), np.arange(8.0).reshape(2, 4)
    return Rank(words, rows, 0), Rank(words, rows, 1)


def test_a_sum_that_was_complete_before_a_rank_gave_up_is_so_for_all(pair: tuple[Rank, Rank]) -> None:
    first, second = pair
    assert first.go_on() == shared._ARRIVED
    assert second.go_on() == shared._SUMMED
    assert first.go_on() == shared._DONE
    first.give_up()
    assert second.go_on() == shared._DONE
    assert first.rows.tolist() == [[2.0, 3.0, 4.0, 10.0]] * 2


@pytest.mark.parametrize("turns", [0, 1])
def test_a_sum_that_was_not_complete_before_a_rank_gave_up_never_is(turns: int, pair: tuple[Rank, Rank]) -> None:
    first, second = pair
    first.go_on()
    for _ in range(turns):
        second.go_on()
    first.give_up()
    assert [second.go_on(), first.go_on()] == [shared._LOST] * 2
    assert first.words[0] == 1


def test_a_small_sum_is_complete_with_its_one_barrier_and_ranks_may_be_one_sum_apart() -> None:
    words, rows = np.zeros(4 * shared._LINE, np.uint32), np.zeros((2, 2, 4))
    first, second = (Rank(words, rows, rank, np.full(4, rank + 1.0)) for rank in range(2))
    assert first.go_on() == shared._ARRIVED
    assert second.go_on() == shared._DONE
    second.own[:] = 7.0
    second.begin()
    assert second.go_on() == shared._ARRIVED
    second.give_up()
    assert first.go_on() == shared._DONE
    assert first.own.tolist() == [1.5, 1.5, 1.5, 3.0]
    first.begin()
    assert [first.go_on(), second.go_on()] == [shared._LOST] * 2


def test_unequal_sizes_that_add_up_to_equal_ones_are_seen() -> None:
    words, rows = np.zeros(4 * shared._LINE, np.uint32), np.zeros((2, 3, 1 << 16))
    for few, many, between in ((3, 5, 4), (1 << 13, 3 << 13, 2 << 13)):
        everyone = [Rank(words, rows, rank, np.ones(size)) for rank, size in enumerate((few, many, between))]
        assert [one.go_on() for one in everyone] == [shared._ARRIVED] * 2 + [shared._UNLIKE]


@pytest.mark.parametrize(("ranks", "size"), [(3, 512), (33, 15_872), (47, 1536), (64, 512)])
def test_no_number_is_left_out_of_the_chunks_of_many_ranks(ranks: int, size: int) -> None:
    rows = np.ones((ranks, size))
    words = np.zeros(4 * shared._LINE, np.uint32)
    everyone = [Rank(words, rows, rank) for rank in range(ranks)]
    for _ in range(3):
        stages = {one.go_on() for one in everyone}
    assert stages == {shared._DONE}
    assert bool((rows[:, 3:] == ranks).all())
    assert bool((rows[:, :3] == ranks / 2).all())


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e308])
@pytest.mark.parametrize(("at", "seen"), [(2, True), (3, False)])
def test_all_ranks_see_a_gradient_that_is_not_finite(small: bool, value: float, at: int, seen: bool) -> None:
    """The numbers behind the gradients, such as a loss, may be anything; 1e308 overflows in the sum."""
    words, rows = np.zeros(4 * shared._LINE, np.uint32), np.ones((2, 2, 2000) if small else (2, 2000))
    own = np.ones((2, 2000)) if small else rows
    own[:, at] = value
    everyone = [Rank(words, rows, rank, own[rank] if small else None) for rank in range(2)]
    for turn in range(2):
        for _ in range(3):
            stages = {one.go_on() for one in everyone}
        assert stages == {shared._NONFINITE if seen and not turn else shared._DONE}
        own[:] = 1.0
        for one in everyone:
            one.begin()


RANK = """
import json, os, sys
import torch, torch.distributed as dist
from anabranch.collectives import Workers
from anabranch.collectives.shared_memory import FlatForm, shared_sums
from anabranch.errors import BoundaryError

at, rank = sys.argv[1], int(os.environ["RANK"])
if at == "hosts":
    os.getuid = lambda: 4711 + rank // 2
form = FlatForm(1000 if at == "away, few" else 1 << 18, torch.float32, torch.device("cpu"))
workers = Workers(timeout=120.0, heartbeat=0.5)
sums = shared_sums(workers, [form, form])
for one in sums:
    one.start(operation="first", step=0).finish()
if rank != 1:
    workers.store.wait(["ready"])
pending = [one.start(operation="sum", step=1) for one in sums if rank != 1 or at == "arrived"]
if rank == 1:  # which has not summed its part: it did not arrive last
    workers.store.set("ready", "yes")
    print("ready", flush=True)
    sys.stdin.readline()  # until the test has done its worst
try:
    for one in pending:
        one.finish()
except BoundaryError as error:
    print(json.dumps({"type": type(error).__name__, "peer": error.peer, "elapsed": error.elapsed, "text": str(error)}))
    sys.stdout.flush()
    workers.close()
"""


ENDS = product(("away, few", "away", "arrived", "hosts"), (signal.SIGKILL, signal.SIGSTOP))


@pytest.mark.parametrize(
    ("at", "number"), slow_except(ENDS, ("away, few", signal.SIGKILL), ("arrived", signal.SIGSTOP))
)
def test_a_rank_that_ends_or_freezes_in_a_sum_is_named_on_all_others(at: str, number: int, tmp_path: Path) -> None:
    with start_ranks(tmp_path, RANK, 3, at) as started:
        started[1].send_signal(number)
        for other in (started[0], started[2]):
            facts = json.loads(other.communicate(60)[0].splitlines()[-1])
            assert facts["type"] == "PeerLost"
            assert "1" in facts["peer"].removeprefix("ranks ").removeprefix("rank ").split(", ")
            assert ("its process is stopped" if number == signal.SIGSTOP else "its process has ended") in facts["text"]
            assert facts["elapsed"] < 60.0  # of 120


FOR_EVER = """
import json, os, random, select, signal, sys
import torch
import torch.distributed as dist
from anabranch.collectives import Workers
from anabranch.collectives.shared_memory import FlatForm, load_kernels, shared_sums
from anabranch.errors import BoundaryError

WORLD = 3
random_, trials, folder = random.Random(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
load_kernels(torch.float32)  # for all of the forks


def sum_for_ever(rank, place, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(place, WORLD), rank=rank, world_size=WORLD)
    workers = Workers(timeout=120.0, heartbeat=0.2)
    sums = shared_sums(workers, [FlatForm(size, torch.float32, torch.device("cpu")) for size in (1000, 1 << 18)])
    complete = 0
    try:
        while True:
            for one in sums:
                one.flat.fill_(rank + 1.0)
                one.start(operation="sum", step=complete).finish()
                assert one.flat.eq(WORLD * (WORLD + 1) / 2).all()
                complete += 1
                if complete == 10:
                    print("ready", file=out, flush=True)
    except BoundaryError as error:
        print(json.dumps([type(error).__name__, error.peer, complete]), file=out, flush=True)


for trial in range(trials):
    ranks = []
    for rank in range(WORLD):
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                sum_for_ever(rank, f"{folder}/{trial}", open(theirs, "w"))
            finally:
                os._exit(0)
        os.close(theirs)
        ranks.append((pid, open(ours)))
    ready = [lines.readline() for _, lines in ranks]
    victim = random_.randrange(WORLD)
    select.select([], [], [], random_.random() * 0.02)
    os.kill(ranks[victim][0], signal.SIGKILL)
    ends = [lines.readline() for rank, (_, lines) in enumerate(ranks) if rank != victim]
    for pid, lines in ranks:
        os.waitpid(pid, 0)
        lines.close()
    print(json.dumps([ready, victim, [json.loads(end or "null") for end in ends]]), flush=True)
"""


@pytest.mark.slow
def test_a_rank_killed_at_any_moment_is_named_and_the_others_agree_on_what_was_complete(tmp_path: Path) -> None:
    """The memory ends with the last process, and all of them have ended when a trial is over."""
    seed, trials = random.SystemRandom().randrange(1 << 30), 200
    print(f"seed {seed}")
    script = tmp_path / "sums.py"
    script.write_text(FOR_EVER)
    with start(script, str(seed), str(trials), str(tmp_path)) as program:
        lines = program.communicate(500)[0].splitlines()
    assert len(lines) == trials
    for ready, victim, (first, second) in map(json.loads, lines):
        assert ready == ["ready\n"] * 3
        assert first == second
        assert first[:2] == ["PeerLost", f"rank {victim}"]


def left_or_late(how: str) -> list[Any]:
    dist.init_process_group("gloo")
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    workers = Workers(timeout=60.0, heartbeat=0.1)
    (one,) = sums_of(workers, 100)
    if how == "late":
        workers.timeout = 0.5  # of the sum
    error: BoundaryError | None = None
    if rank == 1:
        if how == "close":
            workers.close()
        store.set("gone", "yes")
        store.wait(["over"])
        if how == "late":
            with pytest.raises(BoundaryError) as caught:
                one.start(operation="sum", step=1).finish()
            error = caught.value
    else:
        store.wait(["gone"])
        with pytest.raises(DeadlineExceeded if how == "late" else PeerLost) as lost:
            one.start(operation="sum", step=1).finish()
        error = lost.value
        store.set("over", "yes")
    sys.stdout.flush()
    workers.has_left_work = False  # no gloo thread waits: the process may end as it likes
    return [str(error), None if error is None else error.peer]


def test_a_rank_that_leaves_ends_the_others_waits_and_is_named() -> None:
    first, _, third = in_job(left_or_late, 3, "close")
    for text, peer in (first, third):
        assert "rank 1 has left the sum" in text
        assert peer == "rank 1"


def test_a_rank_that_does_not_come_is_named_at_the_deadline_and_comes_too_late() -> None:
    (text, peer), (late, _) = in_job(left_or_late, 2, "late")
    assert (peer, "not all ranks arrived" in text) == ("rank 1", True)
    assert "rank 0 has left the sum" in late


# Forked children.


def forked() -> list[Any]:
    torch.set_num_threads(1)
    with Workers() as workers:
        (one,) = sums_of(workers, 1 << 18)
        one.flat.fill_(1.0)
        child = os.fork()
        if child == 0:
            before = mappings()
            one.flat.fill_(7.0)
            del one
            os._exit(before)
        _, status = os.waitpid(child, 0)
        one.start(operation="sum", step=0).finish()
        return [os.waitstatus_to_exitcode(status), bool(one.flat.eq(2.0).all()), mappings() > 0]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_neither_keeps_nor_changes_the_memory() -> None:
    assert in_job(forked, 2) == [[0, True, True]] * 2
