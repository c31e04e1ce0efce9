"""Experts in their callers' modes, precision and sweeps, and in a step of the executor: the plain loop's numbers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from expert_modules import Slow, adam, all_waiting, calling, expert_of, served, sgd, twins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anabranch as ab
from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.errors import BoundaryError, NotFound, RemoteError, SchemaError
from anabranch.experts import Directory, ExpertBackend, RemoteExpert, RemoteMixtureOfExperts
from anabranch.experts.client.finder import FailureBackoff
from anabranch.testing import FakeClock
from anabranch.transport import Client
from toys import assert_same, plain_step

Engine = Literal["tape", "graph"]
ENGINES: tuple[Engine, ...] = ("tape", "graph")
Batch = tuple[Tensor, Tensor]


class Model(nn.Module):
    """Layers around an expert or a mixture."""

    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before, self.expert, self.after = nn.Linear(4, 4), expert, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        answer, extra = self.expert(self.before(x)), 0.0
        if isinstance(answer, tuple):
            answer, extra = answer
        return self.after(torch.relu(answer)) + extra  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()  # type: ignore[no-any-return]


def batch_of(rows: int = 3) -> Batch:
    return torch.randn(rows, 4), torch.randn(rows, 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_with_an_expert_is_the_plain_loop(engine: Engine) -> None:
    here = Model(nn.Linear(4, 4))
    module = copy.deepcopy(here.expert)
    backend, plain = expert_of(module, uid="linear.0"), sgd(here)
    with served(backend) as server:
        there = Model(ab.RemoteExpert("linear.0", server.endpoint))
        with ab.Executor({"train": ab.TrainStep(there, loss, sgd(there))}, engine=engine) as executor:
            for batch in map(batch_of, (5, 5, 3, 5)):
                expected = plain_step(here, loss, plain, batch)
                assert torch.equal(executor.run("train", batch)["loss"], expected)
            assert executor.engine("train") == engine
    assert torch.equal(module.weight, here.expert.weight)  # type: ignore[arg-type]
    assert torch.equal(there.before.weight, here.before.weight)
    assert backend.updates == 4  # once a step


class Faulty(nn.Linear):
    fault: Exception | None = None
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fault is not None:
            raise self.fault
        return super().forward(x)


class Grid(NamedTuple):
    directory: ab.Directory
    experts: dict[str, Faulty]
    backends: dict[str, ab.ExpertBackend]


@contextmanager
def grid() -> Iterator[Grid]:
    """Six experts on two servers, the same every time."""
    torch.manual_seed(0)
    experts = {f"ffn.{i}.{j}": Faulty(4, 4) for i in range(2) for j in range(3)}
    backends = {uid: expert_of(module, uid=uid) for uid, module in experts.items()}
    directory, (first, second) = ab.Directory(), ([*backends.values()][::2], [*backends.values()][1::2])
    with served(*first, directory=directory), served(*second, directory=directory):
        yield Grid(directory, experts, backends)


def mixed(directory: ab.Directory, *, switch: bool = False, **options: Any) -> Model:
    kind = ab.RemoteSwitchMixtureOfExperts if switch else ab.RemoteMixtureOfExperts
    torch.manual_seed(1)
    return Model(kind(4, [2, 3], directory, "ffn", **options))


def train(engine: Engine, grid: Grid, dead: str | None, **options: Any) -> list[Tensor]:
    """Three steps under a scheduler; the losses, and all state in the end, the experts' too."""
    model = mixed(grid.directory, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    step = ab.TrainStep(model, loss, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    if dead is not None:
        grid.experts[dead].fault = ValueError("out of order")
    with ab.Executor({"train": step}, engine=engine) as executor:
        losses = [executor.run("train", batch_of(6))["loss"] for _ in range(3)]
        assert executor.engine("train") == engine
    theirs = [parameter for expert in grid.experts.values() for parameter in expert.parameters()]
    return [*losses, *model.state_dict().values(), *(parameter.detach().clone() for parameter in theirs)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("switch", [False, True])
@pytest.mark.parametrize("dead", [None, "ffn.1.2"])
def test_a_graph_with_a_mixture_is_the_tape_to_the_bit(
    switch: bool, dead: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.experts.client.finder.FailureBackoff", lambda: FailureBackoff(FakeClock()))
    options = {} if switch else {"k_best": 3, "k_min": 1}
    results = []
    for engine in ENGINES:
        with grid() as there:
            results.append(train(engine, there, dead, switch=switch, **options))
            updates = {uid: backend.updates for uid, backend in there.backends.items()}
            assert max(updates.values()) in (2, 3)  # once a step, for those who were asked in it
            assert dead is None or updates[dead] == 0
            results[-1].append(torch.tensor(list(updates.values())))
    assert all(map(torch.equal, *results))


def step_of(model: nn.Module) -> ab.TrainStep:
    return ab.TrainStep(model, loss, torch.optim.Adam(model.parameters(), lr=0.1, fused=True))


def failing(engine: Engine, grid: Grid, model: nn.Module, batch: Batch) -> Exception:
    """What a run raises when all experts fail; the executor works before and after, and nothing here has moved."""

    def set_fault(fault: Exception | None) -> int:
        for expert in grid.experts.values():
            expert.fault = fault
        return sum(expert.calls for expert in grid.experts.values())

    with ab.Executor({"train": step_of(model)}, engine=engine) as executor:
        for _ in range(2):
            executor.run("train", batch)
        here = parameters_here(model).values()
        before = [parameter.detach().clone() for parameter in here]
        set_fault(ValueError("out of order"))
        with pytest.raises(Exception, match="out of order") as raised:
            executor.run("train", batch)
        assert all(map(torch.equal, before, here))
        calls = set_fault(None)
        assert executor.run("train", batch)["loss"].isfinite()
        assert set_fault(None) > calls
        return raised.value


@pytest.mark.parametrize("kind", [pytest.param("expert", marks=pytest.mark.slow), "mixture"])
def test_a_failing_expert_is_the_same_error_on_either_engine_and_the_next_run_works(kind: str) -> None:
    batch, errors = batch_of(), []
    for engine in ENGINES:
        with grid() as there:
            model = mixed(there.directory, k_best=2, k_min=2)
            if kind == "expert":
                model = Model(ab.RemoteExpert("ffn.0.0", there.directory))
            errors.append(failing(engine, there, model, batch))
    tape, graph = errors
    assert type(tape) is type(graph) is (RemoteError if kind == "expert" else BoundaryError)
    assert message(tape) == message(graph)


def message(error: Exception) -> str:
    return re.sub(r"\d+\.\d+ s|unix:\S+|after .*", "", str(error)).split("\n")[0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["expert", "mixture"])
def test_an_expert_that_is_not_served_is_named(kind: str, engine: Engine) -> None:
    directory = ab.Directory()
    model, error, says = Model(ab.RemoteExpert("nobody.0", directory)), NotFound, "no server for 'nobody.0'"
    if kind == "mixture":
        model, error, says = mixed(directory), BoundaryError, "lists no expert ffn"
    with ab.Executor({"train": step_of(model)}, engine=engine) as executor, pytest.raises(error, match=says):
        executor.run("train", batch_of())


def test_an_expert_that_moves_is_found_again_by_a_graph() -> None:
    directory, batch = ab.Directory(), batch_of()
    with Client(retries=2) as client:
        model = Model(ab.RemoteExpert("linear.0", directory, client=client))
        with ab.Executor({"train": step_of(model)}, engine="graph") as executor:
            for _ in range(2):
                backend = expert_of(nn.Linear(4, 4), uid="linear.0")
                with served(backend, directory=directory):
                    for _ in range(2):
                        assert executor.run("train", batch)["loss"].isfinite()
                assert backend.updates == 2


# --- an expert runs in its caller's mode and precision, and is updated by the sweeps that would reach it here


F64 = torch.float64


@pytest.mark.parametrize("keep", [0, 100])
def test_a_caller_in_eval_mode_gets_the_module_in_eval_mode_and_its_updates(keep: int) -> None:
    here = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)).double()
    here(torch.randn(8, 4, dtype=F64))
    there = copy.deepcopy(here)
    here.eval()
    mine = sgd(here)
    with calling(expert_of(there, keep_activations=keep)) as expert:
        expert.eval()
        for _ in range(2):
            near, far = twins(5, 4, dtype=F64)
            expected, answer = here(near), expert(far)
            assert torch.equal(answer, expected)
            expected.square().sum().backward()
            answer.square().sum().backward()
            assert torch.equal(far.grad, near.grad)
            mine.step()
            mine.zero_grad()
    assert_same(here, there)
    assert all(part.training for part in there.modules())


class Merges(nn.Linear):
    """Weighs twice as much in train mode, and notes each change of its mode; one part of it stays in eval mode."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        self.frozen = nn.Dropout(0.5).eval()
        self.merged = False

    def train(self, mode: bool = True) -> Merges:
        if mode == self.merged:
            self.weight.data *= 2.0 if mode else 0.5
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.frozen(x))


def test_a_module_that_overrides_train_is_restored_through_it_and_frozen_parts_stay_frozen() -> None:
    module = Merges()
    module.frozen.eval()
    nn.init.constant_(module.weight, 4.0)
    with calling(expert_of(module, 1)) as expert:
        for _ in range(2):
            assert expert.eval()(torch.ones(1, 1)).item() == 2.0
            assert expert.train()(torch.ones(1, 1)).item() == 4.0
            assert (module.training, module.frozen.training) == (True, False)


class Modes(nn.Module):
    """Notes the mode and the rows of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((self.training, len(x)))
        return x * 1.0


@pytest.mark.parametrize("backward", [False, True])
def test_callers_of_unlike_modes_never_share_a_batch(backward: bool) -> None:
    module, slow = Modes(), Slow()
    backend = expert_of(module, 1, "modes.0")
    with served(backend, expert_of(slow, 1, "slow.0")) as server:
        experts = [RemoteExpert("modes.0", server.endpoint).train(index % 2 == 0) for index in range(6)]
        outputs = [expert(torch.ones(1, 1)) for expert in experts]
        module.seen.clear()
        calls: list[Callable[[], object]] = [output.sum().backward for output in outputs]
        if not backward:
            calls = [lambda expert=expert: expert(torch.ones(1, 1)) for expert in experts]  # type: ignore[misc]
        all_waiting(calls, server, slow, backend.get_pools()[backward])
    assert sorted(module.seen) == [(False, 3), (True, 3)]


def test_under_autocast_inputs_are_cast_to_the_schema_and_gradients_back() -> None:
    here, first, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(3, 4)
    there = copy.deepcopy(here)
    with calling(expert_of(there)) as expert:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = first(x)
            assert hidden.dtype == torch.bfloat16
            answer = expert(hidden)
            answer.sum().backward()
        assert answer.dtype == torch.float32
        came = first.weight.grad.clone()
        first.weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = first(x)
        here(hidden.float()).sum().backward()
        assert torch.equal(came, first.weight.grad)
        with pytest.raises(SchemaError, match="bfloat16"):
            expert(hidden.detach())
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(SchemaError, match="float64"):
            expert(x.double())


class Chain(nn.Module):
    """A layer, a remote expert that may be in another mode than the rest, and a mixture."""

    def __init__(self, endpoint: str, directory: Directory) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.expert = RemoteExpert("modes.0", endpoint)
        self.mixture = RemoteMixtureOfExperts(4, [1], directory, "modes", k_best=1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.mixture(self.expert(self.first(x)))  # type: ignore[no-any-return]


def test_a_graph_calls_experts_in_the_current_mode_and_precision() -> None:
    results = []
    for engine in ("tape", "graph"):
        torch.manual_seed(0)
        module, directory = Modes(), Directory()
        with served(expert_of(module, uid="modes.0"), directory=directory) as server:
            model = Chain(server.endpoint, directory)
            steps = {
                "train": ab.TrainStep(model, lambda model, x: model(x).square().mean(), sgd(model)),
                "validate": ab.EvalStep(model, lambda model, x: {"y": model(x)}),
            }
            with ab.Executor(steps, engine=engine) as executor:
                for frozen in (False, True, False):
                    model.train()
                    model.expert.train(not frozen)
                    module.seen.clear()
                    results.append(executor.run("train", torch.ones(2, 3, 4))["loss"])
                    # Forward of both, then backward of both, which computes them again.
                    modes = [mode for mode, rows in module.seen if rows == 6]
                    assert modes == [not frozen, True, True, not frozen]
                    module.seen.clear()
                    results.append(executor.run("validate", torch.ones(2, 3, 4))["y"])
                    assert {mode for mode, _ in module.seen} == {False}
                assert executor.engine("train") == engine
    assert all(map(torch.equal, results[:6], results[6:]))


def test_a_scaled_loss_is_refused_because_experts_would_step_with_scaled_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 4), RemoteExpert("ffn.0", "unix:/nowhere/at/all"))
    for remote in (model, RemoteMixtureOfExperts(4, [2], Directory(), "ffn")):
        with pytest.raises(ValueError, match="remote experts .* would step with scaled gradients"):
            ab.TrainStep(remote, lambda model, x: model(x).sum(), sgd(model), precision="float16")
    ab.TrainStep(model, lambda model, x: model(x).sum(), sgd(model), precision="bfloat16")


def test_an_expert_within_an_expert_runs_in_the_mode_of_the_outermost_caller() -> None:
    inner = nn.BatchNorm1d(4)
    with served(expert_of(inner, uid="in.0")) as far:
        outer = nn.Sequential(nn.Linear(4, 4), RemoteExpert("in.0", far.endpoint))
        backend = expert_of(outer, keep_activations=64, optimizer=None)
        assert int(inner.num_batches_tracked) == 0  # finding the outputs leaves what is remote as it is, too
        assert outer[1].training
        with calling(backend) as expert:
            expert.eval()(torch.randn(2, 5, 4)).sum().backward()
            assert int(inner.num_batches_tracked) == 0
            expert.train()(torch.randn(2, 5, 4)).sum().backward()
            assert int(inner.num_batches_tracked) == 1


# --- an expert is updated by the sweeps that would accumulate into its parameters if it were here, and by no others


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = module(x)
    return output.square().sum()


def in_a_session(module: nn.Module, x: Tensor) -> None:
    with ab.Grad().wrt(x, callback=lambda _, gradient: None) as grad:
        grad(loss_of(module, x))


def by_a_manager(module: nn.Module, x: Tensor) -> None:
    manager = ab.GradManager().attach(x)
    with manager:
        manager.backward(loss_of(module, x))


def while_frozen(module: nn.Module, x: Tensor) -> None:
    nn.ModuleList([module]).requires_grad_(False)  # a model around it, which knows its parameters only
    loss_of(module, x).backward()
    module.requires_grad_(True)


def penalty_then_backward(module: nn.Module, x: Tensor) -> None:
    loss = loss_of(module, x)
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()


Sweep = Callable[[nn.Module, Tensor], object]
SWEEPS: dict[str, tuple[int, Sweep]] = {
    "backward": (1, lambda module, x: loss_of(module, x).backward()),
    "of the parameters": (1, lambda module, x: loss_of(module, x).backward(inputs=[x, *module.parameters()])),
    "manager": (1, by_a_manager),
    "session": (1, in_a_session),
    "checkpoint": (1, lambda module, x: checkpoint(loss_of, module, x, use_reentrant=False).backward()),
    "reentrant checkpoint": (1, lambda module, x: checkpoint(loss_of, module, x, use_reentrant=True).backward()),
    "penalty, then backward": (1, penalty_then_backward),
    "no input wants one": (1, lambda module, x: loss_of(module, x.detach()).backward()),
    "grad": (0, lambda module, x: torch.autograd.grad(loss_of(module, x), x)),
    "of the input": (0, lambda module, x: loss_of(module, x).backward(inputs=[x])),
    "jacobian": (0, lambda module, x: torch.autograd.functional.jacobian(lambda x: loss_of(module, x), x)),
    "checkpoint and grad": (
        0, lambda module, x: torch.autograd.grad(checkpoint(loss_of, module, x, use_reentrant=False), x),
    ),
    "frozen": (0, while_frozen),
}  # fmt: skip
KINDS = pytest.mark.parametrize(("kind", "keep"), [("expert", 0), ("expert", 64), ("mixture", 0), ("mixture", 64)])


@contextmanager
def called(kind: str, keep: int) -> Iterator[tuple[nn.Module, ExpertBackend]]:
    backend = expert_of(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(), uid="e.0", keep_activations=keep)
    directory = Directory()
    with served(backend, directory=directory) as server:
        if kind == "expert":
            yield RemoteExpert("e.0", server.endpoint), backend
        else:
            yield RemoteMixtureOfExperts(4, [1], directory, "e", k_best=1).double(), backend


@KINDS
def test_a_sweep_updates_an_expert_if_it_would_reach_its_parameters(kind: str, keep: int) -> None:
    with called(kind, keep) as (remote, backend):
        compare_sweeps(remote, backend)


@pytest.mark.parametrize("schedule", ["1F1B", "ZB1P"])
def test_in_a_pipe_the_same_sweeps_update_an_expert(schedule: str) -> None:
    for keep in (0, 64):
        with called("expert", keep) as (remote, backend):
            pipe = ab.Pipe(nn.Sequential(nn.Identity(), remote), [1, 1], checkpoint="always", schedule=schedule)
            compare_sweeps(pipe, backend)
            pipe.close()


def compare_sweeps(remote: nn.Module, backend: ExpertBackend) -> None:
    for name, (updates, sweep) in SWEEPS.items():
        here = copy.deepcopy(backend.module)
        x, mine = twins(3, 4, dtype=F64)
        before, weights = backend.updates, [parameter.clone() for parameter in backend.module.parameters()]
        sweep(remote, x)
        assert backend.updates - before == updates, name
        assert all(map(torch.equal, weights, backend.module.parameters())) != bool(updates), name
        if "session" not in name and "manager" not in name:
            sweep(here, mine)
            assert (x.grad is None) == (mine.grad is None), name
            assert x.grad is None or torch.allclose(x.grad, mine.grad, rtol=1e-12), name  # type: ignore[arg-type]


def test_a_frozen_expert_gives_the_gradients_of_its_inputs_and_without_any_has_no_graph() -> None:
    module = nn.Linear(4, 4).double()
    with calling(expert_of(module)) as expert:
        expert.requires_grad_(False)
        assert not expert(torch.ones(1, 4, dtype=F64)).requires_grad
        x = torch.ones(1, 4, dtype=F64, requires_grad=True)
        copy.deepcopy(expert)(x).sum().backward()
        assert torch.equal(x.grad, module.weight.sum(0)[None])  # type: ignore[arg-type]
        assert expert.state_dict() == {}
        assert not expert.load_state_dict({}).missing_keys


def test_experts_that_are_frozen_under_a_gate_that_learns() -> None:
    backend, directory = expert_of(nn.Linear(4, 4).double(), uid="e.0"), Directory()
    other = expert_of(nn.Identity(), uid="e.1", args_schema=[ab.TensorSpec(4, dtype=F64)])
    with served(backend, other, directory=directory):
        mixture = RemoteMixtureOfExperts(4, [2], directory, "e", k_best=2).double()
        mixture.weights_there.requires_grad_(False)
        loss_of(mixture, torch.ones(2, 4, dtype=F64)).backward()
        assert backend.updates == 0
        assert mixture.gate.weight.grad is not None
        assert bool(mixture.gate.weight.grad.abs().sum() > 0)


@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_freezing_between_two_steps_of_an_executor_and_after_a_resume(engine: str, tmp_path: Path) -> None:
    backend, updates = expert_of(nn.Linear(4, 4)), []
    with served(backend) as server:

        def executor() -> tuple[nn.Sequential, ab.Executor]:
            model = nn.Sequential(nn.Linear(4, 4), RemoteExpert("ffn.0", server.endpoint))
            return model, ab.Executor({"train": ab.TrainStep(model, loss_of, adam(model))}, engine=engine)

        model, first = executor()
        with first:
            for trained in (True, True, False, True, False):
                model[1].requires_grad_(trained)
                first.run("train", torch.ones(2, 4))
                updates.append(backend.updates)
            assert list(first.state_dict()) == ["0.weight", "0.bias"]
            first.save(tmp_path)
        model, second = executor()
        with second:
            second.load(tmp_path)
            assert not model[1].weights_there.requires_grad
            second.run("train", torch.ones(2, 4))
    assert [*updates, backend.updates] == [1, 2, 2, 3, 3, 3]


@KINDS
def test_what_torch_could_only_do_with_the_parameters_here_is_refused_by_name(kind: str, keep: int) -> None:
    with called(kind, keep) as (remote, backend):
        x = torch.ones(2, 4, dtype=F64, requires_grad=True)
        says = r"parameters of .* 'e.*'grad' cannot reach its numbers.*loss.backward\(\)"
        with pytest.raises(ValueError, match=says):
            torch.autograd.grad(loss_of(remote, x), [x, *remote.parameters()], allow_unused=True)
        (gradient,) = torch.autograd.grad(remote(x).sum(), x, create_graph=True)  # no gradient here depends on x
        with pytest.raises(RuntimeError, match="the gradient of .* 'e.*' cannot be differentiated again"):
            (x.sum() + gradient.square().sum()).backward()
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.functional.hessian(lambda x: loss_of(remote, x), x)
        for transformed in (torch.func.grad, torch.func.vmap):
            with pytest.raises(ValueError, match="torch.func"):
                transformed(lambda x: loss_of(remote, x[None]))(torch.ones(2, 4, dtype=F64))
        with torch.no_grad(), pytest.raises(ValueError, match="torch.func"):
            torch.func.vmap(lambda x: remote(x[None]))(x)
        assert backend.updates == 0
