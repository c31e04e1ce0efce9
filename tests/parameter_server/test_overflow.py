"""Finite gradients whose update is not: refused as a whole, counted, and every row as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from anabranch.errors import NonFinite
from anabranch.parameter_server import ParameterClient, ParameterServer, Worker
from anabranch.tables import FTRL, Constant, Family, Normal, RowOptimizer, RowTable, TableSpec
from anabranch.tables.optimizers.overflow import Bounds, peak_of
from anabranch.testing import MemoryTransport

RULES = {
    "sgd": functools.partial(torch.optim.SGD, lr=1.0),
    "momentum": functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.5),
    "adam": functools.partial(torch.optim.Adam, lr=0.1),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.1, momentum=0.9),
    "adamax": functools.partial(torch.optim.Adamax, lr=0.1),
    "amsgrad": functools.partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "ftrl": functools.partial(FTRL, lr=0.1),
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
            server._persistence.checkpoint = lambda: None  # type: ignore[method-assign]
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
    ("adagrad", {"size": 3e30}),  # its square is not a float32
    ("adam", {"size": 3e30}),
    ("adam", {"size": 1.0, "bias": 3e30}),
    ("adagrad", {"size": 1.0, "bias": 3e30}),
    ("rmsprop", {"size": 3e30}),
    ("rmsprop", {"size": 1.0, "bias": 3e30}),
    ("adamax", {"size": 3e38, "ids": torch.tensor([1, 1])}),
    ("amsgrad", {"size": 3e30}),
    ("ftrl", {"size": 3e30}),
]


@pytest.mark.parametrize(("rule", "given"), CASES)
def test_a_push_that_would_overflow_changes_nothing_and_is_counted(
    rule: str, given: dict[str, float], serve: Callable[..., tuple[ParameterServer, ParameterClient]]
) -> None:
    server, client = serve()
    make(client, rule)
    push(client, 1.0)
    before = state(client, rule)
    with pytest.raises(NonFinite, match="(second|bias) (is|are) finite, but the updated"):
        push(client, **given)
    assert same(before, state(client, rule))
    assert sum(server.statistics().refused_values.values()) == 1
    push(client, 1.0)  # whom the refused one has not harmed
    after = state(client, rule)
    assert all(torch.isfinite(part).all() for part in after)
    _, client = serve()  # and so the log says
    assert same(after, state(client, rule))


@pytest.mark.parametrize("first", ["t", "u"])
def test_a_push_that_would_overflow_evicts_no_row_for_its_new_ids(
    first: str, serve: Callable[..., tuple[ParameterServer, ParameterClient]]
) -> None:
    """Whichever of its tables would overflow."""
    _, client = serve()
    known, new = torch.tensor([1, 2]), torch.tensor([2, 3, 3])
    for name in "tu":
        spec = TableSpec(name, None, 1, initial=Constant(0.0), capacity=2)
        client.init_table(spec, RowOptimizer.from_factory(RULES["sgd"]))
        client.sparse_push(name, known, torch.tensor([[-1.0], [-2.0]]))
    large, ordinary = torch.full((3, 1), 3e38), torch.full((3, 1), -1.0)
    second = "u" if first == "t" else "t"
    with pytest.raises(NonFinite, match=f"gradients of {first} are finite"):
        client.push_many({name: (new, large if name == first else ordinary) for name in "tu"})
    for name in "tu":
        assert client.sparse_pull(name, known).tolist() == [[1.0], [2.0]]
        assert client.statistics()[0].tables[name].evictions == 0
    client.push_many({first: (new[:2], large[:2] / 20), second: (new, ordinary)})  # large, but it does not overflow
    assert torch.equal(client.sparse_pull(first, new[:2]), torch.tensor([[2.0], [0.0]]) - large[:2] / 20)
    assert client.sparse_pull(second, new[:2]).tolist() == [[3.0], [2.0]]


def same(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_pushes_that_overflow_when_summed_are_refused_when_they_do(
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


def test_under_bsp_a_worker_with_an_overflowing_push_is_refused_and_may_push_another(
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


OF_FAMILY = {Family.FTRL: {"beta": 1.0, "l1": 0.1, "l2": 0.1}, Family.RMSPROP: {"alpha": 0.9}}


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("family", list(Family))
def test_no_number_ever_passes_the_bounds(family: Family, squares: bool) -> None:
    """The bounds are what lets a push go without a look at its rows."""
    for seed in range(6):
        torch.manual_seed(seed)
        rule = RowOptimizer(
            family, lr=10.0 ** (seed - 4), weight_decay=0.01 * (seed % 2),
            momentum=0.9 * (family in (Family.SGD, Family.RMSPROP)), beta1=0.9, beta2=0.99, eps=1e-8,
            amsgrad=family is Family.ADAM and bool(seed % 2), **OF_FAMILY.get(family, {}),
        )  # fmt: skip
        table = RowTable(TableSpec("t", 6, 4, initial=Normal(0, 10.0), every_row_moves=True), rule)
        for _ in range(20):
            ids, grads = torch.randint(0, 6, (5,)), torch.randn(5, 4) * 10.0 ** torch.randint(-9, 6, (1,)).item()
            own = torch.rand(5).bfloat16() * 3 if squares else None
            bounds = table.bounds_after(peak_of([grads.reshape(-1)], own))
            assert bounds.safe
            table.bounds = bounds
            table.push(ids, grads, own)
            table.pull(torch.arange(6))
            block = table.block(0, 6)
            found = table._bounds_of(block.values, block.sums)
            assert found.weights <= bounds.weights
            assert found.first <= bounds.first * 1.0001
            assert found.sums <= bounds.sums * 1.0001


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("family", list(Family))
def test_tens_of_thousands_of_ordinary_steps_do_not_reach_the_limit(family: Family, weight_decay: float) -> None:
    momentum = 0.9 if family in (Family.SGD, Family.RMSPROP) else 0.0
    rule = RowOptimizer(
        family, lr=0.01, momentum=momentum, weight_decay=weight_decay, beta1=0.9, beta2=0.999, eps=1e-8,
        **OF_FAMILY.get(family, {}),
    )  # fmt: skip
    bounds = Bounds(1.0)
    for _ in range(50_000 if weight_decay else 1_000):
        bounds = bounds.after(rule, 1e4, 16)
    assert bounds.safe


def test_a_variance_that_rounding_makes_negative_is_refused(
    serve: Callable[..., tuple[ParameterServer, ParameterClient]],
) -> None:
    """Centered RMSprop takes its root, which is NaN in ``torch.optim`` after 14 alike gradients."""
    _, client = serve()
    centered = functools.partial(torch.optim.RMSprop, lr=0.1, alpha=0.3, centered=True)
    client.init_table(TableSpec("t", 6, 64, initial=Constant(0.0)), RowOptimizer.from_factory(centered))
    ids, alike = torch.tensor([1]), torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    refused = 0
    for _ in range(40):
        try:
            client.sparse_push("t", ids, alike)
        except NonFinite:
            refused += 1
    assert refused
    assert torch.isfinite(client.sparse_pull("t", ids)).all()
    client.sparse_push("t", ids, -alike)  # and goes on with others


def test_a_table_that_has_reached_the_limit_by_count_alone_is_measured() -> None:
    table = RowTable(TableSpec("t", 6, 4, initial=Constant(1.0)), RowOptimizer(Family.SGD, lr=1.0))
    table.pull(IDS)
    table.bounds = Bounds(9e36, 9e36)
    assert not table.bounds_after(5e36).safe
    table.measure()
    assert table.bounds_after(1.0) == Bounds(2.0)


def test_a_peak_bounds_every_sum_of_gradients() -> None:
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        grads = torch.randn(seed + 1, generator=generator) * 10.0 ** (seed - 15)
        assert peak_of([grads]) >= grads.abs().sum().item() * (1 - 1e-6)
    assert not peak_of([torch.tensor([float("nan")])]) <= 1e38
    assert peak_of([torch.tensor([3e38, 3e38])]) > 3e38


def test_a_table_restored_with_large_numbers_is_checked_for_overflow() -> None:
    rule = RowOptimizer(Family.SGD, lr=1.0)
    for number, safe in ((1.0, True), (2e38, False)):
        source, table = (RowTable(TableSpec("t", 6, 4, initial=Constant(start)), rule) for start in (number, 0.0))
        source.pull(IDS)
        table.restore(source.block(0, 6))
        assert table.bounds_after(1.0).safe == safe
