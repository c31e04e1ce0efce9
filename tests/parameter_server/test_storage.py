"""Tables in files: the same rows as in memory, in less address space than the table is large."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.tables import Constant, RowOptimizer, RowTable, RowWiseAdagrad, TableSpec
from anabranch.testing import MemoryTransport
from programs import Programs

RULES = {
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "row-wise": functools.partial(RowWiseAdagrad, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def mapped_from(directory: Path) -> int:
    """Bytes of this process's address space that lie in files of ``directory``."""
    with open("/proc/self/maps") as file:
        ranges = [line.split()[0].split("-") for line in file if str(directory) in line]
    return sum(int(last, 16) - int(first, 16) for first, last in ranges)


@pytest.mark.parametrize("rows", [30_000, None], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("budget", [None, 1 << 20], ids=["mapped whole", "in windows"])
def test_a_table_in_a_file_is_the_table_in_memory(
    budget: int | None, name: str, rows: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.tables.row_storage._WINDOW", 1)  # windows of 4096 rows, the least there are
    rule = RowOptimizer.from_factory(RULES[name])
    capacity = None if rows else 2000
    make = functools.partial(TableSpec, "t", rows, 8, every_row_moves=rows is not None, capacity=capacity)
    memory = RowTable(make(), rule)
    file = RowTable(make(memory_map=True), rule, scratch=tmp_path, address_space=budget)
    for _ in range(6):
        ids, grads = torch.randint(0, 30_000, (900,)), torch.randn(900, 8)
        for table in (memory, file):
            table.push(ids, grads)
        assert torch.equal(file.pull(ids.flip(0), training=True), memory.pull(ids.flip(0), training=True))
        assert torch.equal(file.versions(ids), memory.versions(ids))
    for mine, theirs in zip(file.blocks(5000), memory.blocks(5000), strict=True):
        assert torch.equal(mine.ids, theirs.ids)
        assert torch.equal(mine.values, theirs.values)
        assert torch.equal(mine.sums, theirs.sums)
    if rows is not None:  # the dynamic one is small enough to be mapped whole
        assert (file.group_key is None) == (budget is not None)
    if budget is not None:
        assert 0 < mapped_from(tmp_path) <= budget
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_a_table_larger_than_the_address_space_is_trained(tmp_path: Path, programs: Programs) -> None:
    script = textwrap.dedent(
        """
        import resource, sys
        import torch
        from anabranch.tables import Constant, Family, RowOptimizer, RowTable, TableSpec

        torch.set_num_threads(1)
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        limit = used + (1 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        rows = 100_000_000
        spec = TableSpec("t", rows, 16, initial=Constant(1.0), memory_map=True)
        table = RowTable(spec, RowOptimizer(Family.ADAGRAD, lr=0.1), scratch=sys.argv[1], kernels_kind="plain")
        assert table.bytes() > 3 * limit, (table.bytes(), limit)
        try:
            RowTable(TableSpec("m", rows, 16), RowOptimizer(Family.ADAGRAD, lr=0.1), kernels_kind="plain")
        except MemoryError:
            print("memory has no room")
        ids = torch.tensor([0, 5, rows // 2, rows - 1])
        for _ in range(2):
            table.push(ids, torch.ones(4, 16))
        print(table.pull(ids)[:, 0].unique().numel(), round(table.pull(ids)[0, 0].item(), 4))
        print(table.pull(torch.tensor([rows - 2]))[0, 0].item())
        """
    )
    done = programs.run(script, tmp_path)
    assert done.stdout.splitlines() == ["memory has no room", "1 0.8293", "1.0"], done.stderr


@pytest.mark.slow
def test_a_table_larger_than_the_address_space_is_kept_saved_and_loaded(tmp_path: Path) -> None:
    """Once a checkpoint of the shard, and one of the job, each held the whole table in memory."""
    script = textwrap.dedent(
        """
        import functools, gc, os, resource, shutil, sys
        import torch
        from anabranch.parameter_server import ParameterClient, ParameterServer
        from anabranch.tables import Constant, RowOptimizer, TableSpec
        from anabranch.testing import MemoryTransport

        torch.set_num_threads(1)
        network, rows, at, one = MemoryTransport(), 3_000_000, sys.argv[1], torch.ones(1, 16)
        rule = RowOptimizer.from_factory(functools.partial(torch.optim.Adagrad, lr=0.1))

        def serving(directory):
            server = ParameterServer(
                transport=network, durability="log", checkpoint_dir=directory, memory_map_dir=f"{at}/scratch"
            )
            return server, ParameterClient([server.endpoint], transport=network, timeout=100)

        server, client = serving(f"{at}/state")
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        limit = used + (370 << 20)  # some 100 MiB more than it takes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with server, client:
            client.init_table(TableSpec("t", rows, 16, initial=Constant(1.0), memory_map=True), rule)
            for first in range(0, rows, 1 << 17):  # every row begins
                ids = torch.arange(first, min(rows, first + (1 << 17)))
                client.sparse_push("t", ids, one.expand(len(ids), 16))
            assert server.statistics().tables["t"].bytes > 370 << 20
            server.checkpoint()
            client.sparse_push("t", torch.tensor([rows - 1]), one)
            client.save(f"{at}/saved")
            shutil.copytree(f"{at}/state", f"{at}/killed")
        def told(directory, load):
            server, client = serving(directory)
            with server, client:
                if load:
                    client.load(f"{at}/saved")
                found = client.sparse_pull("t", torch.tensor([0, rows // 2, rows - 1]))[:, 0].tolist()
                print([round(number, 4) for number in found], flush=True)
        del server, client
        gc.collect()
        told(f"{at}/killed", load=False)
        gc.collect()
        told(f"{at}/new", load=True)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["[0.9, 0.9, 0.8293]"] * 2, done.stderr[-3000:]


def test_a_server_keeps_its_mapped_tables_in_the_given_directory(tmp_path: Path) -> None:
    network = MemoryTransport()
    with (
        ParameterServer(transport=network, memory_map_dir=tmp_path / "scratch") as server,
        ParameterClient([server.endpoint], transport=network) as client,
    ):
        rule = RowOptimizer.from_factory(RULES["momentum"])
        client.init_table(TableSpec("t", 1000, 4, initial=Constant(1.0), memory_map=True), rule)
        client.sparse_push("t", torch.tensor([999]), torch.ones(1, 4))
        assert client.sparse_pull("t", torch.tensor([999, 0]))[:, 0].tolist() == pytest.approx([0.9, 1.0])
