"""An expert through the network is the module called here: outputs, gradients, updates, of the right weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_modules import (
    NESTED_SCHEMA,
    Feedforward,
    Nested,
    adam,
    calling,
    expert_of,
    nested_inputs,
    served,
    sgd,
    together,
    twins,
)
from torch import Tensor, nn

from anabranch.errors import BoundaryError, NonFinite, NotFound, PeerLost, RemoteError, SchemaError
from anabranch.experts import (
    Directory,
    DirectoryServer,
    ExpertBackend,
    RemoteExpert,
    RemoteMixtureOfExperts,
    Schema,
    wire,
)
from anabranch.pipeline import Pipe
from anabranch.tensors import TensorSpec
from anabranch.testing import faults
from anabranch.transport import Client, Deadline, Outcome, Request, Server, Verb
from anabranch.transport.server.connection import OnceTable, RequestIdentity
from networks import CountingTransport
from toys import assert_same

KEEP = pytest.mark.parametrize("keep", [0, 100])
on_cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@KEEP
def test_the_scheduler_steps_and_the_norm_is_clipped_at_each_update(keep: int) -> None:
    here = Feedforward()
    there = copy.deepcopy(here)
    near, far = sgd(here, 0.5), sgd(there, 0.5)
    halving, theirs = (torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (near, far))
    backend = expert_of(there, optimizer=far, scheduler=theirs, clip_grad_norm=0.1, keep_activations=keep)
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
    assert_same(here, there)


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
    assert_same(here, there)


def test_a_module_that_returns_another_structure_than_its_schema_is_named() -> None:
    backend = expert_of(nn.Linear(2, 3), 2, "one.0")
    says = (r"one\.0's output 0: expected \(rows, 3\) float32, got \(4, 2\)", "differs from its schema")
    for module, what in zip((nn.Identity(), Heads()), says, strict=True):
        backend.module = module
        with pytest.raises(SchemaError, match=what):
            backend.forward(torch.randn(4, 2))


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


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (self.first(x), self.second(x)) if x.shape[1] == 4 else (x, x)


@KEEP
def test_an_unused_output_leaves_its_parameters_without_a_gradient(keep: int) -> None:
    module = Heads()
    # Momentum would move a parameter whose gradient is zero, and does not move one without a gradient.
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    backend = expert_of(module, optimizer=optimizer, keep_activations=keep)
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
    with calling(expert_of(there, optimizer=None)) as expert:
        for _ in range(3):
            x = torch.randn(6, 4)
            here(x).sum().backward()
            expert(x).sum().backward()
    assert_same(here, there)


def test_finding_the_outputs_leaves_the_module_and_the_random_numbers_as_they_were() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before, state = copy.deepcopy(module), torch.get_rng_state()
    assert expert_of(module).get_info()["outputs_schema"] == TensorSpec(4)
    assert torch.equal(state, torch.get_rng_state())
    assert module.training
    assert all(parameter.grad is None for parameter in module.parameters())
    assert_same(module, before)


@pytest.mark.parametrize(("compression", "tolerance"), [("float16", 2e-3), ("bfloat16", 2e-2), ("int8", 2e-2)], ids=str)
def test_compressed_activations_and_gradients_arrive_up_to_rounding(compression: str, tolerance: float) -> None:
    spec = TensorSpec(512, compression=compression)  # type: ignore[arg-type]
    with calling(expert_of(nn.Identity(), args_schema=[spec], outputs_schema=spec)) as expert:
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
    network, directory = CountingTransport(), Directory()
    with (
        served(expert_of(Feedforward()), transport=network, directory=directory),
        Client(transport=network) as client,
    ):
        model: nn.Module = RemoteExpert("ffn.0", directory, client=client)
        if mixed:
            model = RemoteMixtureOfExperts(4, [1], directory, "ffn", k_best=1, client=client)
        output = model(torch.ones(1, 4, requires_grad=True))
        with faults.at("transport.before_reply", 1, network.cut):
            if mixed:
                output.sum().backward()
                assert "1 rows get no gradient through the mixture" in caplog.text
                return
            with pytest.raises(PeerLost, match=r"ffn\.0 has executed this backward once, but its gradients are lost"):
                output.sum().backward()


def test_a_caller_with_a_directory_follows_its_expert_to_another_server() -> None:
    with DirectoryServer() as directory, Client(retries=2) as client:
        expert = RemoteExpert("ffn.0", Directory(directory.endpoint), client=client)
        with pytest.raises(NotFound, match="no server for"):
            expert(torch.ones(1, 4))
        for _ in range(2):
            with served(expert_of(Feedforward()), directory=directory.endpoint):
                for _ in range(2):
                    assert expert(torch.ones(1, 4)).shape == (1, 4)


@pytest.mark.parametrize("keep", [0, 64])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_an_expert_on_a_device_is_the_module_here(device: str, keep: int) -> None:
    here = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    there = copy.deepcopy(here)
    mine = sgd(here)
    with calling(expert_of(there, keep_activations=keep), device=device) as expert:
        for rows in (1, 5, 2048):
            near, far = twins(rows, 4, dtype=torch.float64)
            expected, answer = here(near), expert(far)
            torch.testing.assert_close(answer, expected)
            expected.square().mean().backward()
            answer.square().mean().backward()
            torch.testing.assert_close(far.grad, near.grad)
            mine.step()
            mine.zero_grad()
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(b.cpu(), a)


# --- an override of ``apply_gradients`` that steps at every k-th batch sees the sum of their gradients


class Patient(ExpertBackend):
    """Steps at every third batch."""

    calls = 0
    fails = False

    def apply_gradients(self) -> None:
        self.calls += 1
        if self.fails:
            raise OSError("not now")
        if self.calls % 3 == 0:
            self.step_here()

    def step_here(self) -> None:
        super().apply_gradients()


class Plain(Patient):
    """The same with the optimizer's own step, and nothing cleared."""

    def step_here(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()


class ByHand(Patient):
    """The same without an optimizer, behind autograd's back."""

    def step_here(self) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.data -= 0.1 * parameter.grad


@pytest.mark.quick_cases(2)
@KEEP
@pytest.mark.parametrize("kind", [Patient, Plain, ByHand])
def test_every_third_batch_steps_with_the_sum_of_three_gradients(kind: type[Patient], keep: int) -> None:
    here = Feedforward().double()
    there = copy.deepcopy(here)
    mine = sgd(here)
    schema = [TensorSpec(4, dtype=torch.float64)]
    with calling(kind("ffn.0", there, sgd(there), args_schema=schema, keep_activations=keep)) as expert:
        for index in range(7):
            x = torch.randn(3, 4, dtype=torch.float64)
            here(x).square().sum().backward()
            expert(x).square().sum().backward()  # type: ignore[attr-defined]
            if index % 3 == 2:
                mine.step()
                mine.zero_grad()
            for a, b in zip(here.parameters(), there.parameters(), strict=True):
                assert torch.allclose(a, b, rtol=1e-12)
                assert (a.grad is None) == (b.grad is None)
                if a.grad is not None and b.grad is not None:
                    assert torch.allclose(a.grad, b.grad, rtol=1e-11)


class Steps(ExpertBackend):
    """Steps at every batch and clears nothing."""

    def apply_gradients(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()
        if self.clip_grad_norm is not None:
            raise OSError("after the step")


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.Adam(p, fused=True),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.Rprop(p),
    ],
)
def test_an_override_that_steps_at_every_batch_sees_each_gradient_once(make: Any) -> None:
    here = nn.Linear(4, 4)
    there = copy.deepcopy(here)
    mine, theirs = make(here.parameters()), make(there.parameters())
    backend = Steps("ffn.0", there, theirs, args_schema=[TensorSpec(4)])
    for _ in range(3):
        x = torch.randn(3, 4)
        here(x).sum().backward()
        backend.backward(x, torch.ones(3, 4))
        mine.step()
        mine.zero_grad()
        assert all(parameter.grad is None for parameter in there.parameters())
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.allclose(a, b)


def test_a_batch_that_fails_leaves_the_gradients_of_the_others() -> None:
    module = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(module.weight)
    backend = Patient("n.0", module, sgd(module), args_schema=[TensorSpec(1, dtype=torch.float64)])
    x = torch.ones(1, 1, dtype=torch.float64)
    with calling(backend) as expert:
        expert(x).sum().backward()  # type: ignore[attr-defined]
        with pytest.raises(NonFinite):
            (expert(x * 1e308) * 1e308).sum().backward()  # type: ignore[operator]
        backend.fails = True
        with pytest.raises(RemoteError, match="not now"):
            expert(x).sum().backward()  # type: ignore[attr-defined]
        backend.fails = False
        assert module.weight.grad is not None
        assert float(module.weight.grad) == 1.0
        backend.calls = 1
        expert(2 * x).sum().backward()  # type: ignore[attr-defined]
        assert float(module.weight.grad) == 3.0
        expert(4 * x).sum().backward()  # type: ignore[attr-defined]
    assert module.weight.grad is None
    assert float(module.weight.detach()) == pytest.approx(1.0 - 0.7, rel=1e-15)


def test_an_update_that_fails_after_its_step_is_not_made_again() -> None:
    module = nn.Linear(1, 1, bias=False)
    backend = Steps("n.0", module, sgd(module), args_schema=[TensorSpec(1)], clip_grad_norm=1.0)
    with calling(backend) as expert:
        with pytest.raises(RemoteError, match="after the step"):
            expert(torch.ones(1, 1)).sum().backward()  # type: ignore[attr-defined]
        assert module.weight.grad is None
        backend.clip_grad_norm = None  # and the server goes on
        expert(torch.ones(1, 1)).sum().backward()  # type: ignore[attr-defined]
    assert backend.updates == 1


@pytest.mark.parametrize(("sparse", "optimizer"), [(False, torch.optim.SGD), (True, torch.optim.SparseAdam)])
def test_gradients_that_wait_survive_a_restart(tmp_path: Path, sparse: bool, optimizer: Any) -> None:
    def make() -> Patient:
        torch.manual_seed(0)
        table = nn.Embedding(5, 2, sparse=sparse)
        schema = [TensorSpec(dtype=torch.int64)]
        return Patient("rows.0", table, optimizer(table.parameters(), lr=0.1), args_schema=schema)

    first = make()
    for step, backend in enumerate((first, make())):
        backend.calls = 2 * step
        with calling(backend, checkpoint_dir=tmp_path) as expert:
            for ids in ([1, 1, 2], [2, 3]) if step == 0 else ([1],):
                expert(torch.tensor(ids)).sum().backward()  # type: ignore[attr-defined]
    here = make()
    for ids in ([1, 1, 2], [2, 3], [1]):
        here.module(torch.tensor(ids)).sum().backward()
    here.optimizer.step()  # type: ignore[union-attr]
    assert torch.allclose(here.module.weight, backend.module.weight)  # type: ignore[arg-type]
    assert_same(first.module, make().module)


# --- which weights a gradient belongs to: the forward's own where activations are kept, else counted and said


class Counted(nn.Module):
    """Linear, BatchNorm and dropout, with a count of its calls, a buffer set anew, and one that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("sums", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.sums += x.detach().sum(0)
        return self.inner(x)


class Weighing(Client):
    """A client that adds up the bytes it sends with backwards."""

    sent = 0

    def gather(self, requests: list[Request], deadline: Deadline, **options: object) -> list[Outcome]:  # type: ignore[override]
        backwards = [request for request in requests if request.verb == wire.BACKWARD]
        self.sent += sum(tensor.nbytes for request in backwards for tensor in request.tensors)
        return super().gather(requests, deadline, **options)  # type: ignore[arg-type]


def test_a_kept_forward_is_the_one_here_and_nothing_is_computed_or_sent_again() -> None:
    here = Counted()
    there = copy.deepcopy(here)
    optimizer = adam(here)
    backend = expert_of(there, optimizer=adam(there), keep_activations=100)
    with served(backend) as server, Weighing() as client:
        expert = RemoteExpert("ffn.0", server.endpoint, client=client)
        for step in range(3):
            near, far = twins(6, 4)
            expert.get_info()
            torch.manual_seed(step)
            expected = here(near)
            torch.manual_seed(step)
            answer = expert(far)
            assert torch.equal(answer, expected)
            expected.square().sum().backward()
            answer.square().sum().backward()
            assert torch.equal(far.grad, near.grad)
            optimizer.step()
            optimizer.zero_grad()
        assert client.sent == 3 * 6 * 4 * 4
    assert there.calls == 3
    assert_same(here, there)


def test_a_backward_that_would_draw_another_mask_is_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    backend = expert_of(module, keep_activations=2)
    with calling(backend) as expert:
        x = torch.ones(2, 4, requires_grad=True)
        expert(x).sum().backward()
        first = expert(x)
        second = expert(x)  # for which the first one's are dropped
        with pytest.raises(RemoteError, match=r"ffn.0: 1 is Dropout\(p=0.5.*keep_activations="):
            first.sum().backward()
        second.sum().backward()
        assert backend.updates == 2
        module[1].p = 0.0
        expert(torch.ones(3, 4)).sum().backward()
        module[1].p = 0.5
        expert.eval()
        expert(torch.ones(3, 4)).sum().backward()
        assert backend.updates == 4


def test_activations_dropped_for_the_budget_are_recomputed() -> None:
    backend = expert_of(nn.Linear(4, 4), keep_activations=4)
    with calling(backend) as expert:
        inputs = [torch.randn(rows, 4, requires_grad=True) for rows in (2, 2, 2, 2, 2, 5)]
        for output in [expert(x) for x in inputs]:
            output.sum().backward()
        assert all(x.grad is not None for x in inputs)
    assert backend.updates == 6


class Shared(nn.Module):
    """Two parameters and the input whose gradients autograd hands out as one tensor, if there is one row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(1, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first + self.second


def test_changing_a_gradient_in_place_changes_no_other_and_no_answer() -> None:
    module = Shared()
    x = torch.ones(1, 4, requires_grad=True)
    with calling(expert_of(module, optimizer=sgd(module, 1.0), keep_activations=8, clip_grad_norm=2.0)) as expert:
        expert(x).backward(torch.full((1, 4), 4.0))
    assert torch.equal(x.grad, torch.full((1, 4), 4.0))  # type: ignore[arg-type]
    # The norm of two times four fours is 8 * sqrt(2): each is 2 / (8 * sqrt(2)) of itself.
    expected = torch.full((1, 4), -4.0 * 2.0 / (8.0 * 2.0**0.5))
    for parameter in module.parameters():
        assert torch.allclose(parameter.detach(), expected, atol=1e-5)


def test_two_backwards_of_one_forward_in_a_batch_both_count() -> None:
    module = nn.Linear(4, 4)
    backend = expert_of(module, optimizer=adam(module), keep_activations=8, min_batch_size=2, timeout=60.0)
    x = torch.ones(2, 4, requires_grad=True)
    gradients: list[Tensor] = []
    with calling(backend) as expert:
        output = expert(x).sum()
        expected = module.weight.detach().sum(0).expand(2, 4)
        x.register_hook(lambda gradient: gradients.append(gradient.clone()))
        assert together(2, lambda _: output.backward(retain_graph=True)) == [None, None]
    assert backend.updates == 2
    assert len(gradients) == 2
    assert any(torch.allclose(gradient, expected) for gradient in gradients)
    assert all(float((gradient - expected).abs().max()) < 0.1 for gradient in gradients)


# --- gradients of other weights are counted, and said where this process itself is the cause


def feedforward() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def backend_of(module: nn.Module, keep: int = 0, uid: str = "e.0") -> ExpertBackend:
    return expert_of(module, uid=uid, keep_activations=keep, args_schema=[TensorSpec(4, dtype=torch.float64)])


def inputs(rows: int = 6) -> Tensor:
    return torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)


def gradient_here(module: nn.Module, x: Tensor, calls: int = 1) -> Tensor:
    """The gradient of a local copy of ``module``, called this many times one after the other."""
    here, start = copy.deepcopy(module), x.detach().clone().requires_grad_()
    y = start
    for _ in range(calls):
        y = here(y)
    y.square().sum().backward()
    assert start.grad is not None
    return start.grad


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "anabranch"]


@pytest.mark.parametrize("keep", [0, 100])
def test_an_expert_called_twice_in_a_model(keep: int, caplog: pytest.LogCaptureFixture) -> None:
    module, x = feedforward(), inputs()
    expected = gradient_here(module, x, calls=2)
    with calling(backend_of(module, keep)) as first:
        second = copy.deepcopy(first)  # of the same process
        second(first(x)).square().sum().backward()
        stale = first.statistics().stale_backwards
        assert second.statistics().stale_backwards == 0
    if keep:
        assert torch.allclose(x.grad, expected, rtol=1e-12)  # type: ignore[arg-type]
        assert (stale, said(caplog)) == (0, [])
        return
    assert not torch.allclose(x.grad, expected, rtol=1e-2)  # type: ignore[arg-type]
    assert stale == 1
    (message,) = said(caplog)
    assert message.startswith("e.0: an output is that of the expert after 0 changes, but its gradient that of the ")
    assert "after 1: this process has changed it in between" in message
    assert "keep_activations=" in message


def test_other_trainers_updates_are_counted_and_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    backend = backend_of(feedforward())
    with calling(backend) as expert:
        for others in (0, 3, 0):
            loss = expert(inputs()).sum()
            with torch.no_grad():
                expert(inputs())  # an evaluation
            for _ in range(others):
                backend.backward(inputs(), torch.ones(6, 4, dtype=torch.float64))
            loss.backward()
        assert expert.statistics().stale_backwards == 1
    assert said(caplog) == []


def test_a_server_that_went_back_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    backend = backend_of(feedforward())
    old = copy.deepcopy(backend.state_dict())
    with calling(backend) as expert:
        expert(inputs()).sum().backward()
        for _ in range(2):  # said once an expert
            loss = expert(inputs()).sum()
            backend.load_state_dict(old)
            loss.backward()
        assert expert.statistics().stale_backwards == 2
    (message,) = said(caplog)
    assert "after 1 changes, but its gradient that of the expert after 0: its server has gone back" in message


def test_a_number_that_a_forward_changes_counts(caplog: pytest.LogCaptureFixture) -> None:
    class Annealed(nn.Sequential):
        temperature = 1.0

        def forward(self, x: Tensor) -> Tensor:
            self.temperature = self.temperature * 0.9
            return super().forward(x) / self.temperature  # type: ignore[no-any-return]

    module = Annealed(feedforward())
    module.temperature = 1.0
    with calling(backend_of(module)) as expert:
        expert(inputs()).sum().backward()
        assert expert.statistics().stale_backwards == 1
    assert len(said(caplog)) == 1


def load(module: nn.Module, other: nn.Module) -> None:
    module.load_state_dict(other.state_dict())


def clamp(module: nn.Module, other: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def swap(module: nn.Module, other: nn.Module) -> None:
    for parameter, average in zip(module.parameters(), other.parameters(), strict=True):
        parameter.data = average.data


@pytest.mark.parametrize("change", [load, clamp, swap])
def test_kept_activations_see_every_write_to_the_served_module(
    change: Callable[[nn.Module, nn.Module], object],
) -> None:
    module, other, x = feedforward(), feedforward(), inputs()
    before = gradient_here(module, x)
    with calling(backend_of(module, keep=100)) as expert:
        loss = expert(x).square().sum()
        change(module, other)
        loss.backward()
        assert torch.allclose(x.grad, before, rtol=1e-12)  # type: ignore[arg-type]
        change(module, other)
        after, y = gradient_here(module, x), x.detach().clone().requires_grad_()
        expert(y).square().sum().backward()
        assert torch.allclose(y.grad, after, rtol=1e-12)  # type: ignore[arg-type]
        assert expert.statistics().stale_backwards == 0


def test_mixtures_count_and_warn_too(caplog: pytest.LogCaptureFixture) -> None:
    directory = Directory()
    with served(*(backend_of(feedforward(), uid=f"e.{index}") for index in range(2)), directory=directory):
        mixture = RemoteMixtureOfExperts(4, [2], directory, "e", k_best=2).double()
        mixture(mixture(inputs())).sum().backward()
        counted = mixture.statistics()
    assert (counted.calls, counted.answered, counted.stale_backwards) == (4, 4, 2)
    assert counted.rows == {"e.0": 12, "e.1": 12}
    assert sorted(message[:4] for message in said(caplog)) == ["e.0:", "e.1:"]


def test_statistics_of_an_expert() -> None:
    with calling(backend_of(feedforward())) as expert:
        expert(inputs(3)).sum().backward()
        loss = expert(inputs(2)).sum()
        for other in (copy.deepcopy(expert), pickle.loads(pickle.dumps(expert))):
            assert other.statistics().calls == 0
    with pytest.raises(PeerLost):
        loss.backward()
    expert.forward_timeout = 0.2
    with pytest.raises(BoundaryError):
        expert(inputs(1))
    counted = expert.statistics()
    assert (counted.calls, counted.answered, counted.cancelled, counted.stale_backwards) == (3, 2, 0, 0)
    assert counted.rows == {"e.0": 6}
    assert sum(counted.failed.values()) == 2


def test_an_answer_that_does_not_say_how_often_the_expert_changed_costs_a_mixture_that_expert() -> None:
    spec = TensorSpec(4, dtype=torch.float64)
    schema, directory = Schema((spec,), {}, spec), Directory()
    verbs = [
        Verb(wire.INFO, lambda call: call.reply(payload=schema.packed)),
        Verb(wire.FORWARD, lambda call: call.reply(call.tensors, b"\xff")),
    ]
    with Server(verbs, role="experts") as strange, served(backend_of(feedforward()), directory=directory):
        directory.announce(["e.1"], strange.endpoint, 60.0)
        mixture = RemoteMixtureOfExperts(4, [2], directory, "e", k_best=2).double()
        mixture(inputs()).sum().backward()
        counted = mixture.statistics()
    assert (counted.answered, counted.failed) == (1, {"ProtocolError": 1})


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("keep", [0, 100])
def test_a_stage_that_runs_again_has_the_answers_of_its_first_forward(checkpoint: str, keep: int) -> None:
    modules = [nn.Sequential(feedforward(), nn.BatchNorm1d(4).double()) for _ in range(2)]
    first, last = feedforward(), feedforward()
    batch, directory = inputs(8), Directory()
    here = copy.deepcopy(nn.Sequential(first, modules[0], last))
    torch.cat([here(part) for part in batch.detach().chunk(4)]).square().sum().backward()
    with served(backend_of(modules[0], keep), backend_of(modules[1], keep, uid="m.0"), directory=directory):
        expert = RemoteExpert("e.0", directory)
        mixture = RemoteMixtureOfExperts(4, [1], directory, "m", k_best=1).double()
        for module, there, begin in ((expert, modules[0], first), (mixture, modules[1], feedforward())):
            with Pipe(nn.Sequential(begin, module, last), [2, 1], chunks=4, checkpoint=checkpoint) as pipe:
                pipe(batch).square().sum().backward()
            counted = module.statistics()
            assert (counted.calls, counted.stale_backwards) == (4, 0 if keep else 3)
            assert there[1].num_batches_tracked == 4
        if keep:
            for mine, theirs in zip(first.parameters(), here[0].parameters(), strict=True):
                assert torch.allclose(mine.grad, theirs.grad, rtol=1e-9)  # type: ignore[arg-type]
