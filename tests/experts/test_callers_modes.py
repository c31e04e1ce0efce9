"""The caller's mode and precision are the expert's for its calls: eval mode changes nothing there, autocast casts."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from expert_modules import Slow, adam, calling, in_the_module, served
from torch import Tensor, nn

import anabranch as ab
from anabranch.errors import SchemaError
from anabranch.experts import Directory, ExpertBackend, RemoteExpert, RemoteMixtureOfExperts
from anabranch.tensors import TensorSpec
from waiting import join, wait_until


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)).double()


SPEC = TensorSpec(4, dtype=torch.float64)


@pytest.mark.parametrize("keep", [0, 100])
def test_a_caller_in_eval_mode_gets_the_module_in_eval_mode_and_its_updates(keep: int) -> None:
    here = normed()
    here(torch.randn(8, 4, dtype=torch.float64))
    there = copy.deepcopy(here)
    here.eval()
    mine = torch.optim.SGD(here.parameters(), lr=0.1)
    theirs = torch.optim.SGD(there.parameters(), lr=0.1)
    with served(ExpertBackend("bn.0", there, theirs, args_schema=[SPEC], keep_activations=keep)) as server:
        expert = RemoteExpert("bn.0", server.endpoint).eval()
        for _ in range(2):
            x = torch.randn(5, 4, dtype=torch.float64)
            near, far = x.clone().requires_grad_(), x.clone().requires_grad_()
            expected, answer = here(near), expert(far)
            assert torch.equal(answer, expected)
            expected.square().sum().backward()
            answer.square().sum().backward()
            assert torch.equal(far.grad, near.grad)
            mine.step()
            mine.zero_grad()
    for (name, a), b in zip(here.state_dict().items(), there.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert there.training
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
    with served(ExpertBackend("m.0", module, args_schema=[TensorSpec(1)])) as server:
        expert, x = RemoteExpert("m.0", server.endpoint), torch.ones(1, 1)
        for _ in range(2):
            assert expert.eval()(x).item() == 2.0
            assert expert.train()(x).item() == 4.0
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
    backend = ExpertBackend("modes.0", module, args_schema=[TensorSpec(1)])
    pool = backend.get_pools()[backward]
    with served(backend, ExpertBackend("slow.0", slow, args_schema=[TensorSpec(1)])) as server:
        experts = [RemoteExpert("modes.0", server.endpoint).train(index % 2 == 0) for index in range(6)]
        outputs = [expert(torch.ones(1, 1)) for expert in experts]
        module.seen.clear()
        threads = [
            threading.Thread(target=output.sum().backward if backward else expert, args=() if backward else (output,))
            for expert, output in zip(experts, outputs, strict=True)
        ]
        with in_the_module(slow, lambda: RemoteExpert("slow.0", server.endpoint)(torch.ones(1, 1))):
            for thread in threads:
                thread.start()
            wait_until(lambda: pool.statistics().waiting_tasks == 6)
        join(*threads)
    assert sorted(module.seen) == [(False, 3), (True, 3)]


def test_under_autocast_inputs_are_cast_to_the_schema_and_gradients_back() -> None:
    here = nn.Linear(4, 4)
    there = copy.deepcopy(here)
    with calling(ExpertBackend("ffn.0", there, adam(there), args_schema=[TensorSpec(4)])) as expert:
        first = nn.Linear(4, 4)
        x = torch.randn(3, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = first(x)
            assert hidden.dtype == torch.bfloat16
            answer = expert(hidden)
            answer.sum().backward()
        assert answer.dtype == torch.float32
        got = first.weight.grad.clone()
        first.weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = first(x)
        here(hidden.float()).sum().backward()
        assert torch.equal(got, first.weight.grad)
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
        with served(ExpertBackend("modes.0", module, args_schema=[TensorSpec(4)]), directory=directory) as server:
            model = Chain(server.endpoint, directory)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            steps = {
                "train": ab.TrainStep(model, lambda model, x: model(x).square().mean(), optimizer),
                "validate": ab.EvalStep(model, lambda model, x: {"y": model(x)}),
            }
            with ab.Executor(steps, engine=engine) as executor:
                for frozen in (False, True, False):
                    model.train()
                    model.expert.train(not frozen)
                    module.seen.clear()
                    loss = executor.run("train", torch.ones(2, 3, 4))["loss"]
                    # Forward of both, then backward of both, which computes them again.
                    modes = [mode for mode, rows in module.seen if rows == 6]
                    assert modes == [not frozen, True, True, not frozen]
                    module.seen.clear()
                    value = executor.run("validate", torch.ones(2, 3, 4))["y"]
                    assert {mode for mode, _ in module.seen} == {False}
                    results.append((engine, loss, value))
                assert executor.engine("train") == engine
    for (_, loss, value), (_, other, another) in zip(results[:3], results[3:], strict=True):
        assert torch.equal(loss, other)
        assert torch.equal(value, another)


def test_a_scaled_loss_is_refused_because_experts_would_step_with_scaled_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 4), RemoteExpert("ffn.0", "unix:/nowhere/at/all"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for remote in (model, RemoteMixtureOfExperts(4, [2], Directory(), "ffn")):
        with pytest.raises(ValueError, match="remote experts .* would step with scaled gradients"):
            ab.TrainStep(remote, lambda model, x: model(x).sum(), optimizer, precision="float16")
    ab.TrainStep(model, lambda model, x: model(x).sum(), optimizer, precision="bfloat16")


def test_an_expert_within_an_expert_runs_in_the_mode_of_the_outermost_caller() -> None:
    inner = nn.BatchNorm1d(4)
    with served(ExpertBackend("in.0", inner, args_schema=[TensorSpec(4)])) as far:
        outer = nn.Sequential(nn.Linear(4, 4), RemoteExpert("in.0", far.endpoint))
        backend = ExpertBackend("out.0", outer, args_schema=[TensorSpec(4)], keep_activations=64)
        assert int(inner.num_batches_tracked) == 0  # finding the outputs leaves what is remote as it is, too
        assert outer[1].training
        with served(backend) as near:
            expert = RemoteExpert("out.0", near.endpoint).eval()
            expert(torch.randn(2, 5, 4)).sum().backward()
            assert int(inner.num_batches_tracked) == 0
            expert.train()(torch.randn(2, 5, 4)).sum().backward()
            assert int(inner.num_batches_tracked) == 1
