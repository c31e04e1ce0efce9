"""An expert that does not fit or does not answer is one expert less, never the end of a mixture."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anabranch.errors import BoundaryError, SchemaError
from anabranch.experts import Directory, ExpertBackend, ExpertServer, RemoteMixtureOfExperts, wire
from anabranch.experts.client.finder import FailureBackoff
from anabranch.tensors import TensorSpec
from anabranch.testing import FakeClock
from anabranch.transport import Call, Server, Verb, pack


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """That of the breaks of experts that failed."""
    clock = FakeClock()
    monkeypatch.setattr("anabranch.experts.client.finder.FailureBackoff", lambda: FailureBackoff(clock))
    return clock


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@contextmanager
def serving(*backends: ExpertBackend) -> Iterator[Directory]:
    """Each on a server of its own."""
    directory = Directory()
    with ExitStack() as stack:
        for backend in backends:
            stack.enter_context(ExpertServer([backend], directory=directory, drain_seconds=0.1))
        yield directory


def linear(index: int, inputs: int = 8, outputs: int = 8) -> ExpertBackend:
    return ExpertBackend(f"ffn.{index}", nn.Linear(inputs, outputs), args_schema=[TensorSpec(inputs)])


def by_hand(moe: RemoteMixtureOfExperts, modules: dict[int, nn.Module], x: Tensor, k: int) -> Tensor:
    """The softmax over the best of ``modules``."""
    scores = moe.gate(x)[:, list(modules)]
    best = scores.topk(k, dim=1)
    answers = torch.stack([module(x) for module in modules.values()], dim=1)
    weights = best.values.softmax(dim=1)
    return (answers.gather(1, best.indices[:, :, None].expand(-1, -1, answers.shape[2])) * weights[:, :, None]).sum(1)


@pytest.mark.parametrize("misfit", [linear(3, 8, 12), linear(3, 12, 12)], ids=["outputs", "features"])
def test_an_expert_of_another_form_that_joins_is_left_out_and_the_next_best_is_called(
    misfit: ExpertBackend, caplog: pytest.LogCaptureFixture, clock: FakeClock
) -> None:
    good = [linear(index) for index in range(3)]
    with serving(*good) as directory:
        moe = RemoteMixtureOfExperts(8, [4], directory, "ffn", k_best=2, k_min=2)
        with torch.no_grad():
            moe.gate.bias[3] = 5.0  # the best of all
        modules = {index: copy.deepcopy(backend.module) for index, backend in enumerate(good)}
        x = torch.randn(6, 8)
        assert torch.allclose(moe(x), by_hand(moe, modules, x, 2), atol=1e-6)
        with ExpertServer([misfit], directory=directory, drain_seconds=0.1), caplog.at_level(logging.WARNING):
            for _ in range(5):
                output = moe(x)
                assert torch.allclose(output, by_hand(moe, modules, x, 2), atol=1e-6)
                output.sum().backward()
                modules = {index: copy.deepcopy(backend.module) for index, backend in enumerate(good)}
        assert moe.statistics().failed == {"SchemaError": 1}
        assert moe.statistics().avoided == {"ffn.3"}
        clock.advance(0.6)
        with ExpertServer([linear(3)], directory=directory, drain_seconds=0.1):
            assert moe(x).shape == (6, 8)  # the same name, served as the others are
        assert moe.statistics().failed == {"SchemaError": 1}
        assert moe.statistics().rows["ffn.3"] == 6
    (record,) = caplog.records
    assert "ffn.3" in record.message
    assert "returns (rows, 12) float32, the others take" in record.message
    assert "return (rows, 8) float32" in record.message


def test_the_form_of_a_mixture_is_that_of_most_experts_first_called_that_take_its_inputs() -> None:
    backends = [linear(0, 8, 12), *map(linear, range(1, 4))]
    with serving(*backends) as directory:
        moe = RemoteMixtureOfExperts(8, [4], directory, "ffn", k_best=4)
        modules = {index: backends[index].module for index in range(1, 4)}
        x = torch.randn(6, 8)
        assert torch.allclose(moe(x), by_hand(moe, modules, x, 3), atol=1e-6)
        alone = RemoteMixtureOfExperts(8, [1], directory, "ffn", k_best=1)
        assert alone(x).shape == (6, 12)
        with pytest.raises(SchemaError, match="expected arguments"):
            moe(x, x)  # a mistake of the caller's is not the experts'
        assert moe.statistics().failed == {"SchemaError": 1}
    integers = ExpertBackend("ffn.0", Rounded(), args_schema=[TensorSpec(8)])
    for other, good in ((linear(0, 12, 12), linear(1)), (integers, linear(1))):
        with serving(other, good) as directory:
            moe = RemoteMixtureOfExperts(8, [2], directory, "ffn", k_best=1)
            with torch.no_grad():
                moe.gate.bias[0] = 9.0  # the only one that is called at first does not fit
            assert torch.allclose(moe(x), good.module(x), atol=1e-6)


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.long()


def test_a_mixture_whose_experts_have_all_changed_takes_their_new_form() -> None:
    with serving(linear(0), linear(1)) as directory:
        moe = RemoteMixtureOfExperts(8, [2], directory, "ffn", k_best=2)
        x = torch.randn(3, 8)
        assert moe(x).shape == (3, 8)
        with ExitStack() as stack:
            for index in range(2):
                stack.enter_context(ExpertServer([linear(index, 8, 5)], directory=directory, drain_seconds=0.1))
            assert moe(x).shape == (3, 5)


def test_experts_whose_answers_travel_otherwise_mix() -> None:
    """One was left out, with a warning that showed two equal schemas."""
    formats: list[dict[str, Any]] = [{}, {"compression": "float16"}, {"requires_grad": False}]
    backends = [
        ExpertBackend(f"ffn.{i}", Times(i + 1.0), args_schema=[TensorSpec(4)], outputs_schema=TensorSpec(4, **how))
        for i, how in enumerate(formats)
    ]
    with serving(*backends) as directory:
        moe = RemoteMixtureOfExperts(4, [3], directory, "ffn", k_best=3)
        modules = {i: copy.deepcopy(backend.module) for i, backend in enumerate(backends)}
        x = torch.randn(5, 4, requires_grad=True)
        output = moe(x)
        assert torch.allclose(output, by_hand(moe, modules, x, 3), atol=1e-2)
        output.sum().backward()
        assert moe.statistics().failed == {}


def test_sizes_that_vary_otherwise_than_most_others_are_left_out() -> None:
    class Halved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, ::2]

    spec = TensorSpec(None, 8)
    backends = [
        ExpertBackend(f"ffn.{index}", Halved() if index == 1 else Times(2.0), args_schema=[spec], outputs_schema=spec)
        for index in range(3)
    ]
    with serving(*backends) as directory:
        moe = RemoteMixtureOfExperts(8, [3], directory, "ffn", k_best=3)
        x = torch.randn(4, 6, 8)
        x.requires_grad_()
        output = moe(x)
        assert torch.allclose(output, 2 * x, atol=1e-6)
        output.sum().backward()
        assert x.grad is not None
        assert torch.allclose(x.grad, torch.full_like(x, 2.0), atol=1e-3)
        assert moe.statistics().failed == {"SchemaError": 1}


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 3e38), (torch.float64, 1e19), (torch.float16, 6.5e4)])
def test_a_finite_answer_that_overflows_in_the_gate_is_missing(dtype: torch.dtype, factor: float) -> None:
    spec = TensorSpec(4, dtype=dtype)
    factors = [2.0, 2.0, factor]
    backends = [ExpertBackend(f"ffn.{i}", Times(f).to(dtype), args_schema=[spec]) for i, f in enumerate(factors)]
    with serving(*backends) as directory:
        moe = RemoteMixtureOfExperts(4, [3], directory, "ffn", k_best=3).to(dtype)
        x = torch.ones(5, 4, dtype=dtype)
        output = moe(x)
        assert torch.allclose(output, 2 * x, rtol=1e-3)
        output.sum().backward()
        assert moe.gate.weight.grad is not None
        assert torch.isfinite(moe.gate.weight.grad).all()
        assert moe.statistics().failed == {"NonFinite": 1}


def test_a_gradient_that_overflows_is_missing() -> None:
    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * 0 + 3e38

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Steep.apply(x)  # type: ignore[no-any-return,no-untyped-call]

    backends = [ExpertBackend(f"ffn.{i}", Module() if i else Times(1.0), args_schema=[TensorSpec(4)]) for i in range(2)]
    with serving(*backends) as directory:
        moe = RemoteMixtureOfExperts(4, [2], directory, "ffn", k_best=2)
        x = torch.ones(5, 4, requires_grad=True)
        moe(x).sum().backward()
        assert x.grad is not None
        assert x.grad.abs().max() < 10
        assert moe.statistics().failed == {"NonFinite": 1}


class Reluctant:
    """A server of an expert that answers forwards and never a backward."""

    def __init__(self, backend: ExpertBackend) -> None:
        self.backend = backend
        self.waiting: list[Call] = []
        verbs = [
            Verb("expert.info", lambda call: call.reply(payload=backend.schema.packed)),
            Verb("expert.forward", self._forward),
            Verb("expert.backward", self.waiting.append, once=True),
        ]
        self.server = Server(verbs, heartbeat=30.0, drain_seconds=0.01)

    def _forward(self, call: Call) -> None:
        outputs = self.backend.forward(*call.tensors)
        header = pack(wire.OutputsHeader(frozenset(), 0, False))
        call.reply([output for output in outputs if output is not None], payload=header)

    def __enter__(self) -> Reluctant:
        self.server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for call in self.waiting:
            call.fail(RuntimeError("over"))
        self.server.__exit__(None, None, None)


def test_an_expert_that_never_answers_a_backward_costs_two_timeouts_and_is_left_alone(clock: FakeClock) -> None:
    with serving(linear(0)) as directory, Reluctant(linear(1)) as reluctant:
        directory.announce(["ffn.1"], reluctant.server.endpoint, ttl=60.0)
        moe = RemoteMixtureOfExperts(8, [2], directory, "ffn", k_best=2, backward_timeout=1.0)
        for _ in range(6):
            moe(torch.randn(4, 8)).sum().backward()
        assert moe.statistics().failed == {"DeadlineExceeded": 2}
        assert moe.statistics().avoided == {"ffn.1"}
        clock.advance(1.9)
        moe(torch.randn(4, 8)).sum().backward()
        clock.advance(1.9)  # the third break is twice as long
        assert moe.statistics().avoided == {"ffn.1"}


def test_failures_of_each_phase_are_counted_apart_and_breaks_are_as_long_as_what_failures_cost(
    clock: FakeClock,
) -> None:
    backoff = FailureBackoff(clock)
    for _ in range(2):
        backoff.failed("ffn.0", "backward", seconds=8.0)
        backoff.answered("ffn.0", "forward")
    assert backoff.now() == {"ffn.0"}
    clock.advance(7.9)
    assert backoff.now() == {"ffn.0"}
    clock.advance(0.2)
    assert backoff.now() == set()
    for _ in range(20):
        backoff.failed("ffn.0", "backward", seconds=8.0)
    clock.advance(79.0)
    assert backoff.now() == {"ffn.0"}
    clock.advance(1.1)
    assert backoff.now() == set()
    backoff.answered("ffn.0", "backward")
    backoff.failed("ffn.0", "cut off")
    backoff.failed("ffn.0")
    backoff.failed("ffn.0", "backward")
    assert backoff.now() == set()
    backoff.failed("ffn.0", "cut off")
    assert backoff.now() == {"ffn.0"}


def test_rows_whose_experts_fail_ask_the_next_best() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no luck")

    spec = TensorSpec(8)
    broken = [ExpertBackend(f"ffn.{i}", Broken(), args_schema=[spec], outputs_schema=spec) for i in range(2)]
    alive = linear(2)
    with serving(*broken, alive) as directory:
        moe = RemoteMixtureOfExperts(8, [3], directory, "ffn", k_best=1)
        x = torch.randn(30, 8)
        assert torch.allclose(moe(x), alive.module(x), atol=1e-6)
        assert moe.statistics().failed == {"RemoteError": 2}


def test_text_of_an_expert_has_no_control_characters() -> None:
    class Rude(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("\x1b[2J\x07 no luck\n twice")

    spec = TensorSpec(8)
    with serving(ExpertBackend("ffn.0", Rude(), args_schema=[spec], outputs_schema=spec)) as directory:
        moe = RemoteMixtureOfExperts(8, [1], directory, "ffn", k_best=1)
        with pytest.raises(BoundaryError, match=r"\?\[2J\? no luck\n twice"):
            moe(torch.randn(3, 8))


def test_too_few_experts_name_those_left_out() -> None:
    with serving(*(linear(index) for index in range(3)), linear(3, 8, 12)) as directory:
        moe = RemoteMixtureOfExperts(8, [4], directory, "ffn", k_best=4, k_min=4)
        for _ in range(2):  # then it is avoided, and not looked at again
            with pytest.raises(BoundaryError, match=r"ffn\.3 at .* is left out of the mixture: it takes .*k_min=4"):
                moe(torch.randn(6, 8))
