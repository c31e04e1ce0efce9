"""A gradient belongs to the weights of its output, or is counted, and said where this process itself is the cause."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from expert_modules import calling
from torch import Tensor, nn

from anabranch.errors import BoundaryError, PeerLost
from anabranch.experts import Directory, ExpertBackend, ExpertServer, RemoteExpert, RemoteMixtureOfExperts, Schema, wire
from anabranch.pipeline import Pipe
from anabranch.tensors import TensorSpec
from anabranch.transport import Server, Verb

SPEC = TensorSpec(4, dtype=torch.float64)


def feedforward() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def backend_of(module: nn.Module, keep: int = 0, uid: str = "e.0", **options: object) -> ExpertBackend:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1) if trained else None
    return ExpertBackend(uid, module, optimizer, args_schema=[SPEC], keep_activations=keep, **options)  # type: ignore[arg-type]


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
        loss = expert(inputs()).sum()
        backend.load_state_dict(old)
        loss.backward()
        loss = expert(inputs()).sum()
        backend.load_state_dict(old)
        loss.backward()  # once an expert
        assert expert.statistics().stale_backwards == 2
    (message,) = said(caplog)
    assert "after 1 changes, but its gradient that of the expert after 0: its server has gone back" in message


def test_a_number_that_a_forward_changes_counts(caplog: pytest.LogCaptureFixture) -> None:
    class Annealed(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(feedforward())
            self.temperature = 1.0

        def forward(self, x: Tensor) -> Tensor:
            self.temperature *= 0.9
            return super().forward(x) / self.temperature  # type: ignore[no-any-return]

    with calling(backend_of(Annealed())) as expert:
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
        after, y = gradient_here(module, x), inputs()
        y.data.copy_(x.data)
        expert(y).square().sum().backward()
        assert torch.allclose(y.grad, after, rtol=1e-12)  # type: ignore[arg-type]
        assert expert.statistics().stale_backwards == 0


def test_mixtures_count_and_warn_too(caplog: pytest.LogCaptureFixture) -> None:
    directory = Directory()
    backends = [backend_of(feedforward(), uid=f"e.{index}") for index in range(2)]
    with ExpertServer(backends, directory=directory):
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
    schema = Schema((SPEC,), {}, SPEC)
    verbs = [
        Verb(wire.INFO, lambda call: call.reply(payload=schema.packed)),
        Verb(wire.FORWARD, lambda call: call.reply(call.tensors, b"\xff")),
    ]
    directory = Directory()
    with (
        Server(verbs, role="experts") as strange,
        ExpertServer([backend_of(feedforward(), uid="e.0")], directory=directory),
    ):
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
    batch = inputs(8)
    parts = batch.detach().chunk(4)
    here = copy.deepcopy(nn.Sequential(first, modules[0], last))
    torch.cat([here(part) for part in parts]).square().sum().backward()
    directory = Directory()
    backends = [backend_of(modules[0], keep), backend_of(modules[1], keep, uid="m.0")]
    with ExpertServer(backends, directory=directory):
        expert = RemoteExpert("e.0", directory)
        mixture = RemoteMixtureOfExperts(4, [1], directory, "m", k_best=1).double()
        with Pipe(nn.Sequential(first, expert, last), [2, 1], chunks=4, checkpoint=checkpoint) as pipe:
            pipe(batch).square().sum().backward()
        counted = expert.statistics()
        assert (counted.calls, counted.stale_backwards) == (4, 0 if keep else 3)
        if keep:
            for mine, theirs in zip(first.parameters(), here[0].parameters(), strict=True):
                assert torch.allclose(mine.grad, theirs.grad, rtol=1e-9)  # type: ignore[arg-type]
        assert modules[0][1].num_batches_tracked == 4
        with Pipe(nn.Sequential(feedforward(), mixture, last), [2, 1], chunks=4, checkpoint=checkpoint) as pipe:
            for _ in range(2):
                pipe(batch).square().sum().backward()
        counted = mixture.statistics()
        assert (counted.calls, counted.stale_backwards) == (8, 0 if keep else 6)
        assert modules[1][1].num_batches_tracked == 8
