"""A shard whose directory cannot be reached starts not at all, and leaves nothing open."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

import anabranch as ab
from anabranch.parameter_server import ParameterServer


class Unreachable:
    """A directory that refuses every announcement."""

    def announce(self, uids: Sequence[str], endpoint: str, ttl: float) -> None:
        raise ab.PeerLost("nobody answers", peer="the directory", operation="announce")

    def withdraw(self, uids: Sequence[str], endpoint: str) -> None:
        raise ab.PeerLost("nobody answers", peer="the directory", operation="withdraw")


def test_a_shard_that_cannot_be_announced_leaves_nothing_open(tmp_path) -> None:
    server = ParameterServer(durability="log", checkpoint_dir=tmp_path, directory=Unreachable())  # type: ignore[arg-type]
    with pytest.raises(ab.PeerLost, match="nobody answers"):
        server.__enter__()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("anabranch-shard")]
    with ParameterServer(durability="log", checkpoint_dir=tmp_path):  # the directory was given back
        pass
