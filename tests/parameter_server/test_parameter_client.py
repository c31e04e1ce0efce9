"""Clients and shards over a network: pulled values equal those of the plain loop, and each push counts once."""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import client_of, cluster
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded, NonFinite, NotFound, ProtocolError, SchemaError
from anabranch.parameter_server import Merging, ParameterClient, ParameterServer, Worker
from anabranch.parameter_server.client import saved_tables
from anabranch.parameter_server.client.saved_tables import write_rows
from anabranch.tables import Constant, Normal, RowOptimizer, TableSpec
from anabranch.transport import MemoryTransport, client, frame
from anabranch.transport.frame import memory_to_send

pytestmark = pytest.mark.usefixtures("compiled_for_all_dtypes")

SGD = functools.partial(torch.optim.SGD, lr=0.5)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)


@pytest.mark.parametrize("shards", [1, 3])
def test_dense_parameters_and_rows_move_as_in_the_plain_loop(shards: int) -> None:
    bias, table = torch.nn.Parameter(torch.randn(48)), torch.nn.Parameter(torch.randn(40, 16))
    optimizer = ADAM([bias, table], fused=True)
    with client_of(shards) as client:
        client.init("bias", (48,), init=bias.detach(), optimizer=ADAM)
        client.init_table(TableSpec("table", 40, 16, every_row_moves=True), RowOptimizer.from_factory(ADAM))
        write_rows(client, "table", table.detach(), RowOptimizer.from_factory(ADAM))
        for _ in range(5):
            ids = torch.randint(0, 40, (3, 4))
            bias.grad, row_grads = torch.randn(48), torch.randn(3, 4, 16)
            table.grad = torch.zeros(40, 16).index_add(0, ids.reshape(-1), row_grads.reshape(-1, 16))
            assert torch.equal(client.sparse_pull("table", ids), table.detach()[ids])
            client.sparse_push("table", ids, row_grads)
            pulled = client.push_pull("bias", bias.grad)
            optimizer.step()
            assert torch.equal(pulled, bias.detach())
        assert torch.equal(client.pull("table"), table.detach())


def test_the_fused_forms_are_a_push_and_a_pull() -> None:
    with ParameterClient() as client:
        client.init("t", (6, 2), kind="rows", init=1.0, optimizer=SGD)
        found = client.ss_push_pull("t", torch.tensor([1, 2]), torch.ones(2, 2), torch.tensor([2, 3]))
        assert found.tolist() == [[0.5, 0.5], [1.0, 1.0]]
        whole = client.sd_push_pull("t", torch.tensor([0, 0]), torch.ones(2, 2))
        assert whole[:4, 0].tolist() == [0.0, 0.5, 0.5, 1.0]


def test_rows_of_several_dimensions_keep_theirs() -> None:
    with ParameterClient() as client:
        values = torch.randn(5, 2, 3)
        client.init("t", (5, 2, 3), kind="rows", init=lambda shape: values, optimizer=SGD)
        assert torch.equal(client.pull("t"), values)
        assert torch.equal(client.sparse_pull("t", torch.tensor([[4], [0]])), values[torch.tensor([[4], [0]])])
        client.push("t", torch.ones(5, 2, 3))
        assert torch.equal(client.pull("t"), values - 0.5)


def test_first_values_of_a_table_take_no_push_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that comes between the look whether there were any and the write."""
    values = torch.ones(4, 1)
    with cluster(2) as servers:
        first, second = servers.client(), servers.client()
        first.init("t", (4, 1), kind="rows", init=values, optimizer=SGD)
        write = saved_tables._restore_rows

        def push_before(*arguments: Any) -> None:
            first.sparse_push("t", torch.tensor([1]), -values[:1])
            write(*arguments)

        monkeypatch.setattr(saved_tables, "_restore_rows", push_before)
        second.init("t", (4, 1), kind="rows", init=values, optimizer=SGD)
        assert first.pull("t").flatten().tolist() == [1.0, 1.5, 1.0, 1.0]


def test_another_client_learns_the_existing_tables() -> None:
    with cluster(2) as servers:
        first, second = servers.client(), servers.client()
        first.init("t", (50, 2), kind="rows", init=Normal(), optimizer=SGD)
        first.init("b", (3,), init=2.0)
        assert torch.equal(second.pull("t"), first.pull("t"))
        assert second.pull("b").tolist() == [2.0] * 3
        with pytest.raises(NotFound, match="no table or parameter 'c'"):
            second.pull("c")


def test_bad_input_is_a_typed_error_and_changes_nothing() -> None:
    with client_of(2) as client:
        init = functools.partial(client.init, kind="rows")
        init("t", (10, 2), init=1.0, optimizer=SGD)
        zero = torch.tensor([0])
        for kind, words, ask in [
            (NotFound, r"ids\[1\] is 10", lambda: client.sparse_push("t", torch.tensor([0, 10]), torch.ones(2, 2))),
            (NotFound, r"ids\[0\] is -1", lambda: client.sparse_pull("t", torch.tensor([-1]))),
            (SchemaError, "int64", lambda: client.sparse_pull("t", zero.int())),
            (SchemaError, "1 ids need 2 numbers each", lambda: client.sparse_push("t", zero, torch.ones(1, 3))),
            (NonFinite, "NaN", lambda: client.sparse_push("t", zero, torch.tensor([[1.0, float("nan")]]))),
            (SchemaError, "width", lambda: init("t", (10, 3), init=1.0, optimizer=SGD)),
            (SchemaError, "kept for SGD", lambda: init("t", (10, 2), init=1.0, optimizer=ADAM)),
            (ValueError, "LBFGS", lambda: init("u", (10, 2), optimizer=torch.optim.LBFGS)),
            (ValueError, "int64", lambda: init("u", (10, 2), dtype=torch.int64)),
            (ValueError, "not a table name", lambda: init("../u", (10, 2))),
        ]:
            with pytest.raises(kind, match=words):
                ask()
        assert (client.pull("t") == 1).all()
        assert sum(sum(found.refused_values.values()) for found in client.statistics()) == 1


@pytest.mark.parametrize("shape", [(2, 3), (6,), (1, 6), (6, 1), (3, 2, 2)])
def test_a_gradient_of_another_shape_than_the_ids_and_their_rows_is_refused(shape: tuple[int, ...]) -> None:
    with ParameterClient() as client:
        client.init("t", (3, 2), kind="rows", init=1.0, optimizer=SGD)
        for push in (
            lambda grad: client.push("t", grad),
            lambda grad: client.sparse_push("t", torch.arange(3), grad),
            lambda grad: client.sparse_push("t", torch.arange(3).view(3, 1), grad),
        ):
            with pytest.raises(SchemaError, match=r"3 ids need 2 numbers each.*; give \(3, 2\)"):
                push(torch.ones(shape))
        assert (client.pull("t") == 1).all()


@pytest.mark.parametrize(
    ("ids", "shape"), [((3,), (3, 2)), ((3, 1), (3, 2)), ((3,), (3, 1, 2)), ((1,), (2,)), ((0,), (0, 2)), ((0,), (0,))]
)
def test_a_gradient_has_the_ids_shape_or_number_and_then_a_row_s(ids: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with ParameterClient() as client:
        client.init("t", (3, 2), kind="rows", optimizer=SGD)
        grad, some = torch.randn(shape), torch.arange(3)[: math.prod(ids)]
        client.sparse_push("t", some.view(ids), grad)
        assert torch.equal(client.sparse_pull("t", some), -0.5 * grad.view(-1, 2))


def test_ids_from_the_wire_are_checked_again_by_the_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    with client_of(2) as client:
        client.init("t", (10, 2), kind="rows", init=1.0, optimizer=SGD)
        nothing_checked = "anabranch.parameter_server.client.row_messages.vocabulary.owners"
        monkeypatch.setattr(nothing_checked, lambda ids, *others: (others[-1].fill(0), -1)[1])
        for bad in (-1, 10, 2**62):
            with pytest.raises(NotFound, match="ids"):
                client.sparse_push("t", torch.tensor([bad]), torch.ones(1, 2))
        with pytest.raises(NotFound, match="does not hold"):
            client.sparse_pull("t", torch.arange(10))
        monkeypatch.undo()
        assert (client.pull("t") == 1).all()


@pytest.mark.parametrize("verb", ["pull", "barrier"])
def test_an_answer_of_more_than_was_requested_takes_no_memory(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, taken = ParameterServer._answer, list[int]()

    def swollen(server: ParameterServer, run: Any, call: Any) -> None:
        def more(*arguments: Any) -> Any:
            payload, tensors = run(*arguments) or (None, ())
            return payload, [*tensors, torch.zeros(1 << 20)]

        answer(server, more if call.verb == verb else run, call)

    monkeypatch.setattr(ParameterServer, "_answer", swollen)
    with client_of(worker=Worker(0, 1)) as one:
        one.init("t", (4, 2), kind="rows", init=1.0, optimizer=SGD)
        monkeypatch.setattr(client, "allocate", lambda some: taken.append(len(some)) or frame.allocate(some))
        with pytest.raises(ProtocolError, match="answers with .* bytes, and at most (8|0) were requested"):
            one.sparse_pull("t", torch.tensor([1])) if verb == "pull" else one.barrier()
        assert not taken


def test_a_push_refused_by_one_shard_is_applied_by_none() -> None:
    """And the step can be pushed again, for none of them has counted it."""
    with client_of(3, worker=Worker(0, 1)) as client:
        client.init("t", (30, 2), kind="rows", optimizer=SGD)
        grads = torch.ones(30, 2)
        poisoned = grads.clone()
        poisoned[7, 0] = torch.nan
        with pytest.raises(NonFinite, match="gradients of t"):
            client.push_many({"t": (torch.arange(30), poisoned)}, step=0)
        assert torch.equal(client.pull("t"), torch.zeros(30, 2))
        client.push_many({"t": (torch.arange(30), grads)}, step=0)
        assert torch.equal(client.pull("t"), -0.5 * grads)


def run_workers(shards: int, world: int, body: Callable[[ParameterClient, int], None]) -> None:
    with cluster(shards) as servers, ThreadPoolExecutor(world) as pool:
        list(pool.map(body, servers.workers(world, timeout=60), range(world), timeout=120))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("shards", [1, 2])
def test_under_bsp_workers_on_unequal_shards_are_one_worker_on_the_whole_batch(shards: int, world: int) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(30, 16, generator=generator, dtype=torch.float64)
    batches = [torch.randint(0, 30, (12,), generator=generator) for _ in range(5)]
    targets = [torch.randn(12, 16, generator=generator, dtype=torch.float64) for _ in range(5)]
    plain = torch.nn.Parameter(start.clone())
    optimizer = ADAM([plain], fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    rules = []
    for ids, target in zip(batches, targets, strict=True):
        optimizer.zero_grad()
        ((plain[ids] - target) ** 2).sum(1).mean().backward()
        rules.append(RowOptimizer.from_torch(optimizer))
        optimizer.step()
        schedule.step()
    edges = {1: [0, 12], 2: [0, 5, 12], 4: [0, 1, 5, 11, 12]}[world]

    def body(client: ParameterClient, rank: int) -> None:
        client.init_table(TableSpec("t", 30, 16, torch.float64, every_row_moves=True), rules[0])
        if rank == 0:
            write_rows(client, "t", start, rules[0])
        client.barrier()
        for step, (ids, target) in enumerate(zip(batches, targets, strict=True)):
            mine = slice(edges[rank], edges[rank + 1])
            rows = client.pull_many({"t": ids[mine]}, training=True, step=step)["t"].rows.requires_grad_()
            ((rows - target[mine]) ** 2).sum(1).mean().backward()
            client.push_many(
                {"t": (ids[mine], rows.grad)}, rules={"t": rules[step]}, step=step, merging=Merging(len(ids[mine]))
            )
        client.barrier()
        found = client.pull_many({"t": torch.arange(30)}, step=5)["t"].rows
        torch.testing.assert_close(found, plain.detach(), rtol=0, atol=1e-12)

    run_workers(shards, world, body)


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards in this process soon say who is missing; their clients would wait for long."""
    monkeypatch.setattr("anabranch.parameter_server.server.shard._patience", lambda deadline: Deadline.after(0.05))


def test_under_ssp_the_others_halt_after_exactly_k_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster() as servers:
        clients = servers.workers(2, "ssp:3")
        for client in clients:
            client.init("t", (4, 2), kind="rows", init=1.0, optimizer=SGD)
        ids = torch.tensor([1])
        for step in range(4):  # none is more than 3 ahead of a worker that has finished none
            clients[0].pull_many({"t": ids}, step=step)
            clients[0].push_many({"t": (ids, torch.ones(1, 2))}, step=step)
        with monkeypatch.context() as patch:
            impatient(patch)
            with pytest.raises(DeadlineExceeded, match="worker 1"):
                clients[0].pull_many({"t": ids}, step=4)
        clients[1].push_many({}, step=0)
        clients[0].pull_many({"t": ids}, step=4)


def test_under_asp_no_worker_waits() -> None:
    with client_of(worker=Worker(0, 2, "asp")) as client:
        client.init("t", (4, 2), kind="rows", init=1.0, optimizer=SGD)
        for step in range(5):
            client.pull_many({"t": torch.tensor([1])}, step=step)
            client.push_many({"t": (torch.tensor([1]), torch.ones(1, 2))}, step=step)
        assert client.pull("t")[1].tolist() == [-1.5, -1.5]


def test_a_missing_worker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch)  # else the client's own deadline, of which a part is left for the answer
    with client_of(worker=Worker(0, 3, "bsp")) as client:
        client.init("t", (4, 2), kind="rows", init=1.0, optimizer=SGD)
        client.push_many({"t": (torch.tensor([1]), torch.ones(1, 2))}, step=0)
        with pytest.raises(DeadlineExceeded, match="worker 1, worker 2"):
            client.pull_many({"t": torch.tensor([1])}, step=1)
        with pytest.raises(DeadlineExceeded, match="worker 1, worker 2"):
            client.barrier()
        with pytest.raises(SchemaError, match="its next is step 1"):
            client.push_many({}, step=3)


def test_a_barrier_holds_until_the_last_has_come() -> None:
    arrived: list[int] = []
    gate = threading.Event()

    def body(client: ParameterClient, rank: int) -> None:
        if rank == 0:
            gate.wait(timeout=60)
        arrived.append(rank)
        if rank == 1:
            gate.set()
        client.barrier()
        assert sorted(arrived) == [0, 1]

    run_workers(1, 2, body)


@pytest.mark.parametrize("others", [1, 3])
def test_a_checkpoint_of_two_shards_loads_into_another_number(others: int, tmp_path) -> None:
    fixed = TableSpec("fixed", 40, 4, initial=Normal(), every_row_moves=True)
    dynamic = TableSpec("dynamic", None, 4, initial=Constant(0.5))
    rule = RowOptimizer.from_factory(ADAM)
    steps = [(torch.randint(0, 40, (6,)), torch.randn(6, 4)) for _ in range(8)]

    def train(client: ParameterClient, steps: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for ids, grads in steps:
            client.push_many({"fixed": (ids, grads), "dynamic": (ids * 2**40, grads)})
            client.push("bias", grads[0])

    def state(client: ParameterClient) -> list[torch.Tensor]:
        everyone = torch.arange(40)
        return [client.pull("fixed"), client.sparse_pull("dynamic", everyone * 2**40), client.pull("bias")]

    with client_of(2) as client:
        client.init_table(fixed, rule)
        client.init_table(dynamic, rule)
        client.init("bias", (4,), optimizer=ADAM)
        train(client, steps[:4])
        client.save(tmp_path / "saved", step=4)
        train(client, steps[4:])
        wanted = state(client)
    with client_of(others) as client:
        client.init("bias", (9,))  # what was there before goes
        client.load(tmp_path / "saved")
        train(client, steps[4:])
        for mine, theirs in zip(state(client), wanted, strict=True):
            assert torch.equal(mine, theirs)


def test_a_full_dynamic_table_loads_into_another_number_of_shards_whole(tmp_path: Path) -> None:
    ids = torch.arange(50)
    with client_of(1) as client:
        client.init_table(TableSpec("t", None, 2, capacity=50), RowOptimizer.from_factory(SGD))
        client.sparse_push("t", ids, torch.ones(50, 2))
        wanted = client.sparse_pull("t", ids)
        client.save(tmp_path / "one")
    for shards, source, saved in ((4, "one", "four"), (3, "four", "three"), (1, "three", "again")):
        with client_of(shards) as client:
            client.load(tmp_path / source)
            assert torch.equal(client.sparse_pull("t", ids), wanted)
            client.save(tmp_path / saved)


def test_pushes_are_held_only_where_they_are_merged() -> None:
    for worker in (None, Worker(0, 1, "asp")):
        with ParameterClient(worker=worker) as client:
            client.init("t", (4, 2), kind="rows", init=1.0, optimizer=SGD)
            with pytest.raises(ValueError, match="bsp"):
                client.push_many({"t": (torch.tensor([1]), torch.ones(1, 2))}, merging=Merging(hold=True))


# --- endpoints that are other shards ----------------------------------------------------------------------------------


NAMES = ["bias", "b2", "w"]  # not all on one shard


@pytest.fixture
def network() -> Iterator[MemoryTransport]:
    """Two shards of two, and a server that is alone."""
    with ExitStack() as stack:
        network = MemoryTransport()
        for listen, shard, shards in [("memory:s0", 0, 2), ("memory:s1", 1, 2), ("memory:alone", 0, 1)]:
            stack.enter_context(ParameterServer(shard, shards, listen, transport=network))
        yield network


@pytest.mark.parametrize(
    ("endpoints", "said"),
    [
        ("s1 s0", r"endpoint [01] \(memory:s[01]\) of the client's 2 is shard [01] of 2; name the .* in their order"),
        ("s0", r"endpoint 0 \(memory:s0\) of the client's 1 is shard 0 of 2; name the endpoints of all 2 shards"),
        ("s0 s1 alone", "client's 3 is shard . of .; .*or for 3 start each server with its --shard and --shards 3"),
        ("alone s1", r"endpoint 0 \(memory:alone\) of the client's 2 is shard 0 of 1"),
    ],
)
def test_endpoints_that_are_other_shards_are_refused_and_nothing_is_changed(
    endpoints: str, said: str, network: MemoryTransport
) -> None:
    """Clients with the endpoints in two orders each had parameters of their own under one name, unnoticed."""
    with ParameterClient(["memory:s0", "memory:s1"], transport=network, timeout=60) as right:
        for name in NAMES:
            right.init(name, (1,), optimizer=SGD)
        right.init("rows", (10, 1), kind="rows", optimizer=SGD)
        wrong_endpoints = [f"memory:{name}" for name in endpoints.split()]
        with ParameterClient(wrong_endpoints, transport=network, timeout=60) as wrong:
            refused = pytest.raises(SchemaError, match=said)
            for name in NAMES:
                with refused:
                    wrong.pull(name)
            with refused:
                wrong.init("rows", (10, 1), kind="rows", optimizer=SGD)
            with refused:
                wrong.drop("rows")
            with refused:
                wrong.statistics()
        assert right.pull("rows").flatten().tolist() == [0.0] * 10
    with pytest.raises(SchemaError, match=said):  # a job's worker, at its start
        ParameterClient(wrong_endpoints, worker=Worker(0, 1), transport=network, timeout=60)


def test_dense_parameters_are_made_only_on_the_shard_that_their_name_belongs_to(network: MemoryTransport) -> None:
    with ParameterClient(["memory:s1", "memory:s0"], transport=network, timeout=60) as client:
        for name in NAMES:
            with pytest.raises(SchemaError, match="name the endpoints of all 2 shards in their order"):
                client.init(name, (1,), optimizer=SGD)
    with ParameterClient(["memory:s0", "memory:s1"], transport=network, timeout=60) as client:
        assert [described["dense"] for described in client.calls.describe()] == [[], []]


def test_another_shard_at_a_known_address_is_noticed() -> None:
    network = MemoryTransport()
    with ParameterClient(["memory:here"], transport=network, timeout=60) as client:
        with ParameterServer(0, 1, "memory:here", transport=network):
            client.init("bias", (1,), optimizer=SGD)
            client.push("bias", torch.ones(1))
        with (
            ParameterServer(1, 2, "memory:here", transport=network),
            pytest.raises(SchemaError, match=r"endpoint 0 \(memory:here\) of the client's 1 is shard 1 of 2"),
        ):
            client.push("bias", torch.ones(1))


def test_an_endpoint_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="endpoints names one more than once, .*'memory:s0'.*; name each shard once"):
        ParameterClient(["memory:s0", "memory:s0"])


# --- tensors that servers cannot keep ---------------------------------------------------------------------------------


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the prototype may change
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantised() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)


def meta() -> Tensor:
    return torch.ones(2, 2, device="meta")


@pytest.mark.parametrize(
    "make", [nested, quantised, meta, lambda: torch.full((2, 2), 1 + 2j), lambda: torch.eye(2).to_sparse()]
)
def test_anything_but_a_plain_tensor_is_refused_in_one_sentence(make: Callable[[], Tensor]) -> None:
    odd = make()
    cure = "sparse_push, or tensor.to_dense" if odd.is_sparse else "give a dense tensor of real numbers"
    with ParameterClient() as client:
        client.init("w", (2, 2))
        client.init("t", (4, 2), kind="rows")
        for ask in (
            lambda: client.push("w", odd),
            lambda: client.sparse_push("t", torch.tensor([0, 1]), odd),
            lambda: client.init("v", (2, 2), init=odd),
        ):
            with pytest.raises(SchemaError, match=cure) as told:
                ask()
            assert "\n" not in str(told.value)
        assert client.pull("w").tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("make", [nested, meta, quantised])
def test_nor_does_it_cross_any_boundary(make: Callable[[], Tensor]) -> None:
    odd = make()
    with pytest.raises(TypeError, match="cross"):
        memory_to_send(odd)


@pytest.mark.slow
def test_hundreds_of_tables_are_described_counted_saved_loaded_and_dropped(tmp_path: Path) -> None:
    """From 160 on it was ``RemoteError: the header is 76117 bytes, over the 65536``."""
    names = [f"table_{number}" for number in range(1000)]
    with ParameterClient() as client:
        for name in names:
            client.init_table(TableSpec(name, 4, 2, initial=Constant(0.0)), RowOptimizer.from_factory(ADAM))
        client.sparse_push(names[-1], torch.tensor([1]), torch.ones(1, 2))
        rows = client.sparse_pull(names[-1], torch.arange(4))
        assert client.statistics()[0].tables[names[-1]].pushes == 1
        assert sum(len(described["tables"]) for described in client.calls.describe()) == 1000
        client.save(tmp_path / "kept")
        client.drop_some(names)
        assert client.statistics()[0].tables == {}
        client.load(tmp_path / "kept")
        assert torch.equal(client.sparse_pull(names[-1], torch.arange(4)), rows)


def test_a_table_is_the_same_whose_numbers_are_written_as_integers() -> None:
    rule = RowOptimizer.from_factory(functools.partial(torch.optim.SGD, lr=1.0))
    with ParameterClient() as one:
        one.init_table(TableSpec("t", 4, 2, initial=Normal(0, 1)), rule)
        one.init_table(TableSpec("t", 4, 2, initial=Normal(0.0, 1.0)), rule)
        with pytest.raises(SchemaError, match="here, not"):
            one.init_table(TableSpec("t", 4, 2, initial=Normal(0.0, 2.0)), rule)
