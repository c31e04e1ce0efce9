"""What a shard that comes back with less than it had acknowledged tells its clients."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mortal import SGD, SPEC, Shard, push, value

import anabranch as ab
from anabranch.checkpoint import read
from anabranch.errors import CheckpointError, RolledBack
from anabranch.parameter_server import ParameterClient, ParameterServer, Worker
from anabranch.record.spans import on_fault_point
from anabranch.testing import MemoryTransport
from waiting import wait_until

ONE = torch.tensor([1])


def test_a_bare_client_learns_how_many_of_its_pushes_are_lost_and_continues(tmp_path: Path) -> None:
    with (shard := Shard(tmp_path, "checkpoint")) as client, shard.client() as other, shard.client() as reader:
        client.init_table(SPEC, SGD)
        push(client, 5)
        shard.server.checkpoint()
        push(client, 3)
        push(other, 2)
        shard.die()
        shard.start()
        assert value(reader) == 5  # it has lost nothing
        with pytest.raises(RolledBack, match="3 pushes of this client are lost") as told:
            push(client)
        assert told.value.lost == 3
        with pytest.raises(ab.BoundaryError) as also:
            value(other)
        assert isinstance(also.value, RolledBack)
        assert also.value.lost == 2
        push(client, 3)
        push(other, 2)
        assert value(client) == 10
        shard.die()
        shard.start()
        lost = 0
        for one in (client, other):
            with pytest.raises(RolledBack) as told:
                value(one)
            lost += told.value.lost
        assert (lost, value(client)) == (5, 5)


@pytest.mark.parametrize(("durability", "ask"), [("checkpoint", value), ("none", push)])
def test_a_restart_with_none_of_the_pushes_is_reported(
    durability: str, ask: Callable[[ParameterClient], object], tmp_path: Path
) -> None:
    """With checkpoints the table comes back though none has seen it: it was ``NotFound ... there are: none``."""
    with (shard := Shard(tmp_path, durability)) as client:
        client.init_table(SPEC, SGD)
        push(client, 4)
        shard.die()
        shard.start()
        with pytest.raises(RolledBack) as told:
            ask(client)
        assert told.value.lost == 4
        assert durability == "none" or value(client) == 0


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_every_worker_of_a_job_learns_of_any_lost_push(consistency: str, tmp_path: Path) -> None:
    """Under bsp they died of ``SchemaError ... pushes step 503; its next is step 430``."""
    shard = Shard(tmp_path, "checkpoint")
    with (
        shard.client(worker=Worker(0, 2, consistency)) as first,
        shard.client(worker=Worker(1, 2, consistency)) as second,
    ):
        first.init_table(SPEC, SGD)
        for step in range(4):
            if step == 2:
                shard.server.checkpoint()
            first.push_many({"t": (ONE, torch.ones(1, 2))}, step=step)
            if consistency == "bsp" or step < 2:
                second.push_many({"t": (ONE, torch.ones(1, 2))}, step=step)
        shard.die()
        shard.start()
        for worker, lost in ((first, 2), (second, 2 if consistency == "bsp" else 0)):
            with pytest.raises(RolledBack, match="it is at step 2 of its incarnation [0-9a-f]+") as told:
                worker.push_many({"t": (ONE, torch.ones(1, 2))}, step=4)
            assert told.value.lost == lost
    shard.die()


def test_a_first_checkpoint_is_there_from_the_start_and_the_next_when_its_time_has_come(tmp_path: Path) -> None:
    with (shard := Shard(tmp_path, "checkpoint", checkpoint_seconds=0.01)) as client:
        assert list((tmp_path / "shard-0-of-1").glob("manifest-*"))
        client.init_table(SPEC, SGD)
        push(client, 3)
        wait_until(lambda: read(tmp_path / "shard-0-of-1").step == 4)
        shard.die()
        shard.start()
        assert value(client) == 3


def test_the_directory_of_another_shard_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    """Two directories that were swapped served the wrong rows, all zero, to whoever asked."""

    def serve(shard: int) -> None:
        with ParameterServer(shard, 2, transport=MemoryTransport(), durability="log", checkpoint_dir=tmp_path):
            pass

    serve(0)
    serve(1)
    (tmp_path / "shard-0-of-2").rename(tmp_path / "aside")
    (tmp_path / "shard-1-of-2").rename(tmp_path / "shard-0-of-2")
    with pytest.raises(CheckpointError, match="the checkpoint here was written as shard-1-of-2"):
        serve(0)


def cut(log: Path) -> None:
    os.truncate(log, 50)


def move_away(log: Path) -> None:
    log.parent.rename(log.parent.with_name("elsewhere"))


def replace(log: Path) -> None:
    move_away(log)
    shutil.copytree(log.parent.with_name("elsewhere"), log.parent)


@pytest.mark.parametrize("harm", [cut, Path.unlink, move_away, replace])
def test_nothing_is_acknowledged_that_would_not_be_found_again(harm: Callable[[Path], None], tmp_path: Path) -> None:
    """A log that was cut or removed under a running server went on taking pushes until the restart showed it."""
    with Shard(tmp_path, "log") as client:
        client.init_table(SPEC, SGD)
        push(client, 3)
        harm(max(tmp_path.glob("shard-*/log-bodies-*")))
        with pytest.raises(CheckpointError, match=r"nothing more is acknowledged here: restore it"):
            push(client)


def test_a_checkpoint_that_cannot_be_written_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server on a full disk said nothing until it ended, and all since its first checkpoint was gone then."""
    tries = threading.Semaphore(0)

    def fill_up(name: str) -> None:
        if name == "durability.before_checkpoint":
            tries.release()
            raise OSError(errno.ENOSPC, "No space left on device")

    shard = Shard(tmp_path, "checkpoint", checkpoint_seconds=0.01)
    with shard as client, caplog.at_level("WARNING", logger="anabranch.parameter_server"):
        client.init_table(SPEC, SGD)
        with on_fault_point(fill_up):
            push(client)
            for _ in range(4):
                assert tries.acquire(timeout=60)
    said = [record.getMessage() for record in caplog.records if "no checkpoint could be written" in record.getMessage()]
    assert len(said) == 1
    assert "No space left on device" in said[0]


def test_a_full_disk_is_reported_as_one_and_loses_no_acknowledged_push(tmp_path: Path) -> None:
    """It was a ``RemoteError`` with a traceback."""

    def fill_up(name: str) -> None:
        if name == "push_log.before_append":
            raise OSError(errno.ENOSPC, "No space left on device")

    with (shard := Shard(tmp_path, "log")) as client:
        client.init_table(SPEC, SGD)
        push(client, 3)
        with on_fault_point(fill_up), pytest.raises(CheckpointError, match="No space left on device") as told:
            push(client)
        assert "Traceback" not in str(told.value)
        assert any("refused by memory:shard" in note for note in told.value.__notes__)
        push(client)  # there is room again
        shard.die()
        shard.start()
        assert value(client) == 4
        push(client)
        assert value(client) == 5
