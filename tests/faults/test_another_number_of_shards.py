"""A durable directory with the state of another number of shards: refused, where an empty shard would have served."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from anabranch.errors import CheckpointError
from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.testing import MemoryTransport

SGD = functools.partial(torch.optim.SGD, lr=1.0)


def pushed(directory: Path, shards: int, durability: str = "log") -> Sequence[float]:
    """Serves a table with some pushes, and returns its rows."""
    network = MemoryTransport()
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                ParameterServer(
                    shard, shards, f"memory:{shard}", durability, directory, transport=network  # type: ignore[arg-type]
                )
            )
            for shard in range(shards)
        ]  # fmt: skip
        client = stack.enter_context(ParameterClient([s.endpoint for s in servers], transport=network, timeout=60))
        client.init("t", (4, 1), kind="rows", optimizer=SGD)
        client.sparse_push("t", torch.arange(4), -torch.ones(4, 1))
        return client.pull("t").flatten().tolist()


@pytest.mark.parametrize("durability", ["log", "checkpoint"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_state_of_another_number_of_shards_keeps_a_shard_from_starting_empty(
    before: int, after: int, durability: str, tmp_path: Path
) -> None:
    """Its clients found no tables, made new ones, and trained from the start."""
    directory = tmp_path / "kept"
    pushed(directory, before, durability)
    there = sorted(directory.iterdir())
    for repair in (False, True):
        with pytest.raises(CheckpointError) as caught:
            ParameterServer(after - 1, after, None, durability, directory, repair=repair)  # type: ignore[arg-type]
        names = ", ".join(f"shard-{shard}-of-{before}" for shard in range(before))
        assert f"{directory} holds the state of a different number of shards ({names})" in str(caught.value)
        assert f"start with --shards {before}, or give another --checkpoint-dir" in str(caught.value)
        assert sorted(directory.iterdir()) == there  # and nothing was made
    assert list(pushed(directory, before, durability)) == [2.0] * 4


def test_a_lost_shard_starts_anew_beside_the_others_of_its_number(tmp_path: Path) -> None:
    directory = tmp_path / "kept"
    pushed(directory, 2)
    (directory / "shard-1-of-2").rename(tmp_path / "elsewhere")
    with ParameterServer(1, 2, None, "log", directory, transport=MemoryTransport()):
        pass


def test_directories_without_changes_do_not_prevent_a_start(tmp_path: Path) -> None:
    """A start with the wrong number by mistake, and damaged files that a repair had set aside."""
    with ParameterServer(0, 1, None, "log", tmp_path, transport=MemoryTransport()):
        pass
    assert list((tmp_path / "shard-0-of-1").glob("log-bodies-*"))
    aside = tmp_path / "shard-0-of-3" / "set-aside"
    aside.mkdir(parents=True)
    (aside / "log-bodies-1").write_bytes(b"damaged")
    with ParameterServer(0, 2, None, "log", tmp_path, transport=MemoryTransport()):
        pass


@pytest.mark.parametrize("name", ["log-bodies-2", "manifest-00000001.json"])
def test_state_that_cannot_be_read_counts_as_state(name: str, tmp_path: Path) -> None:
    with ParameterServer(0, 1, None, "log", tmp_path, transport=MemoryTransport()):
        pass
    (tmp_path / "shard-0-of-1" / name).write_bytes(b"damaged" * 10)
    with pytest.raises(CheckpointError, match="holds the state of a different number of shards"):
        ParameterServer(0, 2, None, "log", tmp_path)
