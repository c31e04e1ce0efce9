"""An expert is updated by the sweeps that would accumulate into its parameters if it were here, and by no others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from expert_modules import served
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anabranch as ab
from anabranch.experts import Directory, ExpertBackend, ExpertServer, RemoteExpert, RemoteMixtureOfExperts
from anabranch.tensors import TensorSpec

SPEC = TensorSpec(4, dtype=torch.float64)
Sweep = Callable[[nn.Module, Tensor], object]


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
        0,
        lambda module, x: torch.autograd.grad(checkpoint(loss_of, module, x, use_reentrant=False), x),
    ),
    "frozen": (0, while_frozen),
}  # fmt: skip


KINDS = pytest.mark.parametrize(("kind", "keep"), [("expert", 0), ("expert", 64), ("mixture", 0), ("mixture", 64)])


@contextmanager
def called(kind: str, keep: int) -> Iterator[tuple[nn.Module, ExpertBackend]]:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    backend = ExpertBackend("e.0", module, optimizer, args_schema=[SPEC], keep_activations=keep)
    directory = Directory()
    with ExpertServer([backend], directory=directory) as server:
        if kind == "expert":
            yield RemoteExpert("e.0", server.endpoint), backend
        else:
            yield RemoteMixtureOfExperts(4, [1], directory, "e", k_best=1).double(), backend


@KINDS
def test_a_sweep_updates_an_expert_if_it_would_reach_its_parameters(kind: str, keep: int) -> None:
    with called(kind, keep) as (remote, backend):
        compare_sweeps(remote, backend)


def compare_sweeps(remote: nn.Module, backend: ExpertBackend) -> None:
    for name, (updates, sweep) in SWEEPS.items():
        here = copy.deepcopy(backend.module)
        x, mine = (torch.randn(3, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
        mine.data.copy_(x.data)
        before, weights = backend.updates, [parameter.clone() for parameter in backend.module.parameters()]
        sweep(remote, x)
        assert backend.updates - before == updates, name
        same = all(map(torch.equal, weights, backend.module.parameters()))
        assert same != bool(updates), name
        if "session" not in name and "manager" not in name:
            sweep(here, mine)
            assert (x.grad is None) == (mine.grad is None), name
            assert x.grad is None or torch.allclose(x.grad, mine.grad, rtol=1e-12), name  # type: ignore[arg-type]


def test_a_frozen_expert_gives_the_gradients_of_its_inputs_and_without_any_has_no_graph() -> None:
    module = nn.Linear(4, 4).double()
    with served(
        ExpertBackend("e.0", module, torch.optim.SGD(module.parameters(), lr=0.1), args_schema=[SPEC])
    ) as server:
        expert = RemoteExpert("e.0", server.endpoint).requires_grad_(False)
        assert not expert(torch.ones(1, 4, dtype=torch.float64)).requires_grad
        copied = copy.deepcopy(expert)
        x = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
        copied(x).sum().backward()
        assert torch.equal(x.grad, module.weight.sum(0)[None])  # type: ignore[arg-type]
        assert expert.state_dict() == {}
        assert not expert.load_state_dict({}).missing_keys


def test_experts_that_are_frozen_under_a_gate_that_learns() -> None:
    module = nn.Linear(4, 4).double()
    backend = ExpertBackend("e.0", module, torch.optim.SGD(module.parameters(), lr=0.1), args_schema=[SPEC])
    other = ExpertBackend("e.1", nn.Identity(), args_schema=[SPEC])
    directory = Directory()
    with ExpertServer([backend, other], directory=directory):
        mixture = RemoteMixtureOfExperts(4, [2], directory, "e", k_best=2).double()
        mixture.weights_there.requires_grad_(False)
        loss_of(mixture, torch.ones(2, 4, dtype=torch.float64)).backward()
        assert backend.updates == 0
        assert mixture.gate.weight.grad is not None
        assert bool(mixture.gate.weight.grad.abs().sum() > 0)


@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_freezing_between_two_steps_of_an_executor(engine: str) -> None:
    module = nn.Linear(4, 4)
    backend = ExpertBackend("e.0", module, torch.optim.SGD(module.parameters(), lr=0.1), args_schema=[TensorSpec(4)])
    with served(backend) as server:
        model = nn.Sequential(nn.Linear(4, 4), RemoteExpert("e.0", server.endpoint))
        step = ab.TrainStep(model, lambda model, x: loss_of(model, x), torch.optim.SGD(model.parameters(), lr=0.1))
        with ab.Executor({"train": step}, engine=engine) as executor:
            updates = []
            for trained in (True, True, False, False, True):
                model[1].requires_grad_(trained)
                executor.run("train", torch.ones(2, 4))
                updates.append(backend.updates)
            assert list(executor.state_dict()) == ["0.weight", "0.bias"]
    assert updates == [1, 2, 2, 2, 3]


@KINDS
def test_what_torch_could_only_do_with_the_parameters_here_is_refused_by_name(kind: str, keep: int) -> None:
    with called(kind, keep) as (remote, backend):
        x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
        with pytest.raises(
            ValueError, match=r"parameters of .* 'e.*'grad' cannot reach its numbers.*loss.backward\(\)"
        ):
            torch.autograd.grad(loss_of(remote, x), [x, *remote.parameters()], allow_unused=True)
        (gradient,) = torch.autograd.grad(remote(x).sum(), x, create_graph=True)  # no gradient here depends on x
        with pytest.raises(RuntimeError, match="the gradient of .* 'e.*' cannot be differentiated again"):
            (x.sum() + gradient.square().sum()).backward()
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.functional.hessian(lambda x: loss_of(remote, x), x)
        for transformed in (torch.func.grad, torch.func.vmap):
            with pytest.raises(ValueError, match="torch.func"):
                transformed(lambda x: loss_of(remote, x[None]))(torch.ones(2, 4, dtype=torch.float64))
        with torch.no_grad(), pytest.raises(ValueError, match="torch.func"):
            torch.func.vmap(lambda x: remote(x[None]))(x)
        assert backend.updates == 0


def test_a_frozen_expert_is_so_after_a_resume(tmp_path: Path) -> None:
    module = nn.Linear(4, 4)
    with served(ExpertBackend("e.0", module, args_schema=[TensorSpec(4)])) as server:

        def executor() -> tuple[nn.Sequential, ab.Executor]:
            model = nn.Sequential(nn.Linear(4, 4), RemoteExpert("e.0", server.endpoint))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            return model, ab.Executor({"train": ab.TrainStep(model, loss_of, optimizer)})

        model, first = executor()
        with first:
            model[1].requires_grad_(False)
            first.run("train", torch.ones(2, 4))
            first.save(tmp_path)
        model, second = executor()
        with second:
            second.load(tmp_path)
            assert not model[1].weights_there.requires_grad
            second.run("train", torch.ones(2, 4))


@pytest.mark.parametrize("schedule", ["1F1B", "ZB1P"])
def test_in_a_pipe_the_same_sweeps_update_an_expert(schedule: str) -> None:
    for keep in (0, 64):
        with called("expert", keep) as (remote, backend):
            pipe = ab.Pipe(nn.Sequential(nn.Identity(), remote), [1, 1], checkpoint="always", schedule=schedule)
            compare_sweeps(pipe, backend)
            pipe.close()
