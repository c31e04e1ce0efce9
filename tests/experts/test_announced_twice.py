"""An expert that another live server has announced already: the new server says so, and serves."""

from __future__ import annotations

import logging

import pytest
import torch
from expert_modules import served
from torch import nn

from anabranch.errors import PeerLost
from anabranch.experts import Directory, DirectoryServer, ExpertBackend, RemoteExpert
from anabranch.experts.server import expert_server
from anabranch.record.spans import Span, heard
from anabranch.tensors import TensorSpec
from waiting import wait_until


def make(uid: str) -> ExpertBackend:
    return ExpertBackend(uid, nn.Linear(2, 2), args_schema=[TensorSpec(2)])


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
