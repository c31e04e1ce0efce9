"""A sum of several steps' gradients adds their squares to the second moments, not its own."""

from __future__ import annotations

import pytest
import torch

import anabranch as ab
from anabranch.errors import NonFinite
from anabranch.parameter_server import ParameterClient
from anabranch.parameter_server.client.cache_group import CacheGroup
from anabranch.parameter_server.client.row_messages import Pulled
from anabranch.tables import Cache, Constant, RowBlock, RowOptimizer, Table, TableSpec
from anabranch.tables.optimizers.row_optimizers import Family

STEPS, WIDTH = 50, 4
RULES = {
    "adagrad": RowOptimizer(Family.ADAGRAD, lr=0.1, eps=1e-10),
    "adagrad with decay": RowOptimizer(Family.ADAGRAD, lr=0.1, eps=1e-10, weight_decay=0.01, maximize=True),
    "row-wise adagrad": RowOptimizer(Family.ROW_WISE_ADAGRAD, lr=0.1, eps=1e-10),
    "adam": RowOptimizer(Family.ADAM, lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8),
    "amsgrad": RowOptimizer(Family.ADAM, lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, amsgrad=True),
    "rmsprop": RowOptimizer(Family.RMSPROP, lr=0.1, alpha=0.9, eps=1e-8),
    "centered rmsprop": RowOptimizer(Family.RMSPROP, lr=0.1, alpha=0.9, eps=1e-8, centered=True),
    "adamax": RowOptimizer(Family.ADAMAX, lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8),
    "ftrl": RowOptimizer(Family.FTRL, lr=0.1, beta=1.0, l1=0.01),
    "sgd": RowOptimizer(Family.SGD, lr=0.1, momentum=0.9),
}


def table(rule: RowOptimizer, dtype: torch.dtype = torch.float32) -> Table:
    return Table(TableSpec("t", 8, WIDTH, dtype, initial=Constant(0.5)), rule)


@pytest.mark.parametrize("name", RULES)
def test_a_gradient_of_one_step_is_as_without_squares(name):
    one, other = table(RULES[name]), table(RULES[name])
    for _ in range(3):
        ids, grads = torch.tensor([3, 5, 3]), torch.randn(3, WIDTH)
        one.push(ids, grads)
        other.push(ids, grads, torch.ones(3))
    assert torch.equal(one.pull_with_state(torch.arange(8)), other.pull_with_state(torch.arange(8)))


def test_alike_gradients_leave_adagrad_the_sum_that_single_steps_leave():
    single, summed, naive = (table(RULES["adagrad"], torch.float64) for _ in range(3))
    ids, grad = torch.tensor([3]), torch.full((1, WIDTH), 0.01, dtype=torch.float64)
    for _ in range(STEPS):
        single.push(ids, grad)
    summed.push(ids, STEPS * grad, torch.tensor([1 / STEPS]))
    naive.push(ids, STEPS * grad)
    wanted, found, without = (one.pull_with_state(ids)[:, WIDTH:] for one in (single, summed, naive))
    torch.testing.assert_close(found, wanted)
    assert (without > 40 * wanted).all()


def test_alike_gradients_leave_rmsprop_the_average_of_one_gradient_with_their_squares():
    single, summed = (table(RULES["rmsprop"], torch.float64) for _ in range(2))
    ids, grad = torch.tensor([3]), torch.full((1, WIDTH), 0.01, dtype=torch.float64)
    for one in (single, summed):
        one.push(ids, grad)
    single.push(ids, grad * STEPS**0.5)  # whose square is that of 50 gradients
    summed.push(ids, grad * STEPS, torch.tensor([1 / STEPS]))
    wanted, found = (one.pull_with_state(ids)[:, WIDTH:] for one in (single, summed))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


def test_row_wise_adagrads_sum_is_exact_whatever_the_gradients():
    single, summed = (table(RULES["row-wise adagrad"], torch.float64) for _ in range(2))
    grads = torch.randn(STEPS, WIDTH, dtype=torch.float64)
    for grad in grads:
        single.push(torch.tensor([3]), grad[None])
    whole = grads.sum(0, keepdim=True)
    summed.push(torch.tensor([3]), whole, (grads.square().sum() / whole.square().sum())[None])
    wanted, found = (one.pull_with_state(torch.tensor([3]))[:, WIDTH:] for one in (single, summed))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", RULES)
def test_a_worker_moves_its_rows_as_the_servers_will(name):
    """Its rows at once; and with what waits of two steps, those that come while it waits."""
    there, ids = table(RULES[name]), torch.tensor([1, 6])
    here = CacheGroup(["t"], Cache(capacity=4, push_bound=9), WIDTH, torch.float32, [lambda: RULES[name]])

    def read(step: int, version: int, rows: torch.Tensor) -> torch.Tensor:
        query = here.ask({"t": ids}, step, training=True)
        came = [position for position, known in enumerate(query.known.get("t", ids[:0]).tolist()) if known != version]
        versions = torch.full((len(came),), version)
        return query.answer({"t": Pulled(torch.tensor(came, dtype=torch.int64), versions, rows[came])})["t"]

    there.push(ids, torch.randn(2, WIDTH))
    first, second = torch.randn(2, 2, WIDTH)
    for step, grads in ((1, first), (2, second)):  # used again, a row comes with its state
        for at in range(step - 1, step + 1):
            read(at, 1, there.pull_with_state(ids))
        here.write({"t": (ids, grads)}, step)
        there.push(ids, grads)
    rows = torch.from_numpy(here._arrays.rows[0, :2])
    torch.testing.assert_close(rows, there.pull_with_state(ids))

    others = torch.cat([torch.randn(2, WIDTH), rows[:, WIDTH:]], 1)
    served, stamps = table(RULES[name]), torch.full((2,), 4)
    usage = torch.empty(0, 2, dtype=torch.int64)
    served.resume(3, served.history)
    served.restore(RowBlock(ids, others[:, :WIDTH], others[:, WIDTH:], stamps, usage))
    waits = first + second
    served.push(ids, waits, (first.square() + second.square()).sum(1) / waits.square().sum(1))
    torch.testing.assert_close(read(3, 2, others), served.pull(ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", RULES)
def test_squares_of_any_size_leave_numbers(name, dtype):
    there = table(RULES[name], dtype)
    for squares in (0.0, 1e-9, 1 / 50, 1e6):
        there.push(torch.arange(8), torch.randn(8, WIDTH).to(dtype), torch.full((8,), squares))
    assert torch.isfinite(there.pull_with_state(torch.arange(8))).all()


def test_parts_of_one_row_have_the_mean_of_their_squares_by_size():
    together, apart = table(RULES["adagrad"]), table(RULES["adagrad"])
    grads = torch.tensor([[1.0] * WIDTH, [3.0] * WIDTH])
    apart.push(torch.tensor([2, 2]), grads, torch.tensor([0.5, 0.1]))
    together.push(torch.tensor([2]), grads.sum(0, keepdim=True), torch.tensor([(0.5 * 4 + 0.1 * 36) / 40]))
    ids = torch.arange(8)
    torch.testing.assert_close(apart.pull_with_state(ids), together.pull_with_state(ids))


def test_an_id_that_is_not_admitted_takes_nothing_along():
    spec = TableSpec("t", None, WIDTH, initial=Constant(0.5), capacity=1)
    full = Table(spec, RULES["adagrad"])
    full.push(torch.tensor([7, 9]), torch.ones(2, WIDTH), torch.tensor([1.0, 0.02]))
    assert full.used == 1
    assert torch.isfinite(full.pull_with_state(torch.tensor([7, 9]))).all()


def test_a_cache_keeps_the_squares_of_waiting_gradients():
    rule = RowOptimizer(Family.SGD, lr=0.1)
    cache = CacheGroup(["t"], Cache(capacity=4, push_bound=3), 2, torch.float32, [lambda: rule])
    ids = torch.tensor([5])
    grads = torch.tensor([[1.0, 0.0], [1.0, 1.0], [-1.0, 1.0], [1.0, 0.0]])
    for step, grad in enumerate(grads):
        query = cache.ask({"t": ids}, step, training=True)
        new = int(step == 0)
        query.answer({"t": Pulled(torch.arange(new), torch.ones(new).long(), torch.zeros(new, 2))})
        due, summed, squares = cache.write({"t": (ids, grad[None])}, step)["t"]
    assert (due.tolist(), summed.tolist()) == ([5], [[2.0, 2.0]])
    assert squares.tolist() == [pytest.approx(6 / 8)]
    cache.write({"t": (ids, torch.ones(1, 2))}, 4)
    cache.write({"t": (ids, -torch.ones(1, 2))}, 5)
    assert cache.waiting()["t"][2].tolist() == [1.0]  # no sum, no square of it


def test_squares_from_the_wire_are_checked():
    with ParameterClient() as client:
        client.init("t", (8, WIDTH), kind="rows", optimizer=lambda rows: torch.optim.Adagrad(rows, lr=0.1))
        given = {"t": (torch.tensor([1]), torch.ones(1, WIDTH))}
        for bad in (-1.0, torch.nan, torch.inf):
            with pytest.raises(NonFinite, match="squares"):
                client.push_many(given, squares={"t": torch.tensor([bad])})
        assert (client.pull("t") == 0).all()
        client.push_many(given, squares={"t": torch.ones(1)})
        assert (client.pull("t")[1] != 0).all()


def test_a_batch_without_ids_changes_no_row() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    before = table.weight.detach().clone()
    optimizer = ab.RowWiseAdagrad(table.parameters(), lr=0.1)
    table(torch.empty(0, dtype=torch.long)).sum().backward()
    optimizer.step()
    assert torch.equal(table.weight, before)
