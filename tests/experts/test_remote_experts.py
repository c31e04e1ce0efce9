"""An expert through the network is the module called here: outputs, gradients, updates."""

from __future__ import annotations

import copy

import pytest
import torch
from expert_modules import NESTED_SCHEMA, Feedforward, Nested, TwoHeads, adam, calling, nested_inputs, served
from torch import Tensor, nn

from anabranch.errors import NotFound, PeerLost, RemoteError, SchemaError
from anabranch.experts import Directory, DirectoryServer, ExpertBackend, RemoteExpert, RemoteMixtureOfExperts
from anabranch.tensors import TensorSpec
from anabranch.testing import faults
from anabranch.transport import Client
from anabranch.transport.server.connection import OnceTable, RequestIdentity
from networks import CountingTransport


@pytest.mark.parametrize("keep", [0, 100])
def test_the_scheduler_steps_and_the_norm_is_clipped_at_each_update(keep: int) -> None:
    here = Feedforward()
    there = copy.deepcopy(here)
    near, far = (torch.optim.SGD(module.parameters(), lr=0.5) for module in (here, there))
    halving, theirs = (torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (near, far))
    backend = ExpertBackend(
        "ffn.0", there, far, scheduler=theirs, clip_grad_norm=0.1, args_schema=[TensorSpec(4)], keep_activations=keep
    )
    with calling(backend) as expert:
        for _ in range(3):
            x = torch.randn(5, 4)
            here(x).sum().backward()
            assert nn.utils.clip_grad_norm_(here.parameters(), 0.1) > 0.1
            near.step()
            near.zero_grad()
            halving.step()
            expert(x).sum().backward()  # it learns, though no input requires a gradient
        with torch.no_grad():
            assert not expert(x).requires_grad
    assert far.param_groups[0]["lr"] == near.param_groups[0]["lr"] == 0.5 / 8
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(a, b)


def test_nested_keyword_bool_and_int_inputs_and_integer_outputs() -> None:
    here = Nested()
    there = copy.deepcopy(here)
    optimizer = adam(here)
    with calling(ExpertBackend("nested.0", there, adam(there), **NESTED_SCHEMA)) as expert:
        pair, keywords = nested_inputs(6)
        far = tuple(tensor.detach().clone().requires_grad_() for tensor in pair)
        expected, answer = here(pair, **keywords), expert(far, **keywords)
        assert isinstance(answer, dict)
        assert torch.equal(answer["hidden"], expected["hidden"])
        assert torch.equal(answer["best"], expected["best"])
        assert not answer["best"].requires_grad
        assert isinstance(answer["parts"], tuple)
        assert answer["parts"][1] is None
        assert isinstance(answer["parts"][2], list)
        for out in (expected, answer):
            (out["hidden"].square().sum() + out["parts"][2][0].sum()).backward()
        for near, remote in zip(pair, far, strict=True):
            assert torch.equal(near.grad, remote.grad)
        optimizer.step()
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_module_that_returns_another_structure_than_its_schema_is_named() -> None:
    backend = ExpertBackend("one.0", nn.Linear(2, 3), args_schema=[TensorSpec(2)])
    says = (r"one\.0's output 0: expected \(rows, 3\) float32, got \(4, 2\)", "differs from its schema")
    for module, what in zip((nn.Identity(), Fork()), says, strict=True):
        backend.module = module
        with pytest.raises(SchemaError, match=what):
            backend.forward(torch.randn(4, 2))


class Fork(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def test_an_expert_of_keywords_alone() -> None:
    class Scale(nn.Module):
        def forward(self, *, x: Tensor, by: Tensor) -> Tensor:
            return x * by

    schema = {"x": TensorSpec(2), "by": TensorSpec(2)}
    with calling(ExpertBackend("scale.0", Scale(), kwargs_schema=schema)) as expert:
        assert torch.equal(expert(by=torch.full((3, 2), 2.0), x=torch.ones(3, 2)), torch.full((3, 2), 2.0))
        assert expert.get_info()["keyword_names"] == ("by", "x")
        with pytest.raises(SchemaError, match="expected "):
            expert(torch.ones(3, 2), by=torch.ones(3, 2))


@pytest.mark.parametrize("keep", [0, 100])
def test_an_unused_output_leaves_its_parameters_without_a_gradient(keep: int) -> None:
    module = TwoHeads()
    # Momentum would move a parameter whose gradient is zero, and does not move one without a gradient.
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    backend = ExpertBackend("heads.0", module, optimizer, args_schema=[TensorSpec(4)], keep_activations=keep)
    with calling(backend) as expert:
        first, second = expert(torch.randn(3, 4))
        (first.sum() + second.sum()).backward()
        before = copy.deepcopy(module.state_dict())
        first, _ = expert(torch.randn(3, 4))
        first.sum().backward()
    assert backend.updates == 2
    assert torch.equal(module.second.weight, before["second.weight"])
    assert not torch.equal(module.first.weight, before["first.weight"])


def test_batch_norm_is_updated_once_and_as_it_would_be_here() -> None:
    here = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    there = copy.deepcopy(here)
    with calling(ExpertBackend("bn.0", there, args_schema=[TensorSpec(4)])) as expert:
        for _ in range(3):
            x = torch.randn(6, 4)
            here(x).sum().backward()
            expert(x).sum().backward()
    for name, buffer in here.named_buffers():
        assert torch.equal(buffer, dict(there.named_buffers())[name])


def test_finding_the_outputs_leaves_the_module_and_the_random_numbers_as_they_were() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = copy.deepcopy(module.state_dict())
    state = torch.get_rng_state()
    backend = ExpertBackend("bn.0", module, args_schema=[TensorSpec(4)])
    assert torch.equal(state, torch.get_rng_state())
    assert module.training
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert backend.get_info()["outputs_schema"] == TensorSpec(4)


@pytest.mark.parametrize(("compression", "tolerance"), [("float16", 2e-3), ("bfloat16", 2e-2), ("int8", 2e-2)], ids=str)
def test_compressed_activations_and_gradients_arrive_up_to_rounding(compression: str, tolerance: float) -> None:
    spec = TensorSpec(512, compression=compression)  # type: ignore[arg-type]
    module = nn.Identity()
    with calling(ExpertBackend("same.0", module, args_schema=[spec], outputs_schema=spec)) as expert:
        x = torch.randn(3, 512, requires_grad=True)
        weights = torch.randn(3, 512)
        answer = expert(x)
        assert torch.allclose(answer, x, atol=4 * tolerance, rtol=tolerance)
        assert not torch.equal(answer, x)
        (answer * weights).sum().backward()
        assert x.grad is not None
        assert torch.allclose(x.grad, weights, atol=8 * tolerance, rtol=2 * tolerance)


@pytest.mark.parametrize("mixed", [False, True])
def test_gradients_that_the_server_no_longer_has_are_reported_lost(
    mixed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The retry's answer had none, and so the input's gradient was None without a word."""

    def forget(table: OnceTable, identity: RequestIdentity, answer: object) -> None:
        table.abandon(identity)
        table.restore([identity])

    monkeypatch.setattr(OnceTable, "finish", forget)
    backend = ExpertBackend("ffn.0", Feedforward(), args_schema=[TensorSpec(4)])
    network = CountingTransport()
    directory = Directory()
    with served(backend, transport=network, directory=directory), Client(transport=network) as client:
        expert = RemoteExpert("ffn.0", directory, client=client)
        model = RemoteMixtureOfExperts(4, [1], directory, "ffn", k_best=1, client=client) if mixed else expert
        x = torch.ones(1, 4, requires_grad=True)
        output = model(x)
        with faults.at("transport.before_reply", 1, network.cut):
            if mixed:
                output.sum().backward()
                assert "1 rows get no gradient through the mixture" in caplog.text
            else:
                with pytest.raises(
                    PeerLost, match=r"ffn\.0 has executed this backward once, but its gradients are lost"
                ):
                    output.sum().backward()


def test_a_caller_with_a_directory_follows_its_expert_to_another_server() -> None:
    with DirectoryServer() as directory, Client(retries=2) as client:
        backend = ExpertBackend("ffn.0", Feedforward(), args_schema=[TensorSpec(4)])
        expert = RemoteExpert("ffn.0", Directory(directory.endpoint), client=client)
        with pytest.raises(NotFound, match="no server for"):
            expert(torch.ones(1, 4))
        for _ in range(2):
            with served(backend, directory=directory.endpoint):
                for _ in range(2):
                    assert expert(torch.ones(1, 4)).shape == (1, 4)


def test_a_faulty_update_fails_its_callers_and_spares_the_server() -> None:
    class Broken(ExpertBackend):
        broken = True

        def apply_gradients(self) -> None:
            if self.broken:
                raise OSError("disk on fire")
            super().apply_gradients()

    module = Feedforward()
    backend = Broken("ffn.0", module, adam(module), args_schema=[TensorSpec(4)])
    with calling(backend) as expert:
        with pytest.raises(RemoteError, match="disk on fire"):
            expert(torch.ones(1, 4)).sum().backward()
        backend.broken = False
        expert(torch.ones(1, 4)).sum().backward()
    assert backend.updates == 1
