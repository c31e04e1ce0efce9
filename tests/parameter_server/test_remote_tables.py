"""Models whose tables live on servers against the same models here: the same outputs and the same rows, to the bit."""

from __future__ import annotations

import copy
import functools
import math
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.errors import DeadlineExceeded, NonFinite, NotFound, PeerLost
from anabranch.events import Event, subscribe
from anabranch.parameter_server import (
    Cache,
    ParameterClient,
    ParameterServer,
    Pulled,
    RemoteEmbedding,
    RemoteTables,
    RowWiseAdagrad,
    Worker,
)
from anabranch.testing import MemoryTransport

ROWS, WIDTH, STEPS = 20, 16, 6
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, fused=True),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, fused=True),
    "row-wise adagrad": functools.partial(RowWiseAdagrad, lr=0.1),
    "adam": functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.01, fused=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
}


class Bags(nn.Module):
    """Every kind of lookup at once, of two tables, one shared by two modules and looked up twice."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Embedding(ROWS, WIDTH, padding_idx=3, dtype=dtype)
        self.twin = nn.Embedding(ROWS, WIDTH, dtype=dtype)
        self.twin.weight = self.first.weight
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", padding_idx=-1, dtype=dtype)
        self.mean = nn.EmbeddingBag(ROWS, WIDTH, mode="mean", include_last_offset=True, dtype=dtype)
        self.mean.weight = self.bag.weight
        # Not a Linear: the last bit of a matrix product depends on where its factors lie in memory.
        self.head = nn.Parameter(torch.randn(WIDTH, dtype=dtype))

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        offsets = torch.tensor([0, 3, 3])
        bags = self.bag(ids[0], offsets, per_sample_weights=weights)
        means = self.mean(ids[1], torch.tensor([0, 2, 4, len(ids[1])]))
        rows = self.first(ids).sum((0, 1)) + self.first(ids[1] // 2).sum(0) + self.twin(ids[0]).mean(0)
        return ((bags + means + rows) * self.head).sum()


NAMES = ["first.weight", "bag.weight"]


def batch(generator: torch.Generator, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, ROWS, (2, 7), generator=generator)
    return ids, torch.randn(7, generator=generator).to(dtype)


@pytest.mark.parametrize("cache", [None, Cache(capacity=6), Cache("LFUOpt", capacity=100)], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tables_on_servers_are_the_same_tables_to_the_bit(name: str, cache: Cache | None) -> None:
    plain = Bags()
    optimizer = OPTIMIZERS[name](plain.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    with ParameterClient() as client:
        remote = copy.deepcopy(plain)
        theirs = OPTIMIZERS[name](remote.parameters())
        their_schedule = torch.optim.lr_scheduler.ExponentialLR(theirs, 0.8)
        tables = RemoteTables(client, cache=cache)
        tables.adopt(remote, NAMES, theirs)
        generator = torch.Generator().manual_seed(0)
        for step in range(STEPS):
            ids, weights = batch(generator)
            optimizer.zero_grad()
            theirs.zero_grad()
            wanted = plain(ids, weights)
            tables.begin(step)
            found = remote(ids, weights)
            assert torch.equal(found, wanted)
            wanted.backward()
            found.backward()
            tables.push()
            for one in (optimizer, theirs, schedule, their_schedule):
                one.step()
        tables.flush()
        for table, weight in zip(NAMES, (plain.first.weight, plain.bag.weight), strict=True):
            torch.testing.assert_close(client.pull(table), weight.detach(), rtol=0, atol=1e-6)
        assert [name for name, _ in remote.named_parameters()] == ["head"]


@pytest.mark.parametrize("consistency", ["bsp", "ssp:0"])
@pytest.mark.parametrize("cache", [None, Cache(capacity=8)], ids=str)
def test_workers_on_unequal_parts_are_one_on_the_whole(cache: Cache | None, consistency: str) -> None:
    if consistency != "bsp":
        world, edges = 1, [0, 12]  # ssp applies each worker's push by itself
    else:
        world, edges = 3, [0, 2, 7, 12]
    start = nn.Embedding(ROWS, WIDTH, dtype=torch.float64)
    make = OPTIMIZERS["adam"]
    generator = torch.Generator().manual_seed(0)
    steps = [
        (torch.randint(0, ROWS, (12,), generator=generator), torch.randn(12, WIDTH, generator=generator).double())
        for _ in range(STEPS)
    ]
    plain = copy.deepcopy(start)
    optimizer = make(plain.parameters())
    for ids, target in steps:
        optimizer.zero_grad()
        F.mse_loss(plain(ids), target).backward()
        optimizer.step()

    def work(rank: int, endpoints: list[str], network: MemoryTransport) -> None:
        model = nn.Sequential(copy.deepcopy(start))
        mine = make(model.parameters())
        with ParameterClient(
            endpoints, worker=Worker(rank, world, consistency), transport=network, timeout=30
        ) as client:
            tables = RemoteTables(client, cache=cache)
            tables.adopt(model, ["0.weight"], mine)
            part = slice(edges[rank], edges[rank + 1])
            for step, (ids, target) in enumerate(steps):
                tables.begin(step)
                F.mse_loss(model(ids[part]), target[part]).backward()
                tables.push(weight=len(ids[part]))
            tables.begin(STEPS, training=False)
            with torch.no_grad():
                found = model(torch.arange(ROWS))
            torch.testing.assert_close(found, plain.weight.detach(), rtol=0, atol=1e-12)

    with ExitStack() as stack:
        network = MemoryTransport()
        endpoints = [stack.enter_context(ParameterServer(k, 2, transport=network)).endpoint for k in range(2)]
        with ThreadPoolExecutor(world) as pool:
            for future in [pool.submit(work, rank, endpoints, network) for rank in range(world)]:
                future.result(timeout=60)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_own_writes_are_read_while_they_wait_to_be_pushed(name: str) -> None:
    """With bounds that are never reached, a worker alone sees its rows move as they would without servers."""
    make = OPTIMIZERS[name]
    if name == "adam":
        make = functools.partial(torch.optim.SparseAdam, lr=0.01)
    plain = nn.Embedding(ROWS, WIDTH, sparse=name == "adam")
    optimizer = make(plain.parameters())
    model = nn.Sequential(copy.deepcopy(plain))
    everyone = torch.arange(ROWS)  # every row, so that none moves without a gradient
    with ParameterClient() as client:
        theirs = make(model.parameters())
        tables = RemoteTables(client, cache=Cache(capacity=ROWS, pull_bound=50, push_bound=50))
        tables.adopt(model, ["0.weight"], theirs)
        for step in range(8):
            tables.begin(step)
            torch.testing.assert_close(model(everyone), plain(everyone), rtol=1e-5, atol=1e-5)
            for one in (plain, model):
                one(everyone).square().sum().backward()
            tables.push()
            optimizer.step()
            optimizer.zero_grad()
        pushed = 0 if name == "sgd" else ROWS  # the first gradients of rows that came without their state
        assert client.statistics()[0].tables["0.weight"].rows_pushed == pushed
        before = client.pull("0.weight")
        tables.flush()
        assert not torch.equal(client.pull("0.weight"), before)
        assert client.statistics()[0].tables["0.weight"].rows_pushed == pushed + ROWS


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_waits_in_rows_that_leave_is_pushed_once(dtype: torch.dtype) -> None:
    """Rows leave at once; bfloat16 rows, which no group has, show only that gradients are as many."""
    plain = nn.Embedding(ROWS, WIDTH, dtype=dtype)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.125)
    model = nn.Sequential(copy.deepcopy(plain))
    with ParameterClient() as client:
        tables = RemoteTables(client, cache=Cache("LRU", capacity=4, pull_bound=50, push_bound=50))
        tables.adopt(model, ["0.weight"], torch.optim.SGD(model.parameters(), lr=0.125))
        for step in range(30):
            ids = (torch.arange(3) * step) % ROWS
            tables.begin(step)
            for one in (plain, model):
                one(ids).sum().backward()
            tables.push()
            optimizer.step()
            optimizer.zero_grad()
        tables.close()
        assert tables.statistics()["0.weight"].evictions > 10
        tolerance = 1e-12 if dtype == torch.float64 else 0.05
        torch.testing.assert_close(client.pull("0.weight"), plain.weight.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("make", "use", "words"),
    [
        (lambda: nn.Embedding(4, 2, max_norm=1.0), lambda m: m(torch.tensor([1])), "max_norm"),
        (lambda: nn.Embedding(4, 2), lambda m: F.linear(torch.ones(1, 2), m.weight), "only lookups"),
        (lambda: nn.Embedding(4, 2), lambda m: m.weight.sum(), "only lookups"),
        (lambda: nn.Embedding(4, 2), lambda m: m(torch.tensor([4])), "ids 0 to 3"),
    ],
)
def test_what_servers_cannot_do_is_refused_with_a_reason(
    make: Callable[[], nn.Module], use: Callable[[nn.Module], object], words: str
) -> None:
    model = nn.Sequential(make())
    with ParameterClient() as client:
        tables = RemoteTables(client)
        tables.adopt(model, ["0.weight"], torch.optim.SGD(model.parameters(), lr=0.1))
        assert "RemoteWeight('0.weight'" in repr(model[0].weight)
        tables.begin(0)
        with pytest.raises((ValueError, TypeError), match=words):
            use(model[0])


def test_a_parameter_that_is_no_table_of_the_model_is_refused() -> None:
    model = nn.Linear(2, 2)
    with ParameterClient() as client:
        tables = RemoteTables(client)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(NotFound, match="weight, bias"):
            tables.adopt(model, ["emb"], optimizer)
        with pytest.raises(ValueError, match="rows and columns"):
            tables.adopt(model, ["bias"], optimizer)
        with pytest.raises(ValueError, match="does not have weight"):
            tables.adopt(model, ["weight"], torch.optim.SGD([model.bias], lr=0.1))


def test_evaluation_reads_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Embedding(4, 2))
    with ParameterClient() as client:
        tables = RemoteTables(client)
        tables.adopt(model, ["0.weight"], torch.optim.SGD(model.parameters(), lr=0.1))
        before = client.pull("0.weight")
        tables.begin(0, training=False)
        model(torch.tensor([1, 2])).sum().backward()
        tables.push()
        assert torch.equal(client.pull("0.weight"), before)


@pytest.mark.parametrize("mode", [None, "sum", "mean", "max"])
def test_a_remote_embedding_is_a_sparse_one(mode: str | None) -> None:
    make = functools.partial(torch.optim.SGD, lr=0.5)
    remote = RemoteEmbedding("t", ROWS, WIDTH, mode=mode, optimizer=make)
    everyone = torch.arange(ROWS)
    offsets = None if mode is None else torch.tensor([0, 2, 2, 5])
    with torch.no_grad():
        weight = (remote(everyone) if mode is None else remote(everyone, everyone)).clone()
    kind = nn.Embedding if mode is None else functools.partial(nn.EmbeddingBag, mode=mode)
    plain = kind(ROWS, WIDTH, sparse=mode != "max")
    plain.weight = nn.Parameter(weight)
    optimizer = make(plain.parameters())
    arguments = () if mode is None else (offsets,)
    for _ in range(4):
        ids = torch.randint(0, ROWS, (8,))
        torch.testing.assert_close(remote(ids, *arguments), plain(ids, *arguments))
        for one in (plain, remote):
            one(ids, *arguments).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert list(remote.parameters()) == []
    remote.close()


def test_a_remote_embedding_without_an_optimizer_says_so() -> None:
    with pytest.raises(ValueError, match="optimizer="):
        RemoteEmbedding("t", 4, 2)(torch.tensor([1]))
    with pytest.raises(ValueError, match="mode="):
        RemoteEmbedding("t", 4, 2, mode="min")
    with pytest.raises(ValueError, match="capacity=0"):
        RemoteEmbedding("t", None, 2, capacity=0)


def test_remote_embeddings_of_a_model_join_its_tables() -> None:
    model = nn.Sequential(RemoteEmbedding("a", None, 4), nn.Linear(4, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with ParameterClient() as client:
        tables = RemoteTables(client, cache=Cache())
        tables.adopt_modules(model, optimizer)
        tables.begin(0)
        model(torch.tensor([-5, 2**60])).sum().backward()
        tables.push()
        found = client.statistics()[0].tables["a"]
        assert (found.rows, found.step, found.rows_pushed) == (2, 1, 2)


@pytest.mark.parametrize("pull_bound", [0, 3])
def test_the_next_batch_is_asked_for_while_this_one_s_backward_runs(pull_bound: int) -> None:
    """The order of events says so, and the result is that without prefetching."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, ROWS, (6,), generator=generator) for _ in range(STEPS + 1)]
    start = nn.Embedding(ROWS, WIDTH)
    make = OPTIMIZERS["adagrad"]
    plain = copy.deepcopy(start)
    optimizer = make(plain.parameters())
    model = nn.Sequential(copy.deepcopy(start))
    log: list[str] = []
    fetched = threading.Event()

    def note(event: Event) -> None:
        if event.name == "tables.prefetch":
            log.append("prefetch")
            fetched.set()

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            fetched.wait(timeout=10)
            log.append("backward ends")
            return grad

    with ParameterClient() as client, subscribe(note):
        cache = Cache(capacity=ROWS, pull_bound=pull_bound)
        with RemoteTables(client, cache=cache) as tables:
            tables.adopt(model, ["0.weight"], make(model.parameters()))
            for step in range(STEPS):
                tables.begin(step)
                found, wanted = model(batches[step]), plain(batches[step])
                assert torch.equal(found, wanted)
                fetched.clear()
                ((caches, coming),) = tables._by_cache({"0.weight": torch.unique(batches[step + 1])})
                if not caches.ahead(coming, step, training=True).ids:
                    fetched.set()
                tables.prefetch({"0.weight": batches[step + 1]})
                Wait.apply(found).square().sum().backward()
                wanted.square().sum().backward()
                tables.push()
                optimizer.step()
                optimizer.zero_grad()
        first = log.index("prefetch")
        assert log[first + 1] == "backward ends"


def test_prefetching_needs_a_cache() -> None:
    with ParameterClient() as client, pytest.raises(ValueError, match="cache"):
        RemoteTables(client).prefetch({})


@pytest.mark.parametrize("way", ["flushed", "due in a step without rows"])
@pytest.mark.parametrize("mean", [True, False])
def test_what_waited_counts_by_its_workers_share_as_what_a_step_pushes(mean: bool, way: str) -> None:
    """Flushed gradients once counted as if their worker were alone, and those due in a step without rows not at all."""
    network = MemoryTransport()
    ids, weights = torch.tensor([1]), [1.0, 3.0]
    with ExitStack() as stack:
        server = stack.enter_context(ParameterServer(transport=network))
        enter = stack.enter_context
        bare = enter(ParameterClient([server.endpoint], transport=network))
        models = []
        for rank in range(2):
            client = enter(ParameterClient([server.endpoint], transport=network, worker=Worker(rank, 2)))
            table = RemoteEmbedding("t", ROWS, 2, init=0.0, optimizer=functools.partial(torch.optim.SGD, lr=1.0))
            tables = RemoteTables(client, cache=Cache(capacity=4, pull_bound=2, push_bound=2))
            tables.adopt_modules(table)
            models.append((table, tables))

        def steps(rank: int) -> None:
            table, tables = models[rank]
            tables.begin(0)
            table(ids).sum().backward()
            tables.push(weights[rank], mean=mean)
            for step in (1, 2):
                if way != "flushed":
                    tables.begin(step)
                    tables.push(0.0 if mean else 1.0, mean=mean)
            tables.flush()

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(steps, range(2)))
        assert torch.equal(-bare.sparse_pull("t", ids), torch.full((1, 2), 1.0 if mean else 2.0))


class _Gate:
    """A client whose pushes do not leave before they are let."""

    def __init__(self, client: ParameterClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.failure: Exception | None = None
        self._push = client.push_many
        monkeypatch.setattr(client, "push_many", self.push_many)

    def push_many(self, *args: Any, **options: Any) -> None:
        assert self.opened.wait(timeout=30)
        if self.failure is not None:
            raise self.failure
        self._push(*args, **options)


def _table_and_its_twin(
    make: Callable[..., torch.optim.Optimizer],
) -> tuple[nn.Module, nn.Module, list[torch.optim.Optimizer]]:
    plain = nn.Embedding(ROWS, WIDTH)
    model = nn.Sequential(copy.deepcopy(plain))
    return model, plain, [make(model.parameters()), make(plain.parameters())]


def _one_step(model: nn.Module, plain: nn.Module, own: torch.optim.Optimizer, ids: Tensor) -> None:
    """Compares what both read, and has both go back; only the twin moves here."""
    torch.testing.assert_close(model(ids), plain(ids), rtol=1e-5, atol=1e-6)
    for one in (model, plain):
        one(ids).square().sum().backward()
    own.step()
    own.zero_grad()


def test_a_push_is_on_its_way_while_the_next_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, (theirs, own) = _table_and_its_twin(OPTIMIZERS["sgd"])
    everyone = torch.arange(ROWS)
    with ParameterClient() as client:
        tables = RemoteTables(client, cache=Cache(capacity=ROWS, pull_bound=50, push_bound=1))
        tables.adopt(model, ["0.weight"], theirs)
        gate = _Gate(client, monkeypatch)
        tables.begin(0)
        _one_step(model, plain, own, everyone)
        gate.opened.set()
        tables.push()  # of nothing yet
        tables.begin(1)
        _one_step(model, plain, own, everyone)
        tables._arrive()
        gate.opened.clear()
        tables.push()  # of both steps, which returns though nothing leaves
        tables.begin(2)
        _one_step(model, plain, own, everyone)
        assert client.statistics()[0].tables["0.weight"].rows_pushed == 0
        gate.opened.set()
        tables.push()
        assert client.statistics()[0].tables["0.weight"].rows_pushed == ROWS
        tables.close()
        torch.testing.assert_close(client.pull("0.weight"), plain.weight, rtol=1e-5, atol=1e-6)


def test_a_row_that_is_not_here_is_read_once_its_push_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """The push leaves when the read has begun to wait for it: who does not wait reads too early, or nothing."""
    model, plain, (theirs, own) = _table_and_its_twin(OPTIMIZERS["sgd"])
    with ParameterClient() as client:
        tables = RemoteTables(client, cache=Cache("LFUOpt", capacity=1, pull_bound=50, push_bound=50))
        tables.adopt(model, ["0.weight"], theirs)
        gate = _Gate(client, monkeypatch)
        arrive = tables._arrive

        def let() -> None:
            gate.opened.set()
            arrive()

        monkeypatch.setattr(tables, "_arrive", let)
        for step in range(4):
            tables.begin(step)
            _one_step(model, plain, own, torch.tensor([1, 2, 3]))
            gate.opened.clear()
            tables.push()
        tables.close()


def test_a_push_that_did_not_arrive_is_raised_by_whoever_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, (theirs, own) = _table_and_its_twin(OPTIMIZERS["adagrad"])
    ids = torch.tensor([1, 2])
    with ParameterClient() as client:
        tables = RemoteTables(client, cache=Cache(capacity=ROWS, pull_bound=50, push_bound=50))
        tables.adopt(model, ["0.weight"], theirs)
        gate = _Gate(client, monkeypatch)
        gate.opened.set()
        gate.failure = DeadlineExceeded("gone", peer="shard 0", operation="push", step=0)
        tables.begin(0)
        _one_step(model, plain, own, ids)
        tables.push()
        for call in (tables.push, tables.flush, lambda: model(torch.tensor([5]))):
            with pytest.raises(DeadlineExceeded, match="gone"):
                call()
        gate.failure = None
        tables.drop_caches()  # as after loading a checkpoint: what was on its way no longer counts
        tables.begin(1)
        assert torch.equal(model(ids), client.pull("0.weight")[ids])
        tables.close()


def test_nothing_is_forgotten_before_what_is_on_its_way_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a push from before would move what a checkpoint has put back."""
    model, plain, (theirs, own) = _table_and_its_twin(OPTIMIZERS["adagrad"])
    with ParameterClient() as client, ThreadPoolExecutor(1) as thread:
        tables = RemoteTables(client, cache=Cache(capacity=ROWS, pull_bound=50, push_bound=50))
        tables.adopt(model, ["0.weight"], theirs)
        gate = _Gate(client, monkeypatch)
        tables.begin(0)
        _one_step(model, plain, own, torch.tensor([1, 2]))
        tables.push()
        dropped = thread.submit(tables.drop_caches)
        assert not futures.wait([dropped], timeout=0.2).done
        gate.opened.set()
        dropped.result(timeout=30)
        assert client.statistics()[0].tables["0.weight"].rows_pushed == 2
        tables.close()


def test_gradients_that_are_no_numbers_are_refused_and_spoil_no_cached_row() -> None:
    model, plain, (theirs, own) = _table_and_its_twin(OPTIMIZERS["sgd"])
    ids = torch.tensor([1, 2])
    with ParameterClient() as client:
        with RemoteTables(client, cache=Cache(capacity=ROWS, pull_bound=50, push_bound=50)) as tables:
            tables.adopt(model, ["0.weight"], theirs)
            for step in range(3):
                tables.begin(step)
                _one_step(model, plain, own, ids)
                tables.push()
            tables.begin(3)
            (model(ids) * torch.tensor(math.nan)).sum().backward()
            with pytest.raises(NonFinite, match="0.weight"):
                tables.push()
            tables.begin(3)
            _one_step(model, plain, own, ids)
            tables.push()
        assert sum(client.statistics()[0].refused_values.values()) == 1
        torch.testing.assert_close(client.pull("0.weight")[ids], plain.weight[ids], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "row-wise adagrad"])
def test_what_was_asked_ahead_is_not_asked_about_again(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Over several rounds of both bounds: no step waits for the servers to answer, and its rows are what they are."""
    model, plain, (theirs, own) = _table_and_its_twin(OPTIMIZERS[name])
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, ROWS, (3,), generator=draw).unique() for _ in range(60)]
    reads: list[int] = []
    with ParameterClient() as client:
        with RemoteTables(client, cache=Cache(capacity=ROWS, pull_bound=9, push_bound=9)) as tables:
            tables.adopt(model, ["0.weight"], theirs)
            pull = client.pull_many

            def noted(*args: Any, ahead: bool = False, **options: Any) -> dict[str, Pulled]:
                reads.extend([] if ahead else [tables._step])
                return pull(*args, ahead=ahead, **options)

            monkeypatch.setattr(client, "pull_many", noted)
            for step, ids in enumerate(batches[:-1]):
                tables.begin(step)
                found = model(ids)
                tables.prefetch({"0.weight": batches[step + 1]})
                if name == "sgd":  # of the others a sum of gradients is no sum of steps
                    torch.testing.assert_close(found, plain(ids), rtol=1e-4, atol=1e-5)
                for rows in (found, plain(ids)):
                    rows.sum().backward()
                tables.push()
                own.step()
                own.zero_grad()
            assert reads == [0]
        if name == "sgd":
            torch.testing.assert_close(client.pull("0.weight"), plain.weight, rtol=1e-4, atol=1e-5)


def test_gradients_of_a_row_whose_state_was_asked_for_wait_for_it() -> None:
    """Else its first gradient is pushed, and the state that comes is too old to be of use."""
    model, plain, (theirs, own) = _table_and_its_twin(OPTIMIZERS["adagrad"])
    ids = torch.tensor([1, 2])
    with ParameterClient() as client:
        with RemoteTables(client, cache=Cache(capacity=ROWS, pull_bound=50, push_bound=50)) as tables:
            tables.adopt(model, ["0.weight"], theirs)
            for step in range(4):
                tables.begin(step)
                found = model(ids)
                tables.prefetch({"0.weight": ids})
                torch.testing.assert_close(found, plain(ids), rtol=1e-5, atol=1e-6)
                for rows in (found, plain(ids)):
                    rows.square().sum().backward()
                tables.push()
                own.step()
                own.zero_grad()
            tables.begin(4)
            assert client.statistics()[0].tables["0.weight"].rows_pushed == 0
        assert client.statistics()[0].tables["0.weight"].rows_pushed == 2


def test_what_is_asked_ahead_is_as_of_the_step_that_asks() -> None:
    """Asked before the other worker's push of the step before, it is answered after it."""
    network = MemoryTransport()
    with ExitStack() as stack:
        enter = stack.enter_context
        server = enter(ParameterServer(transport=network))
        sides = []
        for rank in range(2):
            client = enter(ParameterClient([server.endpoint], transport=network, worker=Worker(rank, 2)))
            table = RemoteEmbedding("t", ROWS, 2, init=0.0, optimizer=functools.partial(torch.optim.SGD, lr=1.0))
            cache = Cache(capacity=ROWS, pull_bound=50, push_bound=50) if rank == 0 else None
            sides.append((table, RemoteTables(client, cache=cache)))
            sides[-1][1].adopt_modules(table)
        (table, tables), (other, others) = sides
        tables.begin(0)
        tables.push(mean=False)
        tables.begin(1)
        tables.prefetch({"t": torch.tensor([7])})
        assert tables._coming is not None
        # However long it is waited for: the other one has not pushed.
        assert not futures.wait([tables._coming[1]], timeout=0.2).done
        others.begin(0)
        other(torch.tensor([7])).sum().backward()
        others.push(mean=False)
        others.begin(1)
        others.push(mean=False)
        tables.push(mean=False)
        tables.begin(2)
        assert torch.equal(table(torch.tensor([7])), torch.full((1, 2), -1.0))
        tables.close()


@contextmanager
def _row_1_left() -> Iterator[tuple[ParameterClient, RemoteTables, nn.Module, nn.Module, torch.optim.Optimizer]]:
    """In step 1 row 2 has been read in the place of row 1, whose gradient of step 0 waits."""
    model, plain, (theirs, own) = _table_and_its_twin(OPTIMIZERS["sgd"])
    with (
        ParameterClient() as client,
        RemoteTables(client, cache=Cache(capacity=1, pull_bound=50, push_bound=50)) as tables,
    ):
        tables.adopt(model, ["0.weight"], theirs)
        tables.begin(0)
        _one_step(model, plain, own, torch.tensor([1]))
        tables.push()
        tables.begin(1)
        model(torch.tensor([2]))
        yield client, tables, model, plain, own


def test_what_left_for_an_earlier_read_of_the_step_is_in_the_row_that_a_later_one_reads() -> None:
    with _row_1_left() as (client, tables, model, plain, own):
        _one_step(model, plain, own, torch.tensor([1]))
        tables.push()
        tables.flush()
        torch.testing.assert_close(client.pull("0.weight"), plain.weight, rtol=1e-5, atol=1e-6)


def test_what_left_before_the_servers_rows_were_replaced_is_not_pushed_after() -> None:
    with _row_1_left() as (client, tables, *_):
        wanted = client.pull("0.weight")  # the step fails, so a checkpoint is loaded
        tables.drop_caches()
        tables.begin(1)
        tables.push()
        tables.flush()
        assert torch.equal(client.pull("0.weight"), wanted)


def test_a_lost_worker_is_named_while_its_push_is_waited_for() -> None:
    """What lies beside the steps counts by the workers' shares in the last one, so it waits for all of that."""
    network = MemoryTransport()
    lost = threading.Event()

    def watch() -> None:
        if lost.is_set():
            raise PeerLost("rank 1 is lost", peer="rank 1")

    with ExitStack() as stack:
        enter = stack.enter_context
        server = enter(ParameterServer(transport=network))
        enter(ParameterClient([server.endpoint], transport=network, worker=Worker(1, 2)))
        client = enter(
            ParameterClient(
                [server.endpoint], transport=network, worker=Worker(0, 2), watch=watch, heartbeat=0.05, timeout=20.0
            )
        )
        table = RemoteEmbedding("t", ROWS, 2, init=0.0, optimizer=functools.partial(torch.optim.SGD, lr=1.0))
        tables = RemoteTables(client, cache=Cache(capacity=ROWS, pull_bound=50, push_bound=50))
        tables.adopt_modules(table)
        tables.begin(0)
        table(torch.tensor([7])).sum().backward()
        tables.push(mean=False)
        lost.set()
        with pytest.raises(PeerLost, match="rank 1"):
            tables.flush()
        client.close()
        tables.abandon()


def test_a_push_that_overruns_its_deadline_is_said_to() -> None:
    model, plain, (theirs, own) = _table_and_its_twin(OPTIMIZERS["adagrad"])
    with ParameterClient(timeout=0.3, heartbeat=0.05) as client, pytest.MonkeyPatch.context() as patch:
        tables = RemoteTables(client, cache=Cache(capacity=ROWS, pull_bound=50, push_bound=50))
        tables.adopt(model, ["0.weight"], theirs)
        gate = _Gate(client, patch)
        tables.begin(0)
        _one_step(model, plain, own, torch.tensor([1]))
        tables.push()
        with pytest.raises(DeadlineExceeded, match="push"):
            tables.flush()
        gate.opened.set()
        tables.abandon()


def test_a_sum_too_large_is_refused_in_the_step_that_pushes_it() -> None:
    """A step later this worker would wait for the others in that step, and they for its push."""
    model, _, (theirs, _) = _table_and_its_twin(OPTIMIZERS["sgd"])
    with ParameterClient() as client:
        tables = RemoteTables(client, cache=Cache(capacity=ROWS, pull_bound=50, push_bound=1))
        tables.adopt(model, ["0.weight"], theirs)
        tables.begin(0)
        (model(torch.tensor([1])) * 3e38).sum().backward()
        tables.push()
        tables.begin(1)
        (model(torch.tensor([1])) * 3e38).sum().backward()
        with pytest.raises(NonFinite, match="0.weight"):
            tables.push()
        tables.abandon()


def test_a_dense_gradient_that_is_no_number_takes_nothing_out_of_the_cache() -> None:
    model, plain, (theirs, own) = _table_and_its_twin(OPTIMIZERS["sgd"])
    ids, nothing = torch.tensor([1, 2]), torch.empty(0, dtype=torch.int64)
    with ParameterClient() as client:
        with RemoteTables(client, cache=Cache(capacity=ROWS, pull_bound=50, push_bound=2)) as tables:
            tables.adopt(model, ["0.weight"], theirs)
            rule = tables._sources["0.weight"].rule()
            client.init_dense("bias", torch.zeros(2), rule)
            for step in range(2):
                tables.begin(step)
                _one_step(model, plain, own, ids)
                tables.push(beside={"bias": (nothing, torch.ones(2), rule)})
            tables.begin(2)
            model(ids).sum().backward()
            with pytest.raises(NonFinite, match="bias"):
                tables.push(beside={"bias": (nothing, torch.full((2,), math.nan), rule)})
            tables.begin(2)
            _one_step(model, plain, own, ids)
            tables.push(beside={"bias": (nothing, torch.ones(2), rule)})
        torch.testing.assert_close(client.pull("0.weight"), plain.weight, rtol=1e-5, atol=1e-6)


def test_closing_ends_the_threads_though_a_push_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, (theirs, own) = _table_and_its_twin(OPTIMIZERS["adagrad"])
    with ParameterClient() as client:
        tables = RemoteTables(client, cache=Cache(capacity=ROWS, pull_bound=50, push_bound=50))
        tables.adopt(model, ["0.weight"], theirs)
        gate = _Gate(client, monkeypatch)
        gate.opened.set()
        tables.begin(0)
        _one_step(model, plain, own, torch.tensor([1]))
        tables.prefetch({"0.weight": torch.tensor([2])})
        gate.failure = DeadlineExceeded("gone", peer="shard 0", operation="push", step=0)
        tables.push()
        with pytest.raises(DeadlineExceeded, match="gone"):
            tables.close()
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("anabranch-p")]
