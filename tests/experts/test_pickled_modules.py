"""Remote modules are copied and pickled like any module: they hold addresses, and connect where they are used."""

from __future__ import annotations

import copy
import io
import pickle  # what users do with modules; the package itself never unpickles
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from expert_modules import Feedforward, served
from torch import nn

from anabranch.experts import (
    Directory,
    DirectoryServer,
    ExpertBackend,
    RemoteExpert,
    RemoteMixtureOfExperts,
    RemoteSwitchMixtureOfExperts,
)
from anabranch.parameter_server import ParameterServer, RemoteEmbedding
from anabranch.tensors import TensorSpec
from anabranch.testing import MemoryTransport
from anabranch.transport import Client
from programs import Programs


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))  # type: ignore[no-any-return]


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


WAYS = pytest.mark.parametrize("way", [copy.deepcopy, pickled, saved], ids=lambda way: way.__name__)
Way = Callable[[nn.Module], nn.Module]


class Named(RemoteExpert):
    """A user's subclass, with state of its own."""

    def forward(self, *args: object, **kwargs: object) -> object:
        return super().forward(*args, **kwargs)


@pytest.mark.quick_cases(4)
@WAYS
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("by_directory", [False, True])
def test_a_pickled_expert_calls_the_same_expert(way: Way, used: bool, by_directory: bool) -> None:
    module = Feedforward()
    with (
        DirectoryServer() as names,
        served(ExpertBackend("ffn.0", module, args_schema=[TensorSpec(4)]), directory=names.endpoint) as server,
    ):
        where = Directory(names.endpoint, timeout=30.0) if by_directory else server.endpoint
        expert = Named("ffn.0", where, forward_timeout=70.0, backward_timeout=80.0)
        expert.scale = nn.Parameter(torch.ones(2))
        x = torch.randn(2, 4)
        if used:
            expert(x).sum().backward()  # type: ignore[attr-defined]
        model = nn.Sequential(nn.Linear(4, 4), expert.eval())
        other = way(model)
        assert type(other[1]) is Named
        assert not other[1].training
        assert (other[1].forward_timeout, other[1].backward_timeout) == (70.0, 80.0)
        assert other[1].scale is not expert.scale
        assert torch.equal(other(x), model(x))
        other(x).sum().backward()
        assert torch.isfinite(other[0].weight.grad).all()  # type: ignore[union-attr]


@pytest.mark.quick_cases(4)
@WAYS
@pytest.mark.parametrize("kind", [RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts])
@pytest.mark.parametrize("served_directory", [False, True])
def test_a_mixture_travels_with_its_gate(
    way: Way, kind: type[RemoteMixtureOfExperts] | type[RemoteSwitchMixtureOfExperts], served_directory: bool
) -> None:
    with DirectoryServer() as names:
        directory: Directory | str = names.endpoint if served_directory else Directory()
        backends = [ExpertBackend(f"ffn.{i}", Feedforward(), args_schema=[TensorSpec(4)]) for i in range(3)]
        with served(*backends, directory=directory):
            mixture = kind(4, [3], directory, "ffn").eval()
            x = torch.randn(5, 4)
            expected = mixture(x)
            other = way(mixture)
            answer = other(x)
            for one, another in zip(
                *((value if isinstance(value, tuple) else (value,)) for value in (expected, answer)), strict=True
            ):
                assert torch.equal(one, another)
            assert other.gate.weight is not mixture.gate.weight
            assert other.statistics().calls == len(other.statistics().rows) > 0


CHILD = """
import os, pickle, sys, torch
import anabranch as ab

with open(sys.argv[1], "rb") as file:
    modules = pickle.load(file)
for name, (module, given) in modules.items():
    if name == "alone":
        del os.environ["ANABRANCH_SERVERS"]
    try:
        out = module(given)
        out.sum().backward()
        print(name, float(out.sum().detach()), flush=True)
    except ValueError as error:
        print(name, type(error).__name__, error, flush=True)
"""


def test_another_process_reaches_experts_and_servers_and_not_what_was_in_memory(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, path, x, ids = Directory(), tmp_path / "modules", torch.ones(2, 4), torch.tensor([1, 2])
    backend = ExpertBackend("same.0", nn.Identity(), args_schema=[TensorSpec(4)])
    alone = RemoteEmbedding("alone", 10, 2, init=0.0, optimizer=sgd)
    with ParameterServer() as rows, DirectoryServer() as names, served(backend, directory=directory) as server:
        alone(ids).sum().backward()
        monkeypatch.setenv("ANABRANCH_SERVERS", rows.endpoint)
        table = RemoteEmbedding("t", 10, 2, init=0.0, optimizer=sgd)
        Directory(names.endpoint).announce(["same.0"], server.endpoint, ttl=600.0)
        modules = {
            "expert": (RemoteExpert("same.0", server.endpoint), x),
            "named": (RemoteExpert("same.0", Directory(names.endpoint)), x),
            "mixture": (RemoteMixtureOfExperts(4, [1], names.endpoint, "same", k_best=1), x),
            "memory": (RemoteMixtureOfExperts(4, [1], directory, "same", k_best=1), x),
            "table": (table, ids),
            "new": (alone, ids),  # where the job has servers, which have trained no such table
            "alone": (alone, ids),
        }
        for module, given in modules.values():
            module(given)
        table(ids[:1]).sum().backward()
        path.write_bytes(pickle.dumps(modules))
        done = programs.run(CHILD, path)
        table.close()
        alone.close()
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert lines["expert"] == lines["named"] == "8.0"
    assert float(lines["mixture"]) == pytest.approx(8.0)
    assert lines["table"] == "-2.0"
    assert "ValueError this directory was in the memory of the process that pickled it" in lines["memory"]
    for name in ("new", "alone"):
        assert "the rows of RemoteEmbedding alone were in the memory of the process that pickled it" in lines[name]
    assert backend.updates == 3


LOADER = """
import sys, torch
from torch.utils.data import DataLoader, Dataset
import anabranch as ab

class Asks(Dataset):
    def __init__(self, expert):
        self.expert = expert
    def __len__(self):
        return 4
    def __getitem__(self, index):
        with torch.no_grad():
            return self.expert(torch.full((1, 4), float(index)))[0]

expert = ab.RemoteExpert("same.0", sys.argv[1])
expert(torch.ones(1, 4))  # a used client stays this process's
mixture = ab.RemoteMixtureOfExperts(4, [1], sys.argv[2], "same", k_best=1)
mixture(torch.ones(1, 4))
for module in (expert, mixture):
    batches = [batch.sum().item() for batch in DataLoader(Asks(module), batch_size=2, num_workers=2)]
    print(*batches, flush=True)
expert(torch.ones(1, 4))

class Rows(Dataset):
    def __init__(self, table):
        self.table = table
    def __len__(self):
        return 4
    def __getitem__(self, index):
        with torch.no_grad():
            return self.table(torch.tensor([index]))[0]

table = ab.RemoteEmbedding("t", 10, 2, init=1.0, optimizer=lambda rows: torch.optim.SGD(rows, lr=1.0))
table(torch.tensor([1]))
print(*[batch.sum().item() for batch in DataLoader(Rows(table), batch_size=2, num_workers=2)], flush=True)
table.close()
"""


def test_workers_of_a_loader_that_are_forked_connect_themselves(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ExpertBackend("same.0", nn.Identity(), args_schema=[TensorSpec(4)])
    with ParameterServer() as parameters, DirectoryServer() as names:
        monkeypatch.setenv("ANABRANCH_SERVERS", parameters.endpoint)
        with served(backend, directory=names.endpoint) as server:
            done = programs.run(LOADER, server.endpoint, names.endpoint)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["4.0 20.0", "4.0 20.0", "4.0 4.0"]


def test_a_module_with_a_client_that_cannot_leave_its_process_says_so() -> None:
    network = MemoryTransport()
    backend = ExpertBackend("same.0", nn.Identity(), args_schema=[TensorSpec(4)])
    with served(backend, transport=network) as server, Client(transport=network) as client:
        expert = RemoteExpert("same.0", server.endpoint, client=client)
        with pytest.raises(TypeError, match="Client with MemoryTransport cannot leave its process"):
            pickle.dumps(expert)
        assert torch.equal(copy.deepcopy(expert)(torch.ones(1, 4)), torch.ones(1, 4))  # type: ignore[arg-type]
    with Client(retries=3) as own:
        again = pickled(RemoteExpert("same.0", "unix:/nowhere/at/all", client=own))
        assert again._module_client.client is not own  # type: ignore[union-attr]


def sgd(rows: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(rows, lr=1.0)  # type: ignore[call-overload]


@WAYS
@pytest.mark.parametrize("used", [False, True])
def test_a_remote_embedding_travels_and_reads_the_same_table(way: Way, used: bool) -> None:
    table = RemoteEmbedding("t", 10, 2, init=0.0, optimizer=sgd)
    ids = torch.tensor([1, 2, 1])
    try:
        if used:
            table(ids).sum().backward()
        other = way(table)
        if used:
            other(ids).sum().backward()
            assert torch.equal(table(ids), torch.tensor([[-4.0, -4.0], [-2.0, -2.0], [-4.0, -4.0]]))
            assert torch.equal(other(ids), table(ids))
            other.close()  # type: ignore[operator]
            assert table(ids).shape == (3, 2)
            another = way(way(table))
            table.close()
            assert torch.equal(another(ids), table(ids))  # each goes on with the rows as they were
            another.close()  # type: ignore[operator]
        else:
            assert other(ids).shape == (3, 2)
            other.close()  # type: ignore[operator]
    finally:
        table.close()
