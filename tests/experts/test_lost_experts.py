"""Experts that do not fit, do not answer, or go: each is one expert less, never the end of a mixture."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_modules import expert_of, served
from torch import Tensor, nn

from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError, PeerLost, SchemaError
from anabranch.experts import Directory, DirectoryServer, ExpertBackend, RemoteMixtureOfExperts, wire
from anabranch.experts.client.finder import ExpertFinder, FailureBackoff
from anabranch.tensors import TensorSpec
from anabranch.testing import FakeClock
from anabranch.transport import Call, Server, Verb, pack
from waiting import join


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


class Raises(nn.Module):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError(self.text)


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.long()


@contextmanager
def serving(*backends: ExpertBackend) -> Iterator[Directory]:
    """Each on a server of its own."""
    directory = Directory()
    with ExitStack() as stack:
        for backend in backends:
            stack.enter_context(served(backend, directory=directory, drain_seconds=0.1))
        yield directory


def linear(index: int, inputs: int = 8, outputs: int = 8) -> ExpertBackend:
    return expert_of(nn.Linear(inputs, outputs), inputs, f"ffn.{index}", optimizer=None)


def mixing(directory: Directory, size: int, k_best: int, **options: Any) -> RemoteMixtureOfExperts:
    return RemoteMixtureOfExperts(8, [size], directory, "ffn", k_best=k_best, **options)


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
    modules: dict[int, nn.Module] = {index: backend.module for index, backend in enumerate(good)}
    with serving(*good) as directory:
        moe, x = mixing(directory, 4, 2, k_min=2), torch.randn(6, 8)
        with torch.no_grad():
            moe.gate.bias[3] = 5.0  # the best of all
        assert torch.allclose(moe(x), by_hand(moe, modules, x, 2), atol=1e-6)
        with served(misfit, directory=directory, drain_seconds=0.1), caplog.at_level(logging.WARNING):
            for _ in range(5):
                output = moe(x)
                assert torch.allclose(output, by_hand(moe, modules, x, 2), atol=1e-6)
                output.sum().backward()
        assert moe.statistics().failed == {"SchemaError": 1}
        assert moe.statistics().avoided == {"ffn.3"}
        clock.advance(0.6)
        with served(linear(3), directory=directory, drain_seconds=0.1):
            assert moe(x).shape == (6, 8)  # the same name, served as the others are
        assert moe.statistics().failed == {"SchemaError": 1}
        assert moe.statistics().rows["ffn.3"] == 6
    (record,) = caplog.records
    for text in ("ffn.3", "returns (rows, 12) float32, the others take", "return (rows, 8) float32"):
        assert text in record.message


def test_the_form_of_a_mixture_is_that_of_most_experts_first_called_that_take_its_inputs() -> None:
    backends = [linear(0, 8, 12), *map(linear, range(1, 4))]
    x = torch.randn(6, 8)
    with serving(*backends) as directory:
        moe = mixing(directory, 4, 4)
        modules = {index: backends[index].module for index in range(1, 4)}
        assert torch.allclose(moe(x), by_hand(moe, modules, x, 3), atol=1e-6)
        assert mixing(directory, 1, 1)(x).shape == (6, 12)
        with pytest.raises(SchemaError, match="expected arguments"):
            moe(x, x)  # a mistake of the caller's is not the experts'
        assert moe.statistics().failed == {"SchemaError": 1}
    for other in (linear(0, 12, 12), expert_of(Rounded(), 8, "ffn.0")):
        good = linear(1)
        with serving(other, good) as directory:
            moe = mixing(directory, 2, 1)
            with torch.no_grad():
                moe.gate.bias[0] = 9.0  # the only one that is called at first does not fit
            assert torch.allclose(moe(x), good.module(x), atol=1e-6)


def test_a_mixture_whose_experts_have_all_changed_takes_their_new_form() -> None:
    with serving(linear(0), linear(1)) as directory, ExitStack() as stack:
        moe, x = mixing(directory, 2, 2), torch.randn(3, 8)
        assert moe(x).shape == (3, 8)
        for index in range(2):
            stack.enter_context(served(linear(index, 8, 5), directory=directory, drain_seconds=0.1))
        assert moe(x).shape == (3, 5)


def test_experts_whose_answers_travel_otherwise_mix() -> None:
    """One was left out, with a warning that showed two equal schemas."""
    formats: list[dict[str, Any]] = [{}, {"compression": "float16"}, {"requires_grad": False}]
    backends = [
        expert_of(Times(i + 1.0), 8, f"ffn.{i}", optimizer=None, outputs_schema=TensorSpec(8, **how))
        for i, how in enumerate(formats)
    ]
    with serving(*backends) as directory:
        moe, x = mixing(directory, 3, 3), torch.randn(5, 8, requires_grad=True)
        output = moe(x)
        assert torch.allclose(output, by_hand(moe, {i: b.module for i, b in enumerate(backends)}, x, 3), atol=1e-2)
        output.sum().backward()
        assert moe.statistics().failed == {}


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, ::2]


def test_sizes_that_vary_otherwise_than_most_others_are_left_out() -> None:
    spec = TensorSpec(None, 8)
    backends = [
        expert_of(Halved() if i == 1 else Times(2.0), uid=f"ffn.{i}", args_schema=[spec], outputs_schema=spec)
        for i in range(3)
    ]
    with serving(*backends) as directory:
        moe, x = mixing(directory, 3, 3), torch.randn(4, 6, 8, requires_grad=True)
        output = moe(x)
        assert torch.allclose(output, 2 * x, atol=1e-6)
        output.sum().backward()
        assert x.grad is not None
        assert torch.allclose(x.grad, torch.full_like(x, 2.0), atol=1e-3)
        assert moe.statistics().failed == {"SchemaError": 1}


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 3e38), (torch.float64, 1e19), (torch.float16, 6.5e4)])
def test_a_finite_answer_that_overflows_in_the_gate_is_missing(dtype: torch.dtype, factor: float) -> None:
    backends = [expert_of(Times(f).to(dtype), 8, f"ffn.{i}", optimizer=None) for i, f in enumerate([2.0, 2.0, factor])]
    with serving(*backends) as directory:
        moe, x = mixing(directory, 3, 3).to(dtype), torch.ones(5, 8, dtype=dtype)
        output = moe(x)
        assert torch.allclose(output, 2 * x, rtol=1e-3)
        output.sum().backward()
        assert moe.gate.weight.grad is not None
        assert torch.isfinite(moe.gate.weight.grad).all()
        assert moe.statistics().failed == {"NonFinite": 1}


def test_a_gradient_that_overflows_is_missing() -> None:
    class Steep(Times):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0 + 3e38)
            return super().forward(x)

    with serving(expert_of(Times(1.0), 8), expert_of(Steep(1.0), 8, "ffn.1")) as directory:
        moe, x = mixing(directory, 2, 2), torch.ones(5, 8, requires_grad=True)
        moe(x).sum().backward()
        assert x.grad is not None
        assert x.grad.abs().max() < 10
        assert moe.statistics().failed == {"NonFinite": 1}


def test_an_expert_that_never_answers_a_backward_costs_two_timeouts_and_is_left_alone(clock: FakeClock) -> None:
    reluctant, waiting = linear(1), list[Call]()

    def forward(call: Call) -> None:
        header = pack(wire.OutputsHeader(frozenset(), 0, False))
        call.reply([output for output in reluctant.forward(*call.tensors) if output is not None], payload=header)

    verbs = [
        Verb("expert.info", lambda call: call.reply(payload=reluctant.schema.packed)),
        Verb("expert.forward", forward),
        Verb("expert.backward", waiting.append, once=True),
    ]
    with serving(linear(0)) as directory, Server(verbs, heartbeat=30.0, drain_seconds=0.01) as server:
        directory.announce(["ffn.1"], server.endpoint, ttl=60.0)
        moe = mixing(directory, 2, 2, backward_timeout=0.5)
        for _ in range(4):
            moe(torch.randn(4, 8)).sum().backward()
        assert moe.statistics().failed == {"DeadlineExceeded": 2}
        assert moe.statistics().avoided == {"ffn.1"}
        clock.advance(0.9)
        moe(torch.randn(4, 8)).sum().backward()
        clock.advance(0.9)  # the third break is twice as long
        assert moe.statistics().avoided == {"ffn.1"}
        for call in waiting:
            call.fail(RuntimeError("over"))


def test_failures_of_each_phase_are_counted_apart_and_breaks_are_as_long_as_what_failures_cost(
    clock: FakeClock,
) -> None:
    backoff = FailureBackoff(clock)
    for failures, seconds in ((2, 8.0), (20, 80.0)):
        for _ in range(failures):
            backoff.failed("ffn.0", "backward", seconds=8.0)
            backoff.answered("ffn.0", "forward")
        clock.advance(seconds - 0.1)
        assert backoff.now() == {"ffn.0"}
        clock.advance(0.2)
        assert backoff.now() == set()
    backoff.answered("ffn.0", "backward")
    for phase in ("cut off", "forward", "backward"):
        backoff.failed("ffn.0", phase)  # type: ignore[arg-type]
    assert backoff.now() == set()
    backoff.failed("ffn.0", "cut off")
    assert backoff.now() == {"ffn.0"}


def test_rows_whose_experts_fail_ask_the_next_best() -> None:
    broken = [expert_of(Raises("no luck"), 8, f"ffn.{i}", outputs_schema=TensorSpec(8)) for i in range(2)]
    alive, x = linear(2), torch.randn(30, 8)
    with serving(*broken, alive) as directory:
        moe = mixing(directory, 3, 1)
        assert torch.allclose(moe(x), alive.module(x), atol=1e-6)
        assert moe.statistics().failed == {"RemoteError": 2}


def test_text_of_an_expert_has_no_control_characters() -> None:
    rude = expert_of(Raises("\x1b[2J\x07 no luck\n twice"), 8, outputs_schema=TensorSpec(8))
    with serving(rude) as directory, pytest.raises(BoundaryError, match=r"\?\[2J\? no luck\n twice"):
        mixing(directory, 1, 1)(torch.randn(3, 8))


def test_too_few_experts_name_those_left_out() -> None:
    with serving(*(linear(index) for index in range(3)), linear(3, 8, 12)) as directory:
        moe = mixing(directory, 4, 4, k_min=4)
        for _ in range(2):  # then it is avoided, and not looked at again
            with pytest.raises(BoundaryError, match=r"ffn\.3 at .* is left out of the mixture: it takes .*k_min=4"):
                moe(torch.randn(6, 8))


# --- experts that go and come back, or were never there


def serve_in(directory: Any, *uids: str) -> Any:
    return served(*(expert_of(nn.Linear(8, 8), 8, uid, optimizer=None) for uid in uids), directory=directory)


@pytest.mark.parametrize("kind", ["memory", "remote", "another class"])
def test_a_wrong_prefix_is_named_with_what_the_directory_has(kind: str) -> None:
    with DirectoryServer() as names:
        directory: Any = Directory(names.endpoint) if kind == "remote" else names.directory
        if kind == "another class":  # as a RedisDirectory
            methods = ("announce", "withdraw", "lookup", "active", "announced")
            directory = SimpleNamespace(**{name: getattr(names.directory, name) for name in methods})
        with pytest.raises(BoundaryError, match=r"lists no expert ffm\.\[0:2\]; it lists none at all"):
            RemoteMixtureOfExperts(8, [2], directory, "ffm")(torch.ones(1, 8))
        with serve_in(directory, "ffn.0"):
            for x in (torch.ones(1, 8), torch.ones(1, 2, 8)):
                mixture = RemoteMixtureOfExperts(8, [2], directory, "ffm")
                started = time.monotonic()
                with pytest.raises(BoundaryError, match=r"lists no expert ffm\.\[0:2\]; it lists ffn\.\*") as caught:
                    mixture(x)
                assert "allow_zero_outputs" not in str(caught.value)
                assert time.monotonic() - started < mixture.forward_timeout / 2
        lenient = RemoteMixtureOfExperts(8, [2], directory, "ffm", allow_zero_outputs=True)
        with pytest.raises(BoundaryError, match="shape of their outputs is not known"):
            lenient(torch.ones(1, 8))


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_forward_waits_for_experts_that_are_gone_and_says_so_once(
    withdrawn: bool, least: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With two needed, one of the two is away; with one, both are."""
    directory, away = Directory(), ["ffn.1"] if least == 2 else ["ffn.0", "ffn.1"]
    mixture = mixing(directory, 2, 2, k_min=least, forward_timeout=60.0)
    patient = mixing(directory, 2, 2, k_min=least, allow_zero_outputs=True)
    x, outputs = torch.ones(3, 8), list[Tensor]()
    with ExitStack() as stack:
        if least == 2:
            stack.enter_context(serve_in(directory, "ffn.0"))
        with serve_in(directory, *away) as server:
            mixture(x)
            patient(x)
        if not withdrawn:
            directory.announce(away, server.endpoint, 60.0)
        stack.enter_context(caplog.at_level(logging.WARNING, "anabranch.experts"))
        assert patient(x).shape == (3, 8)  # at once
        waiting = threading.Thread(target=lambda: outputs.append(mixture(x)))
        waiting.start()
        while not any("waiting until they are back" in text for text in caplog.messages):
            waiting.join(timeout=0.001)
        assert waiting.is_alive()
        with serve_in(directory, *away):
            join(waiting)
            assert mixture.statistics().avoided == frozenset()
            mixture(x)
    assert outputs[0].shape == (3, 8)
    texts = [text for text in caplog.messages if "gone" in text or "back:" in text]
    assert [text for text in texts if ", ".join(away) in text] == texts
    assert len(texts) == 3  # gone for both mixtures, back for the one
    assert sum("waiting" in text for text in caplog.messages) == 1
    mixture.forward_timeout = 0.5
    with pytest.raises(BoundaryError):
        mixture(x)
    assert sum("waiting" in text for text in caplog.messages) == 2, "of the second outage"


def test_a_mixture_that_goes_on_without_an_expert_withdrawn_says_so_once_and_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory, x = Directory(), torch.ones(3, 8)
    mixture = RemoteMixtureOfExperts(8, [2, 2], directory, "ffn", k_best=4)
    with serve_in(directory, "ffn.0.0", "ffn.0.1"), caplog.at_level(logging.WARNING, "anabranch.experts"):
        for outage in range(2):
            with serve_in(directory, "ffn.1.0"):
                mixture(x)
                mixture(x)
            assert sum("back" in text for text in caplog.messages) == outage
            mixture(x)
            mixture(x)
    gone = "experts have gone: ffn.1.0 (the directory no longer lists them); the mixture goes on with the others"
    assert caplog.messages == [gone, "experts are back: ffn.1.0", gone]


def test_experts_that_stay_away_are_an_error_at_the_deadline_that_names_the_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, x = Directory(), torch.ones(3, 8)
    mixture = mixing(directory, 2, 2, k_min=2)
    with serve_in(directory, "ffn.0", "ffn.1") as server:
        mixture(x)
    mixture.forward_timeout = 1.0
    directory.announce(["ffn.0", "ffn.1"], server.endpoint, 60.0)
    with pytest.raises(BoundaryError, match="3 rows have fewer than 2 experts") as caught:
        mixture(x)
    for cure in ("lower k_min=2", "allow_zero_outputs=True", "anabranch run --experts N"):
        assert cure in str(caught.value)
    assert caught.value.elapsed is not None
    assert caught.value.elapsed > 0.9
    assert PeerLost.__name__ in mixture.statistics().failed

    def too_late(finder: ExpertFinder, deadline: Deadline) -> bool:
        raise deadline.error(peer="the directory", operation="directory.lookup")

    monkeypatch.setattr(ExpertFinder, "some_away", too_late)
    with serve_in(directory, "ffn.0"), pytest.raises(BoundaryError, match="3 rows have fewer than 2.*lower k_min=2"):
        mixing(directory, 2, 2, k_min=2)(x)


class Away:
    """A directory that does not answer while it is ``down``."""

    def __init__(self, directory: Directory) -> None:
        self.directory, self.down, self.asked = directory, False, 0

    def __getattr__(self, verb: str) -> Any:
        def ask(names: list[str]) -> Any:
            self.asked += 1
            if self.down:
                raise PeerLost("its process has ended", peer="the directory")
            return getattr(self.directory, verb)(names)

        return ask


def test_a_mixture_goes_on_with_known_experts_while_its_directory_is_down(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(3, 8)
    with serving(linear(0), linear(1)) as directory, caplog.at_level(logging.WARNING, "anabranch.experts"):
        away = Away(directory)
        mixture, another = (mixing(away, 2, 2) for _ in range(2))  # type: ignore[arg-type]
        output = mixture(x)
        away.down, away.asked = True, 0
        assert torch.equal(mixture(x), output)
        assert torch.equal(mixture(x), output)
        assert away.asked == 1, "it is asked again once a while has passed"
        with pytest.raises(PeerLost):
            another(x)  # which knows none
        away.down = False
        mixture._finder._asked_again_at = 0.0
        assert torch.equal(mixture(x), output)
    said = [text for text in caplog.messages if text.startswith("the directory does not answer")]
    assert len(said) == 1
    assert mixture._finder._asked_again_at is None
