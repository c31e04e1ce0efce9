"""Remote modules are copied, pickled, counted and freed like any module; they connect where they are used."""

from __future__ import annotations

import copy
import gc
import io
import pickle  # what users do with modules; the package itself never unpickles
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_modules import Feedforward, calling, causal_backend, expert_of, served
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import anabranch as ab
from anabranch.autodiff.moved_parameter import Switch
from anabranch.errors import CheckpointError, NonFinite, PeerLost
from anabranch.experts import (
    Directory,
    DirectoryServer,
    ExpertServer,
    RemoteExpert,
    RemoteMixtureOfExperts,
    RemoteSwitchMixtureOfExperts,
)
from anabranch.parameter_server import ParameterServer, RemoteEmbedding
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
    with (
        DirectoryServer() as names,
        served(expert_of(Feedforward(), optimizer=None), directory=names.endpoint) as server,
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
def test_a_mixture_travels_with_its_gate(way: Way, kind: Any, served_directory: bool) -> None:
    with DirectoryServer() as names:
        directory: Directory | str = names.endpoint if served_directory else Directory()
        with served(*(expert_of(Feedforward(), uid=f"ffn.{i}") for i in range(3)), directory=directory):
            mixture = kind(4, [3], directory, "ffn").eval()
            other, x = way(mixture), torch.randn(5, 4)
            for one, another in zip(mixture(x), other(x), strict=True):
                assert torch.equal(one, another)
            assert other.gate.weight is not mixture.gate.weight  # type: ignore[union-attr]
            assert other.statistics().calls == len(other.statistics().rows) > 0  # type: ignore[operator]


PROGRAM = """
import os, pickle, sys, torch
from torch.utils.data import DataLoader
import anabranch as ab

class Asks(torch.utils.data.Dataset):
    def __init__(self, module, inputs):
        self.module, self.inputs = module, inputs
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, index):
        with torch.no_grad():
            return self.module(self.inputs[index])[0]

with open(sys.argv[1], "rb") as file:
    modules = pickle.load(file)
for name, (module, x) in modules.items():
    if name == "alone":
        del os.environ["ANABRANCH_SERVERS"]
    try:
        out = module(x)
        # Workers that are forked connect themselves; a used client stays this process's.
        loaded = sum(float(one.sum()) for one in DataLoader(Asks(module, [x] * 2), num_workers=2))
        module(x).sum().backward()
        print(name, float(out.sum().detach()), loaded, flush=True)
    except ValueError as error:
        print(name, type(error).__name__, error, flush=True)
"""


def test_another_process_and_its_forks_reach_experts_and_servers_and_not_what_was_in_memory(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, path, x, ids = Directory(), tmp_path / "modules", torch.ones(1, 4), torch.tensor([1])
    backend = expert_of(nn.Identity(), uid="same.0")
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
        for module, value in modules.values():
            module(value)
        table(ids).sum().backward()
        path.write_bytes(pickle.dumps(modules))
        done = programs.run(PROGRAM, path)
        table.close()
        alone.close()
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert lines["expert"] == lines["named"] == lines["mixture"] == "4.0 8.0"
    assert lines["table"] == "-2.0 -4.0"
    assert "ValueError this directory was in the memory of the process that pickled it" in lines["memory"]
    for name in ("new", "alone"):
        assert "the rows of RemoteEmbedding alone were in the memory of the process that pickled it" in lines[name]
    assert backend.updates == 3


def test_a_module_with_a_client_that_cannot_leave_its_process_says_so() -> None:
    network = MemoryTransport()
    with (
        served(expert_of(nn.Identity()), transport=network) as server,
        Client(transport=network) as client,
    ):
        expert = RemoteExpert("ffn.0", server.endpoint, client=client)
        with pytest.raises(TypeError, match="Client with MemoryTransport cannot leave its process"):
            pickle.dumps(expert)
        assert torch.equal(copy.deepcopy(expert)(torch.ones(1, 4)), torch.ones(1, 4))  # type: ignore[arg-type]
    with Client(retries=3) as own:
        again = pickled(RemoteExpert("ffn.0", "unix:/nowhere/at/all", client=own))
        assert again._module_client.client is not own  # type: ignore[union-attr]


def sgd(rows: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(rows, lr=1.0)  # type: ignore[call-overload]


@WAYS
@pytest.mark.parametrize("used", [False, True])
def test_a_remote_embedding_travels_and_reads_the_same_table(way: Way, used: bool) -> None:
    table: Any = RemoteEmbedding("t", 10, 2, init=0.0, optimizer=sgd)
    ids, tables = torch.tensor([1, 2, 1]), [table]
    try:
        if used:
            table(ids).sum().backward()
        tables.append(way(table))
        assert tables[1](ids).shape == (3, 2)
        if used:
            tables[1](ids).sum().backward()
            assert torch.equal(table(ids), torch.tensor([[-4.0, -4.0], [-2.0, -2.0], [-4.0, -4.0]]))
            assert torch.equal(tables[1](ids), table(ids))
            tables.pop().close()
            tables.append(way(way(table)))
            table.close()
            assert torch.equal(tables[1](ids), table(ids))  # each goes on with the rows as they were
    finally:
        for one in tables:
            one.close()


# --- servers, callers and clients are freed by reference counts alone: no cycle keeps a module or a socket for a while


def raises(error: type[Exception], act: Callable[[], object]) -> None:
    """As ``pytest.raises``, which keeps the error."""
    with suppress(error):
        act()
        raise AssertionError(f"no {error.__name__}")


def use(how: str, client: Client, folder: Path) -> dict[str, object]:
    """Serve an expert and call it; return what is to be freed."""
    backend = expert_of(nn.Linear(4, 4), optimizer=None, keep_activations=8 * (how == "kept"))
    if how == "session":
        backend = causal_backend("ffn.0")
    x, more = torch.ones(2, 4), {}
    with DirectoryServer() as names, served(backend, directory=names.endpoint, checkpoint_dir=folder) as server:
        caller: Any = RemoteExpert("ffn.0", server.endpoint, client=client)
        if how == "mixture":
            caller = RemoteMixtureOfExperts(4, [1], names.endpoint, "ffn", k_best=1, client=client)
        if how == "session":
            with caller.session(8) as session:
                session.step(torch.ones(1, 1, 8))
                raises(NonFinite, lambda: session.step(torch.full((1, 1, 8), float("nan"))))
        else:
            caller(x).sum().backward()
        if how == "refused":
            raises(NonFinite, lambda: caller(x * float("nan")))
            raises(NonFinite, lambda: (caller(x).sum() * float("nan")).backward())
        if how == "twice":
            other = expert_of(nn.Linear(4, 4), optimizer=None)
            second = ExpertServer([other], checkpoint_dir=folder)
            raises(CheckpointError, second.__enter__)
            more = {"other": other, "another server": second}
    if how == "gone":
        raises(PeerLost, lambda: caller(x))
    things = {"server": server, "backend": backend, "module": backend.module, "caller": caller, "client": client}
    return {**things, "names": names, **more}


@pytest.fixture
def _without_collector() -> Iterator[None]:
    torch.optim.Adam(nn.Linear(1, 1).parameters())  # the first one imports much of torch, with a cycle of its own
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_without_collector")
@pytest.mark.parametrize("how", ["expert", "kept", "mixture", "session", "refused", "gone", "twice"])
def test_what_is_closed_is_freed_by_reference_counts_alone(how: str, tmp_path: Path) -> None:
    with Client(retries=0) as client:
        things = use(how, client, tmp_path)
    del client
    references = {name: weakref.ref(thing) for name, thing in things.items()}
    things.clear()
    assert [name for name, reference in references.items() if reference() is not None] == []


@pytest.mark.usefixtures("_without_collector")
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # it listens from its construction on
def test_a_server_that_is_never_entered_is_freed_by_reference_counts_alone(tmp_path: Path) -> None:
    backend, network = causal_backend("ffn.0"), MemoryTransport()
    server = ExpertServer([backend], checkpoint_dir=tmp_path, transport=network)
    names = DirectoryServer(transport=network)
    references = [weakref.ref(thing) for thing in (server, names, backend, backend.module)]
    del server, names, backend
    assert [reference() for reference in references] == [None] * 4


# --- a parameter that stands for others on servers: what needs their numbers is refused by name, all else goes on


def table() -> ab.RemoteEmbedding:
    return ab.RemoteEmbedding("t", None, 4, init=0.5, optimizer=lambda rows: torch.optim.SGD(rows, lr=0.5))


@pytest.fixture(params=["expert", "table"])
def remote(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    module = RemoteExpert("e.0", "unix:/nobody") if request.param == "expert" else table()  # it is never called
    yield module
    if isinstance(module, ab.RemoteEmbedding):
        module.close()


def ema(model: nn.Module) -> None:
    for mine, theirs in zip(copy.deepcopy(model).parameters(), model.parameters(), strict=True):
        mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)


USES: dict[str, Callable[[nn.Module], object]] = {
    "penalty": lambda m: sum(p.square().sum() for p in m.parameters()),
    "norm": lambda m: torch.linalg.vector_norm(torch.stack([p.norm() for p in m.parameters()])),
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "ema": ema,
    "AveragedModel": lambda m: AveragedModel(m).update_parameters(m),
    "foreach": lambda m: torch._foreach_add([p.data for p in m.parameters()], 1),
    "gradient": lambda m: torch.autograd.grad(torch.ones((), requires_grad=True), list(m.parameters())),
    "init": lambda m: [nn.init.normal_(p) for p in m.parameters()],
    "save": lambda m: torch.save([p.data.cpu().numpy() for p in m.parameters()], io.BytesIO()),
    "equal": lambda m: [p == p for p in m.parameters()],
    "compiled": lambda m: torch.compile(lambda: sum(p.sum() for p in m.parameters()), backend="eager")(),
}


@pytest.mark.parametrize("use", USES)
def test_the_use_of_its_numbers_is_refused_by_name_with_a_cure(use: str, remote: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), remote)
    name = r"'e.0'.*leave it out" if isinstance(remote, RemoteExpert) else r"RemoteEmbedding t\b.*leave on_servers out"
    with pytest.raises(Exception, match=name) as caught:  # Dynamo wraps what it meets while it traces
        USES[use](model)
    assert isinstance(caught.value, ValueError) or use == "compiled"


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_optimizers_pass_over_it(make: Callable[[Any], torch.optim.Optimizer], remote: nn.Module) -> None:
    layer = nn.Linear(4, 4)
    model, plain = nn.Sequential(layer, remote), copy.deepcopy(layer)
    optimizers = make(model.parameters()), make(plain.parameters())
    for _ in range(2):
        for optimizer, around, module in zip(optimizers, (model, plain), (layer, plain), strict=True):
            module(torch.ones(2, 4)).square().sum().backward()
            nn.utils.clip_grad_norm_(around.parameters(), 0.5)
            nn.utils.clip_grad_value_(around.parameters(), 0.4)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert torch.equal(layer.weight, plain.weight)
    again = make([{"params": [p for p in model.parameters() if p.dim() > 1]}])
    again.add_param_group({"params": [p for p in model.parameters() if p.dim() < 2]})
    other = make(model.parameters())
    other.load_state_dict(optimizers[0].state_dict())
    other.step()


def test_a_model_around_it_is_moved_copied_saved_and_frozen_as_ever(remote: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), remote)
    # As summaries of a model do before they print it.
    assert [(len(p), p.numel(), p.nbytes) for p in model.parameters()] == [(4, 16, 64), (4, 4, 16), (0, 0, 0)]
    (name,) = [name for name, p in model.named_parameters() if isinstance(p, Switch)]
    for one in (
        model,
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        model.to("cpu").eval().train(),
        model.to("meta").to_empty(device="cpu"),
        model.double().half().to(torch.float32),
        model.share_memory(),
    ):
        switch = one.get_parameter(name)
        assert type(switch) is Switch
        assert (switch.requires_grad, switch.dtype, switch.device.type) == (True, torch.float32, "cpu")
        assert switch.grad is None
        assert name not in one.state_dict()
        assert not one.load_state_dict(one.state_dict()).missing_keys
        assert not one.requires_grad_(False).get_parameter(name).requires_grad
        one.requires_grad_(True).zero_grad()
        assert f"{switch}" == repr(switch)
    assert len({*model.parameters()}) == 3
    frozen = remote.requires_grad_(False)
    for one in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        assert not any(p.requires_grad for p in one.parameters())


class AddsRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(4, 4), table()

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.layer(x) + self.table(torch.zeros(len(x), dtype=torch.int64))
        return rows


@pytest.mark.parametrize("keep", [0, 64])
def test_a_served_module_may_have_one(keep: int) -> None:
    module = AddsRow()
    optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1)
    outer = expert_of(module, optimizer=optimizer, keep_activations=keep)
    with calling(outer) as expert:
        expert(torch.ones(2, 4)).sum().backward()
        assert outer.updates == 1
    assert torch.equal(module.table(torch.tensor([0])), torch.full((1, 4), 0.5 - 0.5 * 2))  # and it trains
    module.table.close()
