"""A table in a file whose most used rows are in memory: the rows of a table in memory, and an honest hit rate."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

import anabranch as ab
from anabranch.observe import parameter_metrics
from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.tables import Constant, RowOptimizer, RowTable, RowWiseAdagrad, TableSpec
from anabranch.tables.hot_rows import HotRows
from anabranch.testing import MemoryTransport

RULES = {
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01),
    "row-wise": functools.partial(RowWiseAdagrad, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def tables(
    name: str, rows: int | None, hot: int, tmp_path: Path, *, budget: int | None = None, **changes: object
) -> tuple[RowTable, RowTable]:
    """The same table in memory, and in a file with hot rows."""
    rule = RowOptimizer.from_factory(RULES[name])
    make = functools.partial(TableSpec, "t", rows, 8, every_row_moves=rows is not None, **changes)
    return RowTable(make(), rule), RowTable(
        make(memory_map=True, hot_rows=hot), rule, scratch=tmp_path, address_space=budget
    )


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("hot", [40, 300, 5000], ids=["fewer than a request", "fewer than all", "all"])
@pytest.mark.parametrize("rows", [5000, None], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("name", RULES)
def test_hot_rows_and_cold_ones_are_those_of_a_table_in_memory(
    name: str, rows: int | None, hot: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    capacity = None if rows else 1000
    memory, file = tables(name, rows, hot, tmp_path, budget=1 << 20, capacity=capacity, dtype=dtype)
    for turn in range(12):
        ids = torch.randint(0, 5000, (150 if turn % 3 else 250,))
        grads = torch.randn(len(ids), 8).to(dtype)
        for table in (memory, file):
            table.push(ids, grads)
        assert torch.equal(file.pull(ids.flip(0), training=True), memory.pull(ids.flip(0), training=True))
        assert torch.equal(file.versions(ids), memory.versions(ids))
        assert torch.equal(file.pull_with_state(ids), memory.pull_with_state(ids))
    for mine, theirs in zip(file.blocks(700), memory.blocks(700), strict=True):
        assert torch.equal(mine.ids, theirs.ids)
        assert torch.equal(mine.values, theirs.values)
        assert torch.equal(mine.stamps, theirs.stamps)


def test_a_push_that_overflows_is_taken_back_on_hot_rows(tmp_path: Path) -> None:
    memory, file = tables("momentum", 100, 10, tmp_path)
    ids = torch.tensor([1, 2, 1])
    for table in (memory, file):
        table.push(ids, torch.ones(3, 8))
        with pytest.raises(ab.NonFinite):
            table.push_guarded(ids, torch.full((3, 8), 3e38))
        table.pull(torch.arange(50, 60))  # the rows leave memory
    assert torch.equal(file.pull_with_state(ids), memory.pull_with_state(ids))


def test_hits_and_misses_are_of_rows_read() -> None:
    table = RowTable(
        TableSpec("t", 100, 4, initial=Constant(0.0), memory_map=True, hot_rows=3),
        RowOptimizer.from_factory(RULES["adam"]),
    )

    def read(*ids: int) -> tuple[int, int]:
        before = table.hot_hits, table.hot_misses
        table.pull(torch.tensor(ids))
        return table.hot_hits - before[0], table.hot_misses - before[1]

    assert read(1, 2, 1) == (0, 2)
    assert read(2, 3) == (1, 1)
    table.push(torch.tensor([4]), torch.ones(1, 4))  # takes the place of 1, unused longest; a push is not a read
    assert read(4, 2) == (2, 0)
    assert read(1) == (0, 1)
    assert read(5, 6, 7, 8) == (0, 4)  # more than there is room for: copied, and none leaves for them
    assert read(1) == (1, 0)


def test_only_rows_that_changed_are_written_to_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RowOptimizer.from_factory(RULES["adam"])
    table = RowTable(TableSpec("t", 100, 4, memory_map=True, hot_rows=4), rule)
    written: list[int] = []
    write_back = HotRows._write_back
    monkeypatch.setattr(
        HotRows, "_write_back", lambda self, slots: (written.append(len(slots)), write_back(self, slots))
    )
    for first in (0, 4, 8):  # they begin, and leave changed
        table.pull(torch.arange(first, first + 4))
    assert sum(written) == 8
    for first in (0, 4, 0, 4):
        table.read(torch.arange(first, first + 4), torch.empty(4, 4))
    assert sum(written) == 12  # the last of those that began
    table.push(torch.tensor([4]), torch.ones(1, 4))
    table.pull(torch.arange(20, 24))
    assert sum(written) == 13


def test_restored_rows_replace_hot_ones() -> None:
    memory, file = (
        RowTable(
            TableSpec("t", 20, 4, memory_map=hot, hot_rows=8 if hot else None), RowOptimizer.from_factory(RULES["adam"])
        )
        for hot in (False, True)
    )
    everyone = torch.arange(20)
    memory.push(everyone, torch.ones(20, 4))
    file.push(everyone[:6], -torch.ones(6, 4))  # the same stamps, other values
    file.pull(everyone[12:])
    file.pull(everyone[:6])  # hot again, as they are in the file
    for block in memory.blocks(5):
        file.restore(block)
    file.pull(everyone[12:])  # what was hot leaves
    assert torch.equal(file.pull_with_state(everyone), memory.pull_with_state(everyone))


def test_a_table_described_before_there_were_hot_rows_is_read() -> None:
    spec = TableSpec("t", 100, 4, memory_map=True)
    assert TableSpec.from_dict({key: value for key, value in spec.to_dict().items() if key != "hot_rows"}) == spec


def test_the_most_used_rows_stay_under_frequency() -> None:
    table = RowTable(
        TableSpec("t", 100, 4, memory_map=True, hot_rows=2, eviction="frequency"),
        RowOptimizer.from_factory(RULES["adam"]),
    )
    for _ in range(3):
        table.pull(torch.tensor([7]))
    for cold in range(20, 30):
        table.pull(torch.tensor([cold]))
    before = table.hot_hits
    table.pull(torch.tensor([7]))
    assert table.hot_hits == before + 1


def test_servers_tell_the_hit_rate() -> None:
    network = MemoryTransport()
    with ParameterServer(transport=network) as server, ParameterClient([server.endpoint], transport=network) as client:
        spec = TableSpec("t", 100, 4, memory_map=True, hot_rows=50)
        client.init_table(spec, RowOptimizer.from_factory(RULES["adam"]))
        for _ in range(3):
            client.sparse_pull("t", torch.arange(10))
        found = client.statistics()[0].tables["t"]
        assert (found.hot_hits, found.hot_misses) == (20, 10)
        told = {metric.name: metric for metric in parameter_metrics(server)}
        assert [value for _, value in told["table_hot_hits"].values] == [20.0]


@pytest.mark.parametrize("changes", [{"hot_rows": 0, "memory_map": True}, {"hot_rows": 5}])
def test_hot_rows_that_cannot_be_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"hot_rows={changes['hot_rows']}"):
        TableSpec("t", 100, 4, **changes)


def test_a_remote_embedding_takes_hot_rows() -> None:
    users = ab.RemoteEmbedding(
        "users", None, 4, memory_map=True, hot_rows=2, optimizer=functools.partial(torch.optim.SGD, lr=0.5), init=1.0
    )
    for ids in (torch.tensor([1, 2]), torch.tensor([2**53 + 1, 4]), torch.tensor([1, 2])):
        users(ids).sum().backward()
    assert users(torch.tensor([1, 2**53 + 1])).tolist() == [[0.0] * 4, [0.5] * 4]
    users.close()


def test_a_checkpoint_is_loaded_into_a_file_or_memory_as_its_reader_says(tmp_path: Path) -> None:
    """A run that has outgrown memory goes on in a file."""

    def run(load: bool, folder: Path = tmp_path / "first", **place: object) -> tuple[torch.Tensor, int]:
        adam = functools.partial(torch.optim.Adam, lr=0.1)
        module = ab.RemoteEmbedding("t", 40, 4, mode="sum", optimizer=adam, **place)
        model = torch.nn.Sequential(module, torch.nn.Linear(4, 1))
        step = ab.TrainStep(
            model, lambda model, ids: model(ids).square().mean(), torch.optim.SGD(model.parameters(), 0.1)
        )
        read = ab.EvalStep(model, lambda model, ids: {"rows": model[0](ids)})
        everyone = torch.arange(40)[:, None]
        with ab.Executor({"train": step, "read": read}, "Hybrid") as executor:
            if load:
                executor.load(folder)
            else:
                executor.run("train", everyone)
                executor.save(folder)
            before = executor._remote.client.statistics()[0].tables["t"]
            rows = executor.run("read", everyone)["rows"].clone()
            after = executor._remote.client.statistics()[0].tables["t"]
            counted = after.hot_hits + after.hot_misses - before.hot_hits - before.hot_misses
            return rows, counted

    saved, _ = run(load=False)
    for place, counted in (({"memory_map": True, "hot_rows": 10}, 40), ({"memory_map": True}, 0), ({}, 0)):
        rows, looked_up = run(load=True, **place)
        assert torch.equal(rows, saved)
        assert looked_up == counted
    run(load=False, folder=tmp_path / "second", memory_map=True, hot_rows=10)
    assert run(load=True, folder=tmp_path / "second")[1] == 0
