"""A checkpoint that another job's shard of the same tables wrote, put in place of the newest one here."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest
import torch

from anabranch.checkpoint.generations import complete_generations
from anabranch.errors import RolledBack
from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.tables import Constant, RowOptimizer, TableSpec
from anabranch.testing import MemoryTransport

SGD = RowOptimizer.from_factory(functools.partial(torch.optim.SGD, lr=1.0))
SPEC = TableSpec("t", 4, 2, initial=Constant(0.0))
HERE = "memory:shard"


def push(client: ParameterClient, times: int) -> None:
    for _ in range(times):
        client.sparse_push("t", torch.tensor([0]), -torch.ones(1, 2))


def value(client: ParameterClient) -> float:
    return float(client.sparse_pull("t", torch.tensor([0]))[0, 0])


def kill(server: ParameterServer) -> None:
    server.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def put_in_place(there: Path, here: Path) -> int:
    """Replace the newest generation here by the newest one there; return its number."""
    theirs, ours = complete_generations(there)[0], complete_generations(here)[0]
    for file in here.glob(f"*-{ours:08d}.*"):
        file.unlink()
    for file in there.glob(f"*-{theirs:08d}.*"):
        shutil.copy(file, here / file.name.replace(f"{theirs:08d}", f"{ours:08d}"))
    return ours


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize("durability", ["log", "checkpoint"])
def test_another_jobs_checkpoint_is_not_used(durability: str, repair: bool, tmp_path: Path) -> None:
    """The start was refused, and ``--repair`` took the other job's rows; each client was told a wrong loss."""
    network = MemoryTransport()
    make = functools.partial(ParameterServer, listen=HERE, durability=durability)
    elsewhere = MemoryTransport()
    with (
        make(checkpoint_dir=tmp_path / "b", transport=elsewhere),
        ParameterClient([HERE], transport=elsewhere) as other,
    ):
        other.init_table(SPEC, SGD)
        push(other, 40)
    first = make(checkpoint_dir=tmp_path / "a", transport=network).__enter__()
    with ParameterClient([HERE], transport=network, timeout=20) as client:
        client.init_table(SPEC, SGD)
        push(client, 3)
        first.checkpoint()
        push(client, 2)
        first.checkpoint()
        push(client, 1)
        kill(first)
        here = tmp_path / "a" / "shard-0-of-1"
        foreign = put_in_place(tmp_path / "b" / "shard-0-of-1", here)
        second = make(checkpoint_dir=tmp_path / "a", transport=network, repair=repair).__enter__()
        if durability == "checkpoint":
            with pytest.raises(RolledBack) as told:
                value(client)
            assert told.value.lost == 3
        assert value(client) == (6 if durability == "log" else 3)
        if repair:
            assert list((here / "set-aside").glob(f"manifest-{foreign:08d}.json"))
        push(client, 4)
        second.checkpoint()
        kill(second)
        third = make(checkpoint_dir=tmp_path / "a", transport=network).__enter__()
        assert value(client) == (10 if durability == "log" else 7)
        kill(third)


@pytest.mark.parametrize("durability", ["log", "checkpoint"])
def test_a_directory_of_an_earlier_version_gets_its_name_at_the_next_start(durability: str, tmp_path: Path) -> None:
    """Its checkpoints name nobody, and its ``owner`` file ends before the name."""
    network = MemoryTransport()
    make = functools.partial(
        ParameterServer, listen=HERE, durability=durability, checkpoint_dir=tmp_path, transport=network
    )
    with make() as server, ParameterClient([HERE], transport=network) as client:
        server._persistence._name = None  # type: ignore[assignment]
        client.init_table(SPEC, SGD)
        push(client, 3)
        server.checkpoint()
    owner = tmp_path / "shard-0-of-1" / "owner"
    owner.write_bytes(owner.read_bytes()[:1024])
    for expected in (3, 4):
        with make() as server, ParameterClient([HERE], transport=network) as client:
            assert value(client) == expected
            assert server._persistence._owner is not None
            assert len(server._persistence._owner.name or b"") == 16
            push(client, 1)
