"""Servers and directories that come back at the same place are used again, without anybody being told."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

from anabranch.errors import BoundaryError, NotFound
from anabranch.experts import (
    Directory,
    DirectoryServer,
    ExpertBackend,
    ExpertServer,
    RemoteExpert,
    RemoteMixtureOfExperts,
)
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
