"""Models whose tables live on servers against the same models here: the same outputs and the same rows, to the bit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from remote_tables_models import OPTIMIZERS, ROWS, WIDTH
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.errors import NotFound
from anabranch.parameter_server import ParameterClient, RemoteEmbedding, RemoteTables
from anabranch.parameter_server.client.remote_weight import distinct_ids
from anabranch.tables import Cache, RowWiseAdagrad

pytestmark = pytest.mark.usefixtures("compiled_for_all_dtypes")

STEPS = 6


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


@pytest.mark.quick_cases(10)
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
            rounding = 1e-5 if name in ("rmsprop", "ftrl") else 0  # torch's roots are not rounded as IEEE's
            torch.testing.assert_close(found, wanted, rtol=rounding, atol=rounding)
            wanted.backward()
            found.backward()
            tables.push()
            for one in (optimizer, theirs, schedule, their_schedule):
                one.step()
        tables.flush()
        for table, weight in zip(NAMES, (plain.first.weight, plain.bag.weight), strict=True):
            torch.testing.assert_close(client.pull(table), weight.detach(), rtol=0, atol=1e-6)
        assert list(parameters_here(remote)) == ["head"]
        assert dict(remote.named_parameters()).keys() == dict(plain.named_parameters()).keys()


@pytest.mark.quick_cases(4)
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
def test_waiting_gradients_of_evicted_rows_are_pushed_once(dtype: torch.dtype) -> None:
    """Rows leave at once; bfloat16 rows, which no group has, show only that gradients are as many."""
    plain = nn.Embedding(ROWS, WIDTH, dtype=dtype)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.125)
    model = nn.Sequential(copy.deepcopy(plain))
    with ParameterClient() as client:
        tables = RemoteTables(client, cache=Cache("LRU", capacity=4, pull_bound=50, push_bound=50))
        tables.adopt(model, ["0.weight"], torch.optim.SGD(model.parameters(), lr=0.125))
        for step in range(20):
            ids = (torch.arange(3) * step) % ROWS
            tables.begin(step)
            for one in (plain, model):
                one(ids).sum().backward()
            tables.push()
            optimizer.step()
            optimizer.zero_grad()
        tables.close()
        assert tables.statistics()["0.weight"].evictions > 5
        tolerance = 1e-12 if dtype == torch.float64 else 0.05
        torch.testing.assert_close(client.pull("0.weight"), plain.weight.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("make", "use", "words"),
    [
        (lambda: nn.Embedding(4, 2, max_norm=1.0), lambda m: m(torch.tensor([1])), "max_norm"),
        (lambda: nn.Embedding(4, 2), lambda m: F.linear(torch.ones(1, 2), m.weight), "cannot reach its numbers"),
        (lambda: nn.Embedding(4, 2), lambda m: m.weight.sum(), "cannot reach its numbers"),
        (lambda: nn.Embedding(4, 2), lambda m: m(torch.tensor([4])), "ids 0 to 3"),
    ],
)
def test_options_unsupported_by_servers_are_refused_with_a_reason(
    make: Callable[[], nn.Module], use: Callable[[nn.Module], object], words: str
) -> None:
    model = nn.Sequential(make())
    with ParameterClient() as client:
        tables = RemoteTables(client)
        tables.adopt(model, ["0.weight"], torch.optim.SGD(model.parameters(), lr=0.1))
        assert repr(model[0].weight) == "<0.weight: (4, 2), torch.float32, on the servers>"
        tables.begin(0)
        with pytest.raises(ValueError, match=words):
            use(model[0])


def test_a_parameter_that_is_not_a_table_of_the_model_is_refused() -> None:
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


def test_the_distinct_ids_of_all_tables_at_once_are_those_of_each() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = {str(limit): limit for limit in (1, 2, 100, 5000, 10**7, 2**40)}
    wanted = {name: (torch.rand(99, generator=draw).double() ** 3 * limit).long() for name, limit in rows.items()}
    wanted["100"][:3] = torch.tensor([-1, 100, 2**62])
    wanted["5000"] = wanted["5000"].int()
    for name, found in distinct_ids(wanted, rows).items():
        ids = wanted[name].long()
        assert torch.equal(found.ids, ids[(ids >= 0) & (ids < rows[name])].unique())
        places = found.of(wanted[name])
        assert (places is None) == (name == "100")
        assert places is None or torch.equal(found.ids[places], ids)


def test_ids_changed_in_place_after_they_were_expected_read_and_train_their_own_rows() -> None:
    model = nn.Sequential(nn.Embedding(10, 1, sparse=True))
    model[0].weight.data = torch.arange(10.0).view(10, 1)
    with ParameterClient() as client:
        tables = RemoteTables(client)
        tables.adopt(model, ["0.weight"], torch.optim.SGD(model.parameters(), lr=1.0))
        ids = torch.tensor([1, 2, 3])
        tables.begin(0)
        tables.expect({"0.weight": ids})
        ids += 5
        rows = model(ids)
        assert rows.flatten().tolist() == [6.0, 7.0, 8.0]
        rows.sum().backward()
        tables.push()
        assert client.pull("0.weight").flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 6.0, 7.0, 9.0]


def test_ids_of_a_dynamic_table_changed_in_place_after_their_rows_were_read_read_their_own() -> None:
    model = nn.ModuleDict({name: RemoteEmbedding(name, None, 1) for name in "ab"})
    with ParameterClient() as client:
        tables = RemoteTables(client)
        tables.adopt_modules(model, torch.optim.SGD([torch.zeros(1)], lr=1.0))
        ids = torch.tensor([1, 2, 3])
        tables.begin(0)
        tables.expect(dict.fromkeys("ab", ids), certain=True)
        ids += 5
        assert torch.equal(model["a"](ids), client.sparse_pull("a", torch.tensor([6, 7, 8])))


def test_evaluation_reads_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Embedding(4, 2))
    with ParameterClient() as client:
        tables = RemoteTables(client)
        tables.adopt(model, ["0.weight"], torch.optim.SGD(model.parameters(), lr=0.1))
        before = client.pull("0.weight")
        for begin in (lambda: None, lambda: tables.begin(0, training=False), lambda: tables.end(0)):
            begin()
            rows = model(torch.tensor([1, 2]))
            assert torch.equal(rows, before[1:3])
            with pytest.raises(ValueError, match="table 0.weight outside of a training step"):
                rows.sum().backward()
        tables.begin(0)
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
    assert not parameters_here(remote)
    remote.close()


def test_a_remote_embedding_without_an_optimizer_is_an_error() -> None:
    with pytest.raises(ValueError, match="optimizer="):
        RemoteEmbedding("t", 4, 2)(torch.tensor([1]))
    with pytest.raises(ValueError, match="mode is None, 'sum'"):
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


@pytest.mark.parametrize("make", [torch.optim.Adam, RowWiseAdagrad])
def test_rows_in_this_process_go_on_under_another_optimizer_whose_state_begins_anew(make: Any) -> None:
    module, ids = RemoteEmbedding("t", 6, 2, init=1.0), torch.tensor([1, 4])
    plain = nn.Embedding.from_pretrained(torch.ones(6, 2), freeze=False, sparse=False)
    for rule in (functools.partial(torch.optim.SGD, lr=0.5), functools.partial(make, lr=0.1)):
        optimizer = rule(plain.parameters())
        with ParameterClient() as client, RemoteTables(client) as tables:
            tables.adopt_modules(module, rule([nn.Parameter(torch.zeros(1))]))
            tables.begin(0)
            for one in (module, plain):
                one(ids).square().sum().backward()
            tables.push()
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(client.pull("t"), plain.weight.detach())
            tables.release_modules(module)
