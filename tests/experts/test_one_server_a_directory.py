"""One server saves an expert in a directory: a second would overwrite the training of the first."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
import torch
from expert_modules import served
from torch import nn

from anabranch.errors import CheckpointError
from anabranch.experts import ExpertBackend, RemoteExpert
from anabranch.experts.server.persistence import lock
from anabranch.tensors import TensorSpec
from programs import Programs


def make(uid: str = "ffn.0") -> ExpertBackend:
    module = nn.Linear(2, 2)
    return ExpertBackend(uid, module, torch.optim.SGD(module.parameters(), lr=0.1), args_schema=[TensorSpec(2)])


def test_a_second_server_of_an_expert_in_one_directory_is_refused_and_the_first_serves_on(tmp_path: Path) -> None:
    first = make()
    with served(first, checkpoint_dir=tmp_path) as server:
        with (
            pytest.raises(CheckpointError, match=r"saves ffn\.0 here \(process \d+ on .*--checkpoint-dir"),
            served(make("ffn.1"), make(), checkpoint_dir=tmp_path),
        ):
            pass
        with served(make("ffn.1"), checkpoint_dir=tmp_path):  # nothing of the refused one stays behind
            RemoteExpert("ffn.0", server.endpoint)(torch.ones(1, 2)).sum().backward()
    second = make()
    with served(second, checkpoint_dir=tmp_path):  # the lock is held until the last state is saved, and no longer
        assert second.updates == 1
        assert torch.equal(second.module.weight, first.module.weight)


def test_the_holder_is_named_and_a_killed_one_blocks_no_other(tmp_path: Path, programs: Programs) -> None:
    text = """
import sys, time
from pathlib import Path
from anabranch.experts.server.persistence import lock

mine = lock(Path(sys.argv[1]), "ffn.0")
print("locked", flush=True)
time.sleep(600)
"""
    directory = tmp_path / "ffn.0"
    with programs.start(text, directory) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match=rf"process {holder.pid} on {socket.gethostname()}"):
            lock(directory, "ffn.0")
        holder.kill()
    with lock(directory, "ffn.0"):
        pass


def test_a_directory_that_may_only_be_read_is_served_from_without_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(make(), checkpoint_dir=tmp_path) as server:
        RemoteExpert("ffn.0", server.endpoint)(torch.ones(1, 2)).sum().backward()
    plain = os.open

    def refused(path: str | Path, *arguments: int, **options: int) -> int:
        if Path(path).name == "lock":
            raise PermissionError(errno.EACCES, "Permission denied")
        return plain(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refused)
    first, second = make(), make()
    with served(first, checkpoint_dir=tmp_path), served(second, checkpoint_dir=tmp_path):
        assert first.updates == second.updates == 1
