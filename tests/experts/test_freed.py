"""Servers, callers and clients are freed by reference counts alone: no cycle keeps a module or a socket for a while."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from expert_modules import causal_backend, served
from torch import nn

from anabranch.errors import CheckpointError, NonFinite, PeerLost
from anabranch.experts import DirectoryServer, ExpertBackend, ExpertServer, RemoteExpert, RemoteMixtureOfExperts
from anabranch.tensors import TensorSpec
from anabranch.testing import MemoryTransport
from anabranch.transport import Client


def use(how: str, client: Client, folder: Path) -> dict[str, object]:
    """Serve an expert and call it; return what is to be freed."""
    module = nn.Linear(4, 4)
    backend = ExpertBackend("ffn.0", module, args_schema=[TensorSpec(4)], keep_activations=8 * (how == "kept"))
    if how == "session":
        backend = causal_backend("ffn.0")
    x, more = torch.ones(2, 4), {}
    with DirectoryServer() as names, served(backend, directory=names.endpoint, checkpoint_dir=folder) as server:
        caller: nn.Module = RemoteExpert("ffn.0", server.endpoint, client=client)
        if how == "mixture":
            caller = RemoteMixtureOfExperts(4, [1], names.endpoint, "ffn", k_best=1, client=client)
        if how == "session":
            with caller.session(8) as session:
                session.step(torch.ones(1, 1, 8))
                with suppress(NonFinite):
                    session.step(torch.full((1, 1, 8), float("nan")))
                    raise AssertionError("NaN was not refused")
        else:
            caller(x).sum().backward()
        if how == "refused":
            for ask in (lambda: caller(x * float("nan")), lambda: (caller(x).sum() * float("nan")).backward()):
                try:
                    ask()
                except NonFinite:
                    continue
                raise AssertionError("NaN was not refused")
        if how == "twice":
            other = ExpertBackend("ffn.0", nn.Linear(4, 4), args_schema=[TensorSpec(4)])
            more = {"other": other, "another server": ExpertServer([other], checkpoint_dir=folder)}
            with suppress(CheckpointError):
                more["another server"].__enter__()
                raise AssertionError("a second server was let in")
    if how == "gone":
        with suppress(PeerLost):
            caller(x)
            raise AssertionError("nobody is there")
    things = {"server": server, "backend": backend, "module": backend.module, "caller": caller, "client": client}
    return {**things, "names": names, **more}


@pytest.mark.parametrize("how", ["expert", "kept", "mixture", "session", "refused", "gone", "twice"])
def test_what_is_closed_is_freed_by_reference_counts_alone(how: str, tmp_path: Path) -> None:
    torch.optim.Adam(nn.Linear(1, 1).parameters())  # the first one imports much of torch, with a cycle of its own
    gc.collect()
    gc.disable()
    try:
        with Client(retries=0) as client:
            things = use(how, client, tmp_path)
        del client
        references = {name: weakref.ref(thing) for name, thing in things.items()}
        things.clear()
        assert [name for name, reference in references.items() if reference() is not None] == []
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # it listens from its construction on
def test_a_server_that_is_never_entered_is_freed_by_reference_counts_alone(tmp_path: Path) -> None:
    backend = causal_backend("ffn.0")
    network = MemoryTransport()
    server = ExpertServer([backend], checkpoint_dir=tmp_path, transport=network)
    names = DirectoryServer(transport=network)
    references = [weakref.ref(thing) for thing in (server, names, backend, backend.module)]
    gc.collect()
    gc.disable()
    try:
        del server, names, backend
        assert [reference() for reference in references] == [None] * 4
    finally:
        gc.enable()
