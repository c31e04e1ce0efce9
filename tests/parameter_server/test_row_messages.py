"""Messages between worker and shard: unknown rows are sent, known ones are not, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from clusters import client_of
from torch import Tensor

from anabranch.errors import NonFinite, NotFound, ProtocolError, RolledBack, SchemaError
from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.parameter_server.client import row_messages as row_messages_module
from anabranch.parameter_server.client.row_messages import Layout, Pull, PullReply, Routed, VersionClock
from anabranch.parameter_server.client.saved_tables import restore
from anabranch.parameter_server.messages import InitMessage, PullMessage, PullPart, PushMessage, PushPart
from anabranch.parameter_server.server.requests import RowRequest
from anabranch.parameter_server.server.shard import Shard
from anabranch.tables import Constant, Family, Normal, RowOptimizer, TableSpec
from anabranch.tables.kernels.caches import WITH_STATE
from anabranch.tables.table import Table
from anabranch.testing import MemoryTransport

pytestmark = pytest.mark.usefixtures("compiled_for_all_dtypes")

SGD = RowOptimizer(Family.SGD, lr=0.5)
ADAGRAD = RowOptimizer(Family.ADAGRAD, lr=0.5, eps=1e-10)
ROW_WISE = RowOptimizer(Family.ROW_WISE_ADAGRAD, lr=0.5, eps=1e-10)
ADAM = RowOptimizer(Family.ADAM, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8)
TABLES = {
    "alike": [(TableSpec(f"t{k}", 40 + k, 3), ADAGRAD) for k in range(4)],
    "mixed": [
        (TableSpec("a", 40, 3), ADAGRAD),
        (TableSpec("b", 50, 5), ADAGRAD),
        (TableSpec("c", 60, 3, torch.float64), ROW_WISE),
        (TableSpec("d", 30, 3), ADAGRAD),
        (TableSpec("e", None, 3), ADAM),
        (TableSpec("f", 30, 4, torch.bfloat16), SGD),
        (TableSpec("g", 30, 3, torch.float64), ROW_WISE),
    ],
}


def versions(client: ParameterClient, ids: Tensor) -> Tensor:
    return client.pull_many({"t": ids}, known={"t": torch.full_like(ids, -1)})["t"].versions


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("which", TABLES)
def test_unknown_rows_are_sent_and_known_ones_are_not(which: str, count: int) -> None:
    """Against whole tables with their states, and a book of which row was changed when."""
    specs = {spec.name: (spec, rule) for spec, rule in TABLES[which]}
    draw = torch.Generator().manual_seed(count)
    held = {name: torch.full((60,), -1) for name in specs}  # the version that is held of each row
    there: dict[str, dict[int, Tensor]] = {name: {} for name in specs}  # rows that are held, as they came
    changed = {name: torch.zeros(60, dtype=torch.bool) for name in specs}  # since they came
    with client_of(count) as client:
        client.init("bias", (3,), init=2.0)
        for spec, rule in specs.values():
            client.init_table(spec, rule)
        for step in range(12):
            wanted, known = {}, {}
            for name, (spec, _) in specs.items():
                ids = torch.randperm(spec.rows or 60, generator=draw)[: int(torch.randint(25, (), generator=draw))]
                kind = torch.rand(len(ids), generator=draw)
                wanted[name] = ids
                known[name] = torch.where(kind < 0.2, -1, torch.where(kind < 0.4, WITH_STATE, held[name][ids]))
            with_state = step % 3 > 0
            nothing = {"bias": torch.empty(0, dtype=torch.int64)}
            found = client.pull_many(wanted | nothing, known=known | nothing, with_state=with_state)
            assert found.keys() == {*wanted, "bias"}
            assert found["bias"].rows.tolist() == [2.0] * 3
            for name, (spec, _) in specs.items():
                ids, came = wanted[name], found[name]
                whole = client.pull_many({name: ids}, with_state=True)[name].rows
                expected = (known[name] < 0) | changed[name][ids]
                assert came.positions.tolist() == torch.nonzero(expected)[:, 0].tolist(), (name, step)
                rows = whole[came.positions].clone()
                if not with_state:
                    rows = rows[:, : spec.width]
                else:
                    rows[known[name][came.positions] != WITH_STATE, spec.width :] = 0
                assert torch.equal(came.rows, rows)
                for at, known_id in enumerate(ids.tolist()):
                    if not expected[at]:
                        assert torch.equal(there[name][known_id], whole[at, : spec.width])
                for at, known_id in enumerate(ids[came.positions].tolist()):
                    there[name][known_id] = rows[at, : spec.width]
                held[name][ids[came.positions]] = came.versions
                changed[name][ids[came.positions]] = False
            pushed = {}
            for name, (spec, _) in specs.items():
                ids = torch.randint(spec.rows or 60, (6,), generator=draw)
                pushed[name] = (ids, torch.randn(6, spec.width, generator=draw).to(spec.dtype))
                changed[name][ids] = True
            client.push_many(pushed)


@pytest.mark.parametrize("every_row_moves", [False, True])
@pytest.mark.parametrize("capacity", [None, 2])
def test_a_row_that_left_and_came_again_never_looks_unchanged(capacity: int | None, every_row_moves: bool) -> None:
    spec = TableSpec("any", None, 2, initial=Constant(1.0), capacity=capacity, every_row_moves=every_row_moves)
    one, others = torch.tensor([7]), torch.tensor([8, 9])
    with client_of(1) as client:
        client.init_table(spec, RowOptimizer(Family.SGD, lr=0.5, momentum=0.9 if every_row_moves else 0.0))
        client.push_many({"any": (one, torch.ones(1, 2))})
        first = client.pull_many({"any": one}, known={"any": torch.tensor([-1])})["any"]
        assert first.rows.tolist() == [[0.5, 0.5]]
        client.pull_many({"any": others}, training=True)  # takes its row, if there is no other
        now = client.sparse_pull("any", one)
        assert now.tolist() == ([[0.5, 0.5]] if capacity is None else [[1.0, 1.0]])
        for training in (False, True):
            found = client.pull_many({"any": one}, known={"any": first.versions}, training=training)["any"]
            assert len(found.rows) == (0 if capacity is None else 1)
            assert all(row == [1.0, 1.0] for row in found.rows.tolist())


def test_a_shard_that_lost_changes_treats_all_rows_as_unknown(tmp_path: Path) -> None:
    """Its steps are those that were lost, counted again: a row that changed in one of them has not changed *since*."""
    network = MemoryTransport()
    ids, ones = torch.arange(4), torch.ones(1, 2)
    spec = TableSpec("t", 4, 2, initial=Constant(0.0))

    def serve(listen: str) -> ParameterServer:
        return ParameterServer(
            listen=listen, transport=network, durability="checkpoint", checkpoint_dir=tmp_path / "state"
        )

    with ParameterClient(["memory:one"], transport=network) as client:
        with serve("memory:one") as server:
            client.init_table(spec, SGD)
            client.push_many({"t": (ids[:1], ones)})
            server.checkpoint()
            shutil.copytree(tmp_path / "state", tmp_path / "aside")
            for _ in range(3):
                client.push_many({"t": (ids[1:2], ones)})
            first = versions(client, ids)
            same = client.pull_many({"t": ids}, known={"t": first})["t"]
            assert not len(same.rows)
        shutil.rmtree(tmp_path / "state")
        shutil.move(tmp_path / "aside", tmp_path / "state")
        with serve("memory:one"):
            with ParameterClient(["memory:one"], transport=network) as other:
                for _ in range(5):  # beyond where it was
                    other.push_many({"t": (ids[2:3], ones)})
            with pytest.raises(RolledBack, match="3 pushes of this client are lost"):
                client.pull_many({"t": ids}, known={"t": first})
            again = client.pull_many({"t": ids}, known={"t": first})["t"]
            assert again.positions.tolist() == [0, 1, 2, 3]
            assert again.rows[:, 0].tolist() == [-0.5, 0.0, -2.5, 0.0]
            assert (again.versions > first).all()
            mixed = torch.tensor([int(again.versions[0]), int(first[1]), -1, int(again.versions[3])])
            assert client.pull_many({"t": ids}, known={"t": mixed})["t"].positions.tolist() == [1, 2]
            assert len(client.pull_many({"t": ids}, known={"t": first})["t"].rows) == 4


@pytest.mark.parametrize("how", ["drop", "restore"])
def test_rows_of_a_table_that_was_replaced_are_not_known(how: str, tmp_path: Path) -> None:
    ids, ones = torch.arange(3), torch.ones(3, 2)
    with client_of(2) as client:
        client.init_table(TableSpec("t", 3, 2, initial=Constant(0.0)), SGD)
        client.push_many({"t": (ids, ones)})
        client.save(tmp_path / "saved")
        for _ in range(3):
            client.push_many({"t": (ids, ones)})
        first = versions(client, ids)
        if how == "drop":
            client.drop("t")
            client.init_table(TableSpec("t", 3, 2, initial=Constant(5.0)), SGD)
        else:
            client.load(tmp_path / "saved")
        found = client.pull_many({"t": ids}, known={"t": first})["t"]
        assert found.rows.tolist() == [[5.0 if how == "drop" else -0.5] * 2] * 3


def test_steps_of_any_size_and_age(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The table's step is said whole, and an age that is too large for what it travels as makes a row unknown."""
    ids = torch.arange(4)
    with client_of(1) as client:
        client.init_table(TableSpec("t", 4, 2, initial=Constant(0.0)), SGD)
        with client.collect() as saved:
            state, groups = saved.state, {name: dict(group) for name, group in saved.groups()}
        state["tables"][0]["step"] = (1 << 32) + 5
        restore(client, state, groups)
        held = versions(client, ids)
        assert held.tolist() == [(1 << 32) + 5] * 4
        for _ in range(5):
            client.push_many({"t": (ids[:1], torch.ones(1, 2))})
            found = client.pull_many({"t": ids}, known={"t": held})["t"]
            assert found.positions.tolist() == [0]
            held[0] = found.versions[0]
        monkeypatch.setattr(row_messages_module, "OLDEST", 4)
        assert client.pull_many({"t": ids}, known={"t": held})["t"].positions.tolist() == [1, 2, 3]
        monkeypatch.setattr(row_messages_module, "OLDEST", 5)
        assert not len(client.pull_many({"t": ids}, known={"t": held})["t"].rows)


def test_an_id_costs_only_the_bytes_that_its_kind_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[int] = []
    pull, take = Shard.pull, RowRequest.take

    def pulled(self, *request):
        reply, sent = pull(self, *request)
        said.append(sum(tensor.nbytes for tensor in sent))
        return reply, sent

    def taken(self, tensors):
        said.append(sum(tensor.nbytes for tensor in tensors))
        take(self, tensors)

    monkeypatch.setattr(Shard, "pull", pulled)
    monkeypatch.setattr(RowRequest, "take", taken)
    ids, row = torch.arange(10), 3 * 4
    with client_of(1) as client:
        client.init_table(TableSpec("t", 20, 3), ADAGRAD)

        def bytes_of(**options: object) -> list[int]:
            said.clear()
            before = client.traffic()["t"].bytes if client.traffic() else 0
            if "squares" in options:
                client.push_many({"t": (ids, torch.ones(10, 3))}, **options)  # type: ignore[arg-type]
            else:
                client.pull_many({"t": ids}, **options)  # type: ignore[arg-type]
            assert client.traffic()["t"].bytes - before == sum(said)
            return list(said)

        assert bytes_of() == [40, 10 * row]
        assert bytes_of(known={"t": torch.full((10,), -1)}) == [40, 10 * row]
        states = {"t": torch.full((10,), WITH_STATE)}
        assert bytes_of(known=states, with_state=True) == bytes_of(with_state=True) == [40, 10 * 2 * row]
        held = versions(client, ids)
        client.push_many({"t": (ids[:2], torch.ones(2, 3))})
        held[5], held[6] = WITH_STATE, -1
        # Eight known ones have an age, and a bit that says whether they have changed.
        assert bytes_of(known={"t": held}, with_state=True) == [40 + 8 * 2, 1 + 2 * row + 3 * row]
        squares = torch.ones(10)
        assert bytes_of(squares={"t": squares}) == [40 + 10 * row]
        squares[3], squares[4] = 0.5, 1 + 2.0**-10  # rounded, it is 1
        assert bytes_of(squares={"t": squares}) == [40 + 2 + 10 * row]


@pytest.mark.parametrize("rule", [SGD, ADAGRAD, ROW_WISE, ADAM], ids=lambda rule: rule.family)
@pytest.mark.parametrize("count", [1, 2])
def test_sums_and_gradients_of_one_step_move_rows_as_the_table_alone(rule: RowOptimizer, count: int) -> None:
    draw = torch.Generator().manual_seed(3)
    widths = {"a": 3, "b": 2, "c": 3}  # rows of two kinds, and only those of one come as sums
    specs = [TableSpec(name, 30, width, initial=Normal()) for name, width in widths.items()]
    alone = {spec.name: Table(spec, rule) for spec in specs}
    everyone = torch.arange(30)
    with client_of(count) as client:
        for spec in specs:
            client.init_table(spec, rule)
        for _ in range(5):
            given, squares = {}, {}
            for name, width in widths.items():
                given[name] = (torch.randperm(30, generator=draw)[:9], torch.randn(9, width, generator=draw))
                if name != "b":
                    squares[name] = torch.where(torch.rand(9, generator=draw) < 0.6, 1, torch.rand(9, generator=draw))
            client.push_many(given, squares=squares)
            for name, (ids, grads) in given.items():
                alone[name].push(ids, grads, squares[name].bfloat16() if name in squares else None)
        found = client.pull_many(dict.fromkeys(widths, everyone), with_state=True)
        for name in widths:
            assert torch.equal(found[name].rows, alone[name].pull_with_state(everyone))


def test_counts_that_do_not_fit_are_refused_and_change_nothing() -> None:
    shard = Shard()
    shard.init(InitMessage("t", ADAGRAD.to_dict(), TableSpec("t", 10, 2, initial=Constant(1.0)).to_dict()))
    ids, grads = torch.tensor([1, 2, 3]), torch.ones(6)

    def ages(count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int16)

    for part, more, said in [
        (PullPart("t", 3, 2, 2), [ages(2)], "of which 2 should come with state and 2"),
        (PullPart("t", 3, 4), [], "of which 4"),
        (PullPart("t", 3, 0, 2), [], r"int64, \(3,\)\), \(torch.int16, \(2,\)\)\] expected"),
        (PullPart("t", 3, 0, 2), [ages(3)], r"got .*int16, \(3,\)"),
        (PullPart("t", 3, 0, 2), [ages(2).int()], "torch.int32"),
        (PullPart("t", 3), [ages(1)], r"int64, \(3,\)\)\] expected"),
    ]:
        with pytest.raises(SchemaError, match=said):
            shard.pull(shard.request(PullMessage([part]), [ids, *more]))
    half = torch.full((1,), 0.5).bfloat16()
    for part, more, said in [
        (PushPart("t", 3, 0, 4), [half.repeat(4), grads], "of which 4 have sums"),
        (PushPart("t", 3, 0, 2), [half, grads], r"got .*bfloat16, \(1,\)"),
        (PushPart("t", 3, 0, 1), [half.float(), grads], "torch.float32"),
        (PushPart("t", 3, 0, 1), [grads], "expected, got"),
        (PushPart("t", 3), [half, grads], "expected, got"),
    ]:
        with pytest.raises(SchemaError, match=said):
            shard.push(shard.request(PushMessage([part], []), [ids, *more]))
    with pytest.raises(NonFinite):
        shard.push(shard.request(PushMessage([PushPart("t", 3, 0, 1)], []), [ids, -half, grads]))
    assert shard.statistics().tables["t"].step == 0
    for part in (["t", 3, -1], ["t", 3, 0, -1], ["t", 3, 0, 0, -1]):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(part, PullPart)


def test_answers_that_do_not_fit_are_refused() -> None:
    placement = TableSpec("t", 10, 2)
    table = Table(placement, SGD)
    layout = Layout({"t": (table.placement, torch.float32, 2, 2)})

    def take(reply: PullReply, *bits: Tensor, rows: int = 1) -> list[list[int]]:
        pull = Pull(layout, [torch.arange(4)], [torch.tensor([3, 3, 3, -1])], [VersionClock(5)], None)
        pull.take(0, reply, [*bits, torch.zeros(2 * rows)] if bits else [], 0)
        return [pull.pulled()["t"].positions.tolist(), pull.pulled()["t"].versions.tolist()]

    def said(*bits: int) -> Tensor:
        return torch.tensor(bits, dtype=torch.uint8)

    assert take(PullReply(5, [4]), said(0b10100000), rows=3) == [[0, 2, 3], [4, 4, 4]]
    assert take(PullReply(5, [4]), said(0b10111111), rows=3) == [[0, 2, 3], [4, 4, 4]]  # there are three bits
    for reply, bits in [
        (PullReply(5, [4, 4]), said(0)),
        (PullReply(5, []), said(0)),
        (PullReply(5, [4]), said()),
        (PullReply(5, [4]), said(0, 0)),
        (PullReply(5, [4]), said(0).long()),
        (PullReply(5, [4]), said(0).view(1, 1)),
    ]:
        with pytest.raises(ProtocolError):
            take(reply, bits)
    with pytest.raises(ProtocolError):
        take(PullReply(5, [4]))  # without any tensor
    for rows in (0, 2, 5):
        with pytest.raises(SchemaError):
            take(PullReply(5, [4]), said(0), rows=rows)
    with pytest.raises(NotFound, match=r"ids\[1\] is 10"):
        Routed(layout, [torch.tensor([1, 10])], 1)
