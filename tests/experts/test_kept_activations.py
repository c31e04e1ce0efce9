"""Which weights a gradient belongs to: the forward's own where activations are kept, else counted and said."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from expert_modules import adam, calling, expert_of, served, sgd, together, twins
from torch import Tensor, nn

from anabranch.errors import BoundaryError, PeerLost, RemoteError
from anabranch.experts import Directory, ExpertBackend, RemoteExpert, RemoteMixtureOfExperts, Schema, wire
from anabranch.pipeline import Pipe
from anabranch.tensors import TensorSpec
from anabranch.transport import Client, Deadline, Outcome, Request, Server, Verb
from toys import assert_same


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
