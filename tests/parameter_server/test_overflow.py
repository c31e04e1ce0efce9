"""Finite gradients whose update is not: refused as a whole, counted, and every row as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from anabranch.errors import NonFinite
from anabranch.parameter_server import (
    Constant,
    Family,
    ParameterClient,
    ParameterServer,
    RowOptimizer,
    RowTable,
    TableSpec,
    Worker,
)
from anabranch.parameter_server.overflow import peak_of
from anabranch.parameter_server.table_group import TableGroup
from anabranch.testing import MemoryTransport

RULES = {
    "sgd": functools.partial(torch.optim.SGD, lr=1.0),
    "momentum": functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.5),
    "adam": functools.partial(torch.optim.Adam, lr=0.1),
}
NAMES = ["first", "second"]
IDS = torch.tensor([1, 3])


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., tuple[ParameterServer, ParameterClient]]]:
    """Makes a server that keeps a log, and a client of it; what was there before is found again."""
    network = MemoryTransport()
    with ExitStack() as stack:

        def make(worker: Worker | None = None) -> tuple[ParameterServer, ParameterClient]:
            stack.pop_all().close()
            server = stack.enter_context(
                ParameterServer(transport=network, durability="log", checkpoint_dir=tmp_path)
            )  # fmt: skip
            server._keeper.checkpoint = lambda: None  # type: ignore[method-assign]
            client = ParameterClient([server.endpoint], transport=network, worker=worker, timeout=20)
            return server, stack.enter_context(client)

        yield make


def make(client: ParameterClient, rule: str) -> None:
    for name in NAMES:
        client.init_table(
            TableSpec(name, 6, 4, initial=Constant(0.5)), RowOptimizer.from_factory(RULES[rule])
        )  # fmt: skip
    client.init("bias", (3,), init=0.25, optimizer=RULES[rule])


def push(client: ParameterClient, size: float, ids: torch.Tensor = IDS, bias: float = 1.0) -> None:
    ordinary = torch.linspace(-1, 1, 8).view(2, 4)
    large = torch.full((len(ids), 4), size)
    client.push_many({"first": (IDS, ordinary), "second": (ids, large), "bias": (IDS[:0], torch.full((3,), bias))})


def state(client: ParameterClient, rule: str) -> list[torch.Tensor]:
    kept = [client.read_kept(name, RowOptimizer.from_factory(RULES[rule])) for name in (*NAMES, "bias")]
    return [part for one in kept for part in (one.values, *one.states, torch.tensor(one.step))]


CASES = [
    ("sgd", {"size": 3e38, "ids": torch.tensor([1, 1])}),  # two duplicates of 3e38
    ("momentum", {"size": 3e38, "ids": torch.tensor([1, 1])}),
    ("adagrad", {"size": 3e30}),  # its square is no float32
    ("adam", {"size": 3e30}),
    ("adam", {"size": 1.0, "bias": 3e30}),
    ("adagrad", {"size": 1.0, "bias": 3e30}),
]


@pytest.mark.parametrize(("rule", "given"), CASES)
def test_a_push_that_would_overflow_changes_nothing_and_is_counted(
    rule: str, given: dict[str, float], serve: Callable[..., tuple[ParameterServer, ParameterClient]]
) -> None:
    server, client = serve()
    make(client, rule)
    push(client, 1.0)
    before = state(client, rule)
    with pytest.raises(NonFinite, match="(second|bias) (is|are) finite, and what"):
        push(client, **given)
    assert same(before, state(client, rule))
    assert sum(server.statistics().refused_values.values()) == 1
    push(client, 1.0)  # whom the refused one has not harmed
    after = state(client, rule)
    assert all(torch.isfinite(part).all() for part in after)
    _, client = serve()  # and so the log says
    assert same(after, state(client, rule))


def same(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_pushes_that_add_up_to_what_overflows_are_refused_when_they_do(
    serve: Callable[..., tuple[ParameterServer, ParameterClient]],
) -> None:
    """Three pushes of -3e38 read NaN."""
    _, client = serve()
    make(client, "momentum")
    taken = 0
    for _ in range(3):
        before = state(client, "momentum")
        try:
            push(client, -3e38)
            taken += 1
        except NonFinite:
            assert same(before, state(client, "momentum"))
    assert taken < 3
    assert all(torch.isfinite(part).all() for part in state(client, "momentum"))


def test_under_bsp_the_worker_whose_push_is_too_much_is_refused_and_may_push_another(
    serve: Callable[..., tuple[ParameterServer, ParameterClient]],
) -> None:
    server, first = serve(Worker(0, 2))
    with ParameterClient([server.endpoint], transport=first._client._transport, worker=Worker(1, 2)) as second:
        first.init_table(TableSpec("t", 4, 2, initial=Constant(0.0)), RowOptimizer.from_factory(RULES["sgd"]))
        one = torch.tensor([1])
        first.push_many({"t": (one, torch.full((1, 2), 3e38))}, step=0, mean=False)
        with pytest.raises(NonFinite):
            second.push_many({"t": (one, torch.full((1, 2), 3e38))}, step=0, mean=False)
        second.push_many({"t": (one, torch.full((1, 2), -3e38))}, step=0, mean=False)
        assert second.sparse_pull("t", one).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("kind", ["compiled", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("family", list(Family))
def test_the_kernels_say_when_a_weight_has_become_too_large(family: Family, dtype: torch.dtype, kind: str) -> None:
    rule = RowOptimizer(family, lr=1e6, beta1=0.9, beta2=0.99, eps=1e-8)
    table = RowTable(
        TableSpec("t", 6, 4, dtype, Constant(9.99e14 if dtype != torch.bfloat16 else 9.9e14)), rule, kernels_kind=kind
    )
    table.wild = False
    table.push(IDS, torch.ones(2, 4, dtype=dtype))
    assert not table.wild
    for _ in range(3):
        table.push(IDS, torch.full((2, 4), -1e12, dtype=dtype))
    assert table.wild == (family is Family.SGD)
    table.rule = RowOptimizer(family, lr=1e14, beta1=0.9, beta2=0.99, eps=1e-8)
    assert table.careful
    table.push(IDS, torch.full((2, 4), -1e12, dtype=dtype))
    assert table.wild


@pytest.mark.parametrize("family", list(Family))
def test_a_group_of_tables_says_which_of_them(family: Family) -> None:
    rule = RowOptimizer(family, lr=1e14, beta1=0.9, beta2=0.99, eps=1e-8)
    tables = [RowTable(TableSpec(name, 6, 4, initial=Constant(0.0)), rule) for name in NAMES]
    group = TableGroup(tables)
    grads = torch.zeros(2, 2, 4)
    group.push(torch.stack([IDS, IDS]), grads)
    grads[:, 1] = -1e12
    for _ in range(60):
        group.push(torch.stack([IDS, IDS]), grads)
    assert [table.wild for table in tables] == [False, True]


def test_a_peak_bounds_every_sum_of_gradients() -> None:
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        grads = torch.randn(seed + 1, generator=generator) * 10.0 ** (seed - 15)
        assert peak_of([grads]) >= grads.abs().sum().item() * (1 - 1e-6)
    assert not peak_of([torch.tensor([float("nan")])]) <= 1e38
    assert peak_of([torch.tensor([3e38, 3e38])]) > 3e38


def test_a_table_that_comes_from_a_checkpoint_with_large_numbers_is_known_for_it() -> None:
    rule = RowOptimizer(Family.ADAM, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8)
    for number, careful in ((1.0, False), (1e20, True)):
        source, table = (RowTable(TableSpec("t", 6, 4, initial=Constant(number)), rule) for _ in range(2))
        source.pull(IDS)
        table.wild = False
        table.restore(source.block(0, 6))
        assert table.careful == careful
