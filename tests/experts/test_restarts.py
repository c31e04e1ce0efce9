"""Servers and directories that come back, are there twice, or want the same folder."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from expert_modules import served
from torch import nn

from anabranch.errors import BoundaryError, CheckpointError, NotFound, PeerLost
from anabranch.experts import (
    Directory,
    DirectoryServer,
    ExpertBackend,
    ExpertServer,
    RemoteExpert,
    RemoteMixtureOfExperts,
)
from anabranch.experts.server import expert_server
from anabranch.record.spans import Span, heard
from anabranch.tensors import TensorSpec
from anabranch.transport import Client
from waiting import wait_until


def backend() -> ExpertBackend:
    return ExpertBackend("ffn.0", nn.Linear(4, 4), args_schema=[TensorSpec(4)])


def test_the_schema_of_a_server_restarted_with_another_is_requested_again(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    endpoint = f"unix:{tmp_path}/experts"
    expert = RemoteExpert("ffn.0", endpoint)
    for _ in range(2):
        with ExpertServer([backend()], listen=endpoint):
            expert(torch.ones(2, 4)).sum().backward()
    wider = ExpertBackend("ffn.0", nn.Linear(4, 6), args_schema=[TensorSpec(4)])
    with ExpertServer([wider], listen=endpoint):
        assert expert(torch.ones(2, 4)).shape == (2, 6)


def test_a_mixture_requests_the_changed_schema_of_a_restarted_expert(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    endpoint = f"unix:{tmp_path}/experts"
    directory = Directory()
    mixture = RemoteMixtureOfExperts(4, [1], directory, "ffn", k_best=1, k_min=1)
    with ExpertServer([backend()], listen=endpoint, directory=directory):
        assert mixture(torch.ones(2, 4)).shape == (2, 4)
    rounded = ExpertBackend("ffn.0", nn.Linear(4, 4), args_schema=[TensorSpec(4, compression="float16")])
    with ExpertServer([rounded], listen=endpoint, directory=directory):
        with pytest.raises(BoundaryError, match="a different schema"):
            mixture(torch.ones(2, 4))
        assert mixture(torch.ones(2, 4)).shape == (2, 4)


def test_a_directory_that_lost_its_table_learns_it_again_from_the_servers(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    names = f"unix:{tmp_path}/names"
    with Client(retries=2) as client, ExitStack() as stack:
        directory = Directory(names)
        first = stack.enter_context(ExitStack())
        first.enter_context(DirectoryServer(names))
        stack.enter_context(ExpertServer([backend()], directory=names, ttl=0.3))

        def served() -> bool:
            try:
                return RemoteExpert("ffn.0", directory, client=client)(torch.ones(1, 4)).shape == (1, 4)
            except NotFound:
                return False

        # Announced again and again, and on a busy machine perhaps forgotten in between.
        wait_until(served)
        first.close()
        stack.enter_context(DirectoryServer(names))
        wait_until(lambda: directory.lookup(["ffn.0"]))
        wait_until(lambda: directory.active(["ffn"]) == {"ffn": [0]})
        wait_until(served)


# --- an expert that another live server has announced already: the new server says so, and serves


def make(uid: str = "ffn.0") -> ExpertBackend:
    module = nn.Linear(2, 2)
    return ExpertBackend(uid, module, torch.optim.SGD(module.parameters(), lr=0.1), args_schema=[TensorSpec(2)])


def test_a_uid_that_another_live_server_announced_is_warned_of_once_and_served(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_server, "_GLANCE", 60.0)
    events: list[Span] = []
    directory = Directory()
    with (
        heard(lambda span: events.append(span) if span[0] == "experts.announced_twice" else None),
        served(make("ffn.0"), make("ffn.1"), directory=directory, ttl=3000.0) as first,
        served(make("ffn.0"), make("ffn.2"), directory=directory, ttl=3000.0) as second,
    ):
        wait_until(lambda: events)
        assert directory.lookup(["ffn.0"]) == {"ffn.0": second.endpoint}
        assert RemoteExpert("ffn.0", directory)(torch.ones(1, 2)).shape == (1, 2)
        assert events[0][6] == {"uids": ["ffn.0"], "other": first.endpoint, "endpoint": second.endpoint}
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(events) == len(warnings) == 1
    assert warnings[0].startswith("ffn.0 was listed at another live server")
    assert first.endpoint in warnings[0]
    assert "stop one of them" in warnings[0]


def test_a_server_restarted_at_a_new_address_is_not_warned_of_its_old_one(
    caplog: pytest.LogCaptureFixture, tmp_path_factory: pytest.TempPathFactory
) -> None:
    gone = f"unix:{tmp_path_factory.mktemp('gone')}/socket"
    with DirectoryServer() as names:
        names.directory.announce(["ffn.0"], gone, ttl=30.0)
        with (
            served(make("other.0")) as alive,  # answers, but has no such expert any more
            served(make("ffn.0"), make("ffn.1"), directory=names.endpoint) as server,
        ):
            server._warn_of_others({"ffn.0": gone, "ffn.1": alive.endpoint})
    assert not caplog.records


def test_ctrl_c_while_a_directory_does_not_answer_ends_the_server_and_the_program() -> None:
    class Pressed(Directory):
        def withdraw(self, uids: object, endpoint: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), served(make("ffn.0"), directory=Pressed()) as server:
        expert = RemoteExpert("ffn.0", server.endpoint)
    with pytest.raises(PeerLost):
        expert(torch.ones(1, 2))


# --- one server saves an expert in a directory: a second would overwrite the training of the first


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
